# SPDX-License-Identifier: Apache-2.0
"""Heads that draft from the target's own hidden states, in vLLM's V1 worker: one pass of one row a request.

The row is the last one that was accepted, of this very step: nothing is kept between steps, so that preemption,
prefixes from the cache and chunked prompts are nothing to them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.passes import ModelPasses, Pass
from vllm_ext.engine.models import cpu_linear
from vllm_ext.engine.models.medusa_heads import MedusaHeads, read_shape
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.medusa import MedusaOptions
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.proposers.tree import Float32, Int32


class HeadPasses(ModelPasses):
    """Medusa's heads beside the target. See `vllm_ext.proposers.draft_model.DraftModel`.

    Args:
        vllm_config: the target's.
        options: which heads.
    """

    def __init__(self, vllm_config: Any, options: MedusaOptions) -> None:
        super().__init__()
        self._target_config, self._options = vllm_config, options
        self.num_heads = read_shape(options.model)[1].num_heads
        self.heads: MedusaHeads | None = None
        self._rows: Int32 = np.empty(
            0, np.int32
        )  # [batch_size] of the step's query, each request's last accepted
        self._of: dict[str, tuple[Int32, Float32]] = {}  # by request id, [num_heads, support] ids and log_q
        self._depths: dict[str, list[int]] = {}  # by request id, of its nodes asked for so far

    def load(self, target: Any) -> None:
        """See `ModelPasses`."""
        model = self._target_config.model_config
        device = torch.device(self._target_config.device_config.device)
        heads = MedusaHeads(self._options.model, model.dtype, device)
        if cpu_linear.wanted(self._target_config):
            for layer in heads.modules():
                if isinstance(layer, torch.nn.Linear):
                    cpu_linear.take_over(layer, remove_weight=True)
        self.heads = heads

    def verified(self, trees: StepTrees) -> None:
        """See `ModelPasses`."""
        last = [path[-1] if path else 0 for path in trees.accepted] or [0] * len(trees.query_row)
        self._rows = trees.query_row + np.array(last, np.int32)

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `ModelPasses`: all heads, over the last accepted rows of those that are drafted for."""
        self.passes.clear()
        self._of.clear()
        self._depths.clear()
        names = self._runner.input_batch.req_ids
        slots = [slot for slot, name in enumerate(names) if name in drafting]
        if not slots:
            return
        started = time.perf_counter()
        rows = torch.from_numpy(self._rows[slots].astype(np.int64)).to(self._runner.device)
        ids, log_q = self._distributions(self._runner.step_hidden[rows])
        for place, slot in enumerate(slots):
            self._of[names[slot]] = ids[:, place], log_q[:, place]
            self._depths[names[slot]] = []
        self.passes.append(Pass(time.perf_counter() - started, len(slots), len(slots)))

    def depths(self, request_id: str) -> Rows:
        """See `vllm_ext.proposers.medusa.AllDepths`."""
        return Rows(*self._of[request_id])

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`."""
        return self._rows_at(request_ids, [0] * len(request_ids))

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`: whatever the tokens are, those of a depth have one distribution."""
        depths = []
        for name, parent in zip(request_ids, parents, strict=True):
            known = self._depths[name]
            known.append(1 if parent == ROOT else known[parent] + 1)
            depths.append(known[-1])
        return self._rows_at(request_ids, depths)

    def _rows_at(self, request_ids: Sequence[str], depths: Sequence[int]) -> Rows:
        found = [self._of[name] for name in request_ids]
        ids = np.stack([ids[depth] for (ids, _), depth in zip(found, depths, strict=True)])
        return Rows(ids, np.stack([log_q[depth] for (_, log_q), depth in zip(found, depths, strict=True)]))

    def _distributions(self, hidden: torch.Tensor) -> tuple[Int32, Float32]:
        assert self.heads is not None
        with torch.inference_mode():
            ids, log_q = self.heads.distributions(hidden)
        return ids.cpu().numpy(), log_q.cpu().numpy()

    def calibration_pass(self, rows: int) -> None:
        """See `ModelPasses`."""
        model = self._target_config.model_config
        shape = rows, model.get_hidden_size()
        self._distributions(torch.randn(shape, dtype=model.dtype, device=self._runner.device))
