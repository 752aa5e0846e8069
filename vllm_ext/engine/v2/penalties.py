# SPDX-License-Identifier: Apache-2.0
"""vLLM's penalties and bad words of the V2 runner, taught trees: rows are judged by their own path, in one launch.

vLLM's kernels take the rows before a row for its path, which in a chain they are. While the rows of a step's trees are
sampled (`TreeSpeculator.verifying`), ours take their place; at any other time vLLM's run.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_ext.engine.v2.speculators.base import TreeSpeculator
from vllm_ext.kernels import backends
from vllm_ext.kernels.path_penalties import forbid, penalise


class TreePenalties(PenaltiesState):  # type: ignore[misc]
    """vLLM's, which a finished sampler's own becomes."""

    speculator: TreeSpeculator

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """vLLM's, in place."""
        paths = self.speculator.verifying
        if paths is None or not self.use_penalty[ctx.idx_mapping_np].any():
            result: torch.Tensor = super().apply(logits, ctx)
            return result
        penalise(
            logits,
            ctx.expanded_idx_mapping,
            ctx.input_ids,
            ctx.expanded_local_pos,
            paths.bits,
            self.repetition_penalty.gpu,
            self.frequency_penalty.gpu,
            self.presence_penalty.gpu,
            self.prompt_bin_mask,
            self.output_bin_counts,
            backends.V2,
        )
        return logits


class TreeBadWords(BadWordsState):  # type: ignore[misc]
    """vLLM's, which a finished sampler's own becomes."""

    speculator: TreeSpeculator

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """vLLM's, in place."""
        paths = self.speculator.verifying
        most = int(self.num_bad_words.np[ctx.idx_mapping_np].max())
        if paths is None or not most:
            result: torch.Tensor = super().apply(logits, ctx)
            return result
        forbid(
            logits,
            ctx.expanded_idx_mapping,
            ctx.input_ids,
            ctx.expanded_local_pos,
            paths.parents,
            self.bad_word_token_ids.gpu,
            self.bad_word_offsets.gpu,
            self.num_bad_words.gpu,
            self.req_states.all_token_ids.gpu,
            self.req_states.prompt_len.gpu,
            self.req_states.total_len.gpu,
            most,
            backends.V2,
        )
        return logits
