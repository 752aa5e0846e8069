# SPDX-License-Identifier: Apache-2.0
"""Paired requests in vLLM's V2 runner: a pair gets its primary's tokens and drafts; see `engine.paired_requests`.

The host knows before a step is sampled which rows stand behind the same tokens, and which requests have come without
their other half. What is drawn it does not know: on the device a pair's outcome becomes its primary's, and that of
requests without their other half is taken back, with all of their rows. Nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_ext.engine.recurrent.device_rows import to_device
from vllm_ext.engine.steering.paired_rows import PairedRows
from vllm_ext.kernels.device_trees import SlotTrees, Walked

if TYPE_CHECKING:
    from vllm_ext.engine.steering.aux_logits import StepAuxLogits


class _Step(NamedTuple):
    """Of one step, int64 on the device: places in the batch, rows among those with logits, slots."""

    primaries: torch.Tensor  # [pairs]
    pairs: torch.Tensor
    primary_rows: torch.Tensor  # [rows of all pairs]
    pair_rows: torch.Tensor
    primary_slots: torch.Tensor  # [pairs]
    pair_slots: torch.Tensor
    held: torch.Tensor  # [requests without their other half]
    held_rows: torch.Tensor  # [rows of theirs]
    num_held_rows: torch.Tensor  # [those requests]


class PairedSteps:
    """Which requests of the runner are pairs, and what becomes of them in a step.

    Args:
        aux_logits: what rules read.
        device: of the runner.
    """

    def __init__(self, aux_logits: StepAuxLogits, device: torch.device) -> None:
        self.known = PairedRows()
        self.num_apart = 0  # of the step, pairs and requests that are held
        self._aux_logits, self._device = aux_logits, device
        self._step: _Step | None = None

    def begin(self, input_batch: Any) -> None:
        """A step is about to be sampled.

        Args:
            input_batch: vLLM's.
        """
        self._step, self.num_apart = None, 0
        if not self.known:
            return
        done = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        row_start = input_batch.cu_num_logits_np.tolist()
        rows = self.known.begin(
            {name: place for place, name in enumerate(input_batch.req_ids)},
            row_start,
            (done >= input_batch.prefill_len_np).tolist(),
        )
        self._aux_logits.pair_rows = self._index(rows)
        held, together = self.known.held, self.known.pairs
        self.num_apart = len(held) + len(together)
        if not self.num_apart:
            return

        def rows_of(requests: list[int]) -> list[int]:
            return [row for place in requests for row in range(row_start[place], row_start[place + 1])]

        primaries, pairs = ([pair[side] for pair in together] for side in (0, 1))
        slots = input_batch.idx_mapping_np
        self._step = _Step(
            *map(self._index, (primaries, pairs, rows_of(primaries), rows_of(pairs))),
            *map(self._index, (slots[primaries], slots[pairs])),
            *map(self._index, (held, rows_of(held), [row_start[i + 1] - row_start[i] for i in held])),
        )

    def _index(self, numbers: Any) -> torch.Tensor:
        return to_device(numbers, torch.int64, self._device)

    def read(self, logits: torch.Tensor) -> None:
        """The step's logits ``[rows, vocab]`` are there, and no rule has changed them yet."""
        self._aux_logits.logits_are(logits)

    def settle(self, sampled: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Give pairs what their primaries got, and requests without their other half nothing, in place.

        Args:
            sampled: int64 ``[requests, most]``.
            num_sampled: int32 ``[requests]``.
            num_rejected: int32 ``[requests]`` rows that will be read again.
        """
        if (step := self._step) is None:
            return
        for values in (sampled, num_sampled, num_rejected):
            values.index_copy_(0, step.pairs, values[step.primaries])
        num_sampled.index_fill_(0, step.held, 0)
        num_rejected.index_copy_(0, step.held, step.num_held_rows.to(num_rejected.dtype))

    def settle_walk(self, walked: Walked, parents: torch.Tensor, totals: torch.Tensor) -> None:
        """Likewise, of a step with drafts.

        Args:
            walked: of the step, changed.
            parents: int32 ``[rows]``, see `RowLayout`.
            totals: int64 ``[4]``, see `kernels.device_trees.walk`; those of a pair and of who is held do not count.
        """
        if (step := self._step) is None:
            return
        apart = walked.num_emitted[torch.cat([step.pairs, step.held])].to(torch.int64)
        nodes = parents[torch.cat([step.pair_rows, step.held_rows])] >= 0
        counted = nodes.sum(), (apart - 1).clamp(min=0).sum(), apart.sum(), (apart > 0).sum()
        totals.sub_(torch.stack(counted))
        self.settle(walked.emitted, walked.num_emitted, walked.num_rejected)
        walked.path.index_copy_(0, step.pairs, walked.path[step.primaries])
        walked.accepted.index_copy_(0, step.pair_rows, walked.accepted[step.primary_rows])
        walked.accepted.index_fill_(0, step.held_rows, 0)

    def share_drafts(self, trees: SlotTrees, tokens: torch.Tensor) -> torch.Tensor:
        """Pairs of the step verify what their primaries do.

        Args:
            trees: of all slots, changed.
            tokens: int64 ``[requests, nodes]`` drafts, in the batch's order.

        Returns:
            the tokens with these.
        """
        if (step := self._step) is None:
            return tokens
        for values in trees:
            values.index_copy_(0, step.pair_slots, values[step.primary_slots])
        return tokens.index_copy(0, step.pairs, tokens[step.primaries])


class PairedSampler:
    """Mixin in front of vLLM's sampler, where a rule reads pairs: of steps without drafts."""

    halves: PairedSteps

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        self.halves.read(logits)
        output = super().__call__(logits, input_batch)  # type: ignore[misc]
        self.halves.settle(output.sampled_token_ids, output.num_sampled, output.num_rejected)
        return output
