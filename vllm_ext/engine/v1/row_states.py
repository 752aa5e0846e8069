# SPDX-License-Identifier: Apache-2.0
"""What vLLM's V1 sampler keeps of each request of the batch, for the rows of a walk's later rounds.

vLLM keeps logits processors and thinking budgets by place in the batch, and tells them once a step of the tokens that
are new. A walk samples some requests several times in a step. In each of its rounds the lists of output tokens, which
are vLLM's own and which processors hold, have grown by what the walk has put out; so every round is to them what a step
is without speculation, and `RowStates.close` takes the tokens back, which vLLM then adds by itself.

No processor is made for a round. vLLM's own three are made once and reset by vLLM's own updates; those of the user are
the ones of the batch, asked for the rows that the round has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessors,
    MoveDirectionality,
)
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder

from vllm_ext.engine.processors.v1_interface import asks_each
from vllm_ext.engine.v1.logits_processor import RuleProcessor

IDLE: dict[type[Any], Callable[[Any], bool]] = {
    MinTokensLogitsProcessor: lambda processor: not processor.min_toks,
    LogitBiasLogitsProcessor: lambda processor: not processor.biases,
    MinPLogitsProcessor: lambda processor: not processor.min_p_count,
}


def is_idle(processor: Any) -> bool:
    """Whether a logits processor has nothing to do for any request of the batch; of one that is not known, no."""
    if isinstance(processor, RuleProcessor):
        return processor.is_idle
    if asks_each(type(processor)):
        return not processor.req_info
    # By its very class: what a subclass of the user's does is not known.
    return type(processor) in IDLE and IDLE[type(processor)](processor)


def has_thinking_budget(metadata: Any) -> bool:
    """Whether a request of the batch has one."""
    holder = metadata.thinking_budget_state_holder
    return holder is not None and holder.has_tracked_requests()


class RowStates:
    """Of one runner; a walk ends with `close`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._own = {kind: kind(runner.vllm_config, runner.device, PIN_MEMORY) for kind in IDLE}
        self._known = dict.fromkeys(IDLE, 0)  # how many requests each of them has been told of
        self._grown: dict[
            int, tuple[list[int], int]
        ] = {}  # by batch index, output and its length before the walk
        self._moved: list[tuple[int, int]] = []  # thinking budgets' places, from and to
        self._holder: Any = None  # whose places these are

    def close(self) -> None:
        """The walk has ended: everything stands where it stood before it."""
        self._settle()
        for output, length in self._grown.values():
            del output[length:]
        self._grown.clear()

    def grow(self, requests: Sequence[int], emitted: Sequence[Sequence[int]]) -> list[list[int]]:
        """Add the last token that the walk has put out to each request's output.

        Args:
            requests: batch indices.
            emitted: what the walk has put out for each, one token more than in the round before.

        Returns:
            The lists, vLLM's own.
        """
        names, states = self._runner.input_batch.req_ids, self._runner.requests
        outputs = []
        for request, tokens in zip(requests, emitted, strict=True):
            output: list[int] = states[names[request]].output_token_ids
            self._grown.setdefault(request, (output, len(output)))
            output.append(tokens[-1])
            outputs.append(output)
        return outputs

    def budgets(self, holder: Any, requests: Sequence[int]) -> None:
        """Put the thinking budgets of some requests into the first places, in their order, and all others behind.

        Args:
            holder: vLLM's ThinkingBudgetStateHolder.
            requests: batch indices, ascending.
        """
        self._settle()
        count, there = self._runner.input_batch.num_reqs, set(requests)
        self._moved = [(index, count + index) for index in range(count) if index not in there]
        self._moved += [(old, new) for new, old in enumerate(requests) if new != old]
        self._holder = holder
        self._move(self._moved)

    def processors(
        self, whole: LogitsProcessors, requests: Sequence[int], outputs: Sequence[list[int]]
    ) -> LogitsProcessors:
        """The batch's logits processors for one row of each of some requests, those that have something to do.

        Args:
            whole: the batch's.
            requests: batch indices, ascending.
            outputs: of `grow`.
        """
        found = LogitsProcessors()
        for into, stock in (
            (found.argmax_invariant, whole.argmax_invariant),
            (found.non_argmax_invariant, whole.non_argmax_invariant),
        ):
            into.extend(self._of(each, requests, outputs) for each in stock if not is_idle(each))
        return found

    def _of(self, processor: Any, requests: Sequence[int], outputs: Sequence[list[int]]) -> Any:
        if isinstance(processor, RuleProcessor):
            return processor.behind(requests, outputs)
        if type(processor) in IDLE:
            return self._reset(type(processor), requests, outputs)
        if asks_each(type(processor)):
            return _Each(processor.req_info, requests)
        processor.update_state(None)
        return _Spread(processor, requests, self._runner.input_batch.num_reqs)

    def _reset(self, kind: type[Any], requests: Sequence[int], outputs: Sequence[list[int]]) -> Any:
        states = [self._runner.requests[self._runner.input_batch.req_ids[request]] for request in requests]
        added = [
            (place, state.sampling_params, state.prompt_token_ids, output)
            for place, (state, output) in enumerate(zip(states, outputs, strict=True))
        ]
        removed = list(range(len(requests), self._known[kind]))
        self._known[kind] = len(requests)
        own = self._own[kind]
        own.update_state(BatchUpdate(batch_size=len(requests), removed=removed, added=added, moved=[]))
        return own

    def _settle(self) -> None:
        self._move([(new, old) for old, new in reversed(self._moved)])
        self._moved = []

    def _move(self, places: Sequence[tuple[int, int]]) -> None:
        if places:
            moved = [(old, new, MoveDirectionality.UNIDIRECTIONAL) for old, new in places]
            size = self._runner.input_batch.num_reqs
            self._holder.sync_batch(BatchUpdate(batch_size=size, removed=[], added=[], moved=moved))


class _Each:
    """What a processor of vLLM's adapter does, for one row of each of some requests."""

    def __init__(
        self, calls: dict[int, Callable[[torch.Tensor], torch.Tensor]], requests: Sequence[int]
    ) -> None:
        self._calls = {place: calls[request] for place, request in enumerate(requests) if request in calls}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for place, call in self._calls.items():
            row = logits[place]
            result = call(row)
            if result is not row:
                logits[place] = result
        return logits


class _Spread:
    """A processor that knows the whole batch, for one row of each of some requests; the others' rows are zero."""

    def __init__(self, processor: Any, requests: Sequence[int], num_requests: int) -> None:
        self._processor, self._requests, self._num_requests = processor, list(requests), num_requests

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self._requests) == self._num_requests:
            result: torch.Tensor = self._processor.apply(logits)
            return result
        rows = torch.tensor(self._requests, device=logits.device)
        whole = logits.new_zeros((self._num_requests, logits.shape[1]))
        whole[rows] = logits
        result = self._processor.apply(whole)[rows]
        return result


def sample_rows_alone(runner: Any) -> None:
    """Thinking budgets as vLLM has them without speculation: a call of the sampler has one row of each request.

    Where the blocks' sizes are not what it thought, vLLM makes the batch again when it binds the caches.
    """
    runner.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
        runner.vllm_config.reasoning_config, runner.max_num_reqs, 0, runner.device, PIN_MEMORY
    )
