# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers' part of a step on the V1 runner: which requests are ours, and what they have pending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.recurrent.rows import Pending, decoding, recurrent_rows
from vllm_ext.engine.tree_layers import recurrent_groups
from vllm_ext.engine.tree_layout import StepTrees

StockMetadata = Callable[[Any, Any, Any, torch.Tensor, torch.Tensor], tuple[Any, torch.Tensor]]


class RecurrentSteps:
    """Of a runner whose model has recurrent layers.

    Args:
        groups: the runner's ``attn_groups``, once the caches are bound.
    """

    def __init__(self, groups: Any) -> None:
        self.groups = recurrent_groups(groups)
        self.pending = Pending()

    def mark(
        self, trees: StepTrees, batch: Any, metadata: dict[str, Any], common: Any, stock_of: StockMetadata
    ) -> None:
        """Give recurrent layers the step instead of vLLM's metadata.

        Args:
            trees: of the step.
            batch: the runner's ``input_batch``.
            metadata: by layer name, changed.
            common: vLLM's, of no group in particular.
            stock_of: the runner's, for the requests whose prompts are computed.
        """
        if not self.groups:
            return
        ours = decoding(trees)
        taken = [
            self.pending.take(name, context)
            for name, context in zip(batch.req_ids, trees.context, strict=True)
        ]
        if not len(ours):
            return
        device = batch.block_table[self.groups[0][0]].get_device_tensor(1).device
        step = recurrent_rows(trees, ours, [taken[i] for i in ours], device)
        others = np.setdiff1d(np.arange(len(trees.context)), ours)
        index = torch.from_numpy(ours).to(device)
        for group_id, group in self.groups:
            table = batch.block_table[group_id]
            blocks = table.get_device_tensor(len(trees.context))
            stock = stock_rows = None
            if len(others):
                stock, stock_rows = stock_of(others, group, common, blocks, table.slot_mapping.gpu)
            rows = step.over(blocks[index, 0], stock, stock_rows)
            for name in group.layer_names:
                metadata[name] = rows
