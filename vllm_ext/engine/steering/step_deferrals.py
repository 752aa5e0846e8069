# SPDX-License-Identifier: Apache-2.0
"""Tokens that rules put off, in vLLM's V2 runner; see `scheduler.deferred`, which lets their requests ask again.

Rules that do so read tokens: they are applied on the host, which so knows whose token it is. On the device that token
is taken back, with the row that it was drawn from, so that the next step reads the token before it again. vLLM keys
noise by position: what is drawn then is what would have been drawn now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_ext.engine.recurrent.device_rows import to_device
from vllm_ext.kernels.device_trees import Walked
from vllm_ext.samplers.steering import Deferral


class StepDeferrals:
    """Of the step that is sampled, by slot of vLLM's request state."""

    def __init__(self) -> None:
        self.unread: set[int] = (
            set()
        )  # requests that get no token anyway: more of their prompts is to be read
        self.found: dict[int, Deferral | None] = {}  # those whose token is put off; None: a rule waits

    def begin(self, input_batch: Any) -> None:
        """A step is about to be sampled.

        Args:
            input_batch: vLLM's.
        """
        done = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        self.unread = set(input_batch.idx_mapping_np[done < input_batch.prefill_len_np].tolist())
        self.found = {}

    def of_requests(self, slots: Mapping[str, int]) -> dict[str, Deferral | None]:
        """Those of the step, by request id.

        Args:
            slots: by request id.
        """
        return {name: self.found[slot] for name, slot in slots.items() if slot in self.found}

    def places(self, slots: Iterable[int]) -> list[int]:
        """Which of some requests they are, by index.

        Args:
            slots: of the requests.
        """
        return [place for place, slot in enumerate(slots) if slot in self.found] if self.found else []

    def settle(self, slots: Iterable[int], output: Any) -> None:
        """Take their tokens back, of a step without drafts.

        Args:
            slots: of the step's requests.
            output: vLLM's SamplerOutput, changed.
        """
        if places := self.places(slots):
            held = to_device(places, torch.int64, output.num_sampled.device)
            output.num_sampled.index_fill_(0, held, 0)
            output.num_rejected.index_fill_(0, held, 1)

    def settle_walk(
        self, slots: Iterable[int], row_start: torch.Tensor, walked: Walked, totals: torch.Tensor
    ) -> None:
        """Likewise, of requests whose trees were walked.

        Args:
            slots: of these requests.
            row_start: int32 ``[requests + 1]``.
            walked: of these, changed.
            totals: int64 ``[4]``, see `kernels.device_trees.walk`; changed.
        """
        if not (places := self.places(slots)):
            return
        held = to_device(places, torch.int64, row_start.device)
        left = walked.num_emitted[held] - 1
        last = left.to(torch.int64)
        rows = row_start[held] + walked.path[held, last]
        walked.accepted.index_fill_(0, rows.to(torch.int64), 0)
        walked.path[held, last] = left.to(walked.path.dtype)
        walked.emitted[held, last] = 0
        walked.num_emitted[held] = left
        walked.num_rejected[held] += 1
        ended = (left == 0).sum()  # requests of which this was no step
        counted = torch.stack(
            [ended.new_zeros(()), len(places) - ended, ended.new_full((), len(places)), ended]
        )
        totals.sub_(counted)


class DeferringSampler:
    """Mixin in front of vLLM's sampler: of steps without drafts."""

    deferrals: StepDeferrals

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        output = super().__call__(logits, input_batch)  # type: ignore[misc]
        self.deferrals.settle(input_batch.idx_mapping_np, output)
        return output
