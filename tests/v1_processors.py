# SPDX-License-Identifier: Apache-2.0
"""Logits processors of a user's own by V1's interface, and each one's rule by V2's, for requests that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Interface


def asked(params: SamplingParams, name: str) -> bool:
    return bool((params.extra_args or {}).get(name))


class NoEcho(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """`v2_requests.NoEcho` by vLLM's adapter, with the prompt."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        def forbid(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            changed = logits.clone()
            changed[[*prompt[-2:], *output][-2:]] = -float("inf")
            return changed

        return forbid if asked(params, "no_echo") else None


def allowed(total: int, size: int) -> torch.Tensor:
    """By the sum of a text's tokens: which may come next."""
    return (torch.arange(size) + total) % 3 != 0


class Sums(LogitsProcessor):  # type: ignore[misc]
    """V1's whole interface, with a state that each token moves once: a token, and the sum of those before it."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.states: dict[int, list[Any]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("sums") not in (None, True):
            raise ValueError("sums: True or nothing")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self.states,
            batch_update,
            lambda params, prompt, output: [asked(params, "sums"), output, 0, sum(prompt)],
        )
        for state in self.states.values():
            _, output, seen, _ = state
            state[2] = len(output)
            state[3] += sum(output[seen:])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(self.states)
        for place, (wanted, _, _, total) in self.states.items():
            if wanted:
                logits[place, ~allowed(total, logits.shape[1])] = -float("inf")
        return logits


GAP = 2.0


class Gap(LogitsProcessor):  # type: ignore[misc]
    """Only what is near the likeliest, behind the temperature: which token is the likeliest stays."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.places: dict[int, bool] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self.places, batch_update, lambda params, prompt, output: asked(params, "gap") or None
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        result = logits.clone()
        for place in self.places:
            result[place, logits[place] < logits[place].max() - GAP] = -float("inf")
        return result


class _OnV2(V2Interface):  # type: ignore[misc]
    """A rule of a row, its text and its temperature, for plain V2: a row of each request."""

    key: str
    rule: Callable[[torch.Tensor, list[int], float], None]

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        self._asked: dict[int, float] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._asked.pop(req_idx, None)
        if asked(sampling_params, self.key):
            self._asked[req_idx] = sampling_params.temperature
        return req_idx in self._asked

    def apply(self, logits: Any, ctx: Any) -> Any:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if slot in self._asked:
                text = self._states.all_token_ids.gpu[slot, : int(self._states.total_len.gpu[slot])]
                type(self).rule(logits[row], text.tolist(), self._asked[slot])
        return logits


class V2Sums(_OnV2):
    key = "sums"

    @staticmethod
    def rule(row: torch.Tensor, text: list[int], temperature: float) -> None:
        row[~allowed(sum(text), len(row))] = -float("inf")


class V2Gap(_OnV2):
    key = "gap"

    @staticmethod
    def rule(row: torch.Tensor, text: list[int], temperature: float) -> None:
        if temperature:
            row[row / temperature < (row / temperature).max() - GAP] = -float("inf")


V1_NAMES = ["v1_processors:NoEcho", "v1_processors:Gap", "v1_processors:Sums"]
V2_NAMES = ["v2_requests:NoEcho", "v1_processors:V2Sums", "v1_processors:V2Gap"]
