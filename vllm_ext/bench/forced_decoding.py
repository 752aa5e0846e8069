# SPDX-License-Identifier: Apache-2.0
"""Answers that are given, for `kv_quality`: what a model says of each token of a text that it reads as its own answer.

Log-probabilities that a request asks for are those before any logits processor.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

FORCED = "vllm_ext_forced"  # of a request's ``extra_args``: token ids


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """Of requests with such tokens the one whose turn it is, and no other."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._forced: dict[int, tuple[list[int], list[int]]] = {}  # by batch index, beside the output so far

    def is_argmax_invariant(self) -> bool:
        """Greedy answers are others too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        def forced(params: Any, _prompt: Any, output: list[int]) -> tuple[list[int], list[int]] | None:
            tokens = (params.extra_args or {}).get(FORCED)
            return None if tokens is None else (tokens, output)

        process_dict_updates(self._forced, batch_update, forced)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (tokens, output) in self._forced.items():
            if len(output) < len(tokens):
                logits[row] = -torch.inf
                logits[row, tokens[len(output)]] = 0.0
        return logits
