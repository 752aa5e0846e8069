# SPDX-License-Identifier: Apache-2.0
"""KV slots and counts of drafts, which vLLM has for its own methods only."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ext.config import speculative
from vllm_ext.proposers.draft_model import places_per_node
from vllm_ext.proposers.sampled import ASKED_PER_NODE, MOST_READ


class DraftSlots:
    """Reserves a KV slot for each node that a draft model reads and for the token before them.

    vLLM does so for its own draft models only, by method name.
    """

    vllm_config: Any
    no_lookahead = False  # of `DraftBlocks`

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots behind the tokens the target computes.

        A step may put out one token more than it had rows for, which is the root of the next tree.
        """
        if self.no_lookahead:
            return 0
        return 1 + self._per_node * int(self.vllm_config.speculative_config.num_speculative_tokens)

    @num_lookahead_tokens.setter
    def num_lookahead_tokens(self, value: int) -> None:
        """vLLM's constructor sets 0."""

    @functools.cached_property
    def _per_node(self) -> int:
        if self.vllm_config.use_v2_model_runner:
            return MOST_READ
        settings = speculative.from_vllm_config(self.vllm_config)
        return ASKED_PER_NODE if settings is None else places_per_node(settings.options)


class DraftCounts:
    """Keeps rows that are no drafts out of vLLM's counts: those it fills up with, and prompt tokens (`ppd`)."""

    vllm_config: Any

    @functools.cached_property
    def _vocab_size(self) -> int:
        return int(self.vllm_config.model_config.get_vocab_size())

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """vLLM's; a step with no real draft is none that drafted."""
        if (num_invalid_spec_tokens or {}).get(request_id) == num_draft_tokens:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(  # type: ignore[misc]
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's. It counts all rows as drafts, unless it is told of those that are none."""
        most = self._vocab_size
        drafts = scheduler_output.scheduled_spec_decode_tokens
        others = {
            name: sum(not 0 <= token < most for token in tokens)
            for name, tokens in drafts.items()
            if tokens and (tokens[0] < 0 or max(tokens) >= most)
        }
        if others:
            known = scheduler_output.num_invalid_spec_tokens or {}
            scheduler_output.num_invalid_spec_tokens = {**known, **others}
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
