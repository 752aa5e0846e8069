# SPDX-License-Identifier: Apache-2.0
"""A walk's rounds are to vLLM's own state what steps are without speculation: random walks, without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    process_dict_updates,
)
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder

from vllm_ext.engine.v1.row_states import RowStates, is_idle

VOCABULARY, START, END = 40, [1], [2, 3]
CPU = torch.device("cpu")


class Forbid(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """A user's own: the last token does not come again."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        def forbid(output: list[int], logits: Any) -> Any:
            changed = logits.clone()
            changed[output[-1:]] = -9.0
            return changed

        return forbid if params.extra_args else None


class Count(LogitsProcessor):  # type: ignore[misc]
    """A user's own, which is told of each token once: what it does depends on how often that was."""

    def __init__(self, *args: Any) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.outputs, batch_update, lambda params, prompt, output: output)
        self.lengths = {index: len(output) for index, output in self.outputs.items()}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(self.lengths)
        for index, length in self.lengths.items():
            logits[index, length % VOCABULARY] += 3.0
        return logits


class Sampling:
    """Requests as vLLM keeps them, and one row of each of some of them at a time."""

    def __init__(self, params: list[SamplingParams], seed: int) -> None:
        self.seed, self.params, count = seed, params, len(params)
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=count))
        reasoning = SimpleNamespace(reasoning_start_token_ids=START, reasoning_end_token_ids=END)
        self.holder = maybe_create_thinking_budget_state_holder(reasoning, count, 0, CPU, False)
        names = [f"request {index}" for index in range(count)]
        self.outputs: list[list[int]] = [[] for _ in params]
        prompts = [[7, 8, *(START if index % 2 else []), 9] for index in range(count)]
        states = [
            SimpleNamespace(sampling_params=each, prompt_token_ids=prompt, output_token_ids=output)
            for each, prompt, output in zip(params, prompts, self.outputs, strict=True)
        ]
        self.runner = SimpleNamespace(
            vllm_config=config,
            device=CPU,
            requests=dict(zip(names, states, strict=True)),
            input_batch=SimpleNamespace(req_ids=names, num_reqs=count),
        )
        added = list(zip(range(count), params, prompts, self.outputs, strict=True))
        update = BatchUpdate(batch_size=count, removed=[], added=added, moved=[])
        self.holder.sync_batch(update)
        self.processors = LogitsProcessors(
            kind(config, CPU, False) for kind in (*BUILTIN_LOGITS_PROCESSORS, Forbid, Count)
        )
        for processor in self.processors.all:
            processor.update_state(update)
        self.states = RowStates(self.runner)

    def begin_step(self) -> None:
        for processor in self.processors.all:
            processor.update_state(None)

    def draw(
        self, requests: list[int], places: list[int], outputs: list[list[int]], processors: Any
    ) -> list[int]:
        """The next token of each; a row's logits are a function of the request and its place in the output."""
        rows = [random.Random(f"{self.seed} {r} {p}") for r, p in zip(requests, places, strict=True)]
        logits = torch.tensor([[row.random() * 4 for _ in range(VOCABULARY)] for row in rows])
        for processor in (*processors.non_argmax_invariant, *processors.argmax_invariant):
            logits = processor.apply(logits)
        self.holder.update_state(outputs, None)
        tokens: list[int] = self.holder.apply_to_logits(logits, False, None).argmax(-1).tolist()
        return tokens


def one_by_one(params: list[SamplingParams], seed: int, length: int) -> list[list[int]]:
    plain = Sampling(params, seed)
    for place in range(length):
        plain.begin_step()
        requests = list(range(len(params)))
        drawn = plain.draw(requests, [place] * len(params), plain.outputs, plain.processors)
        for output, token in zip(plain.outputs, drawn, strict=True):
            output.append(token)
    return plain.outputs


def several_at_once(params: list[SamplingParams], seed: int, length: int) -> list[list[int]]:
    walks, chance = Sampling(params, seed), random.Random(seed)
    while min(map(len, walks.outputs)) < length:
        walks.begin_step()
        requests, emitted = list(range(len(params))), [[] for _ in params]  # type: list[int], list[list[int]]
        before = [len(output) for output in walks.outputs]
        processors, outputs = walks.processors, walks.outputs
        while requests:
            places = [len(walks.outputs[request]) for request in requests]
            for request, token in zip(
                requests, walks.draw(requests, places, outputs, processors), strict=True
            ):
                emitted[request].append(token)
            requests = [request for request in requests if chance.random() < 0.7]
            if requests:
                outputs = walks.states.grow(requests, [emitted[request] for request in requests])
                walks.states.budgets(walks.holder, requests)
                processors = walks.states.processors(walks.processors, requests, outputs)
        walks.states.close()
        assert [len(output) for output in walks.outputs] == before
        for output, tokens in zip(walks.outputs, emitted, strict=True):
            output.extend(tokens)
    return [output[:length] for output in walks.outputs]


KINDS: list[dict[str, Any]] = [
    {},
    {"thinking_token_budget": 5},
    {"thinking_token_budget": 0},
    {"thinking_token_budget": 3, "logit_bias": {START[0]: 2.0}},
    {"min_tokens": 12, "stop_token_ids": [4, 5, 6], "logit_bias": {4: 3.0}},
    {"extra_args": {"forbid": True}, "thinking_token_budget": 9},
    {"min_p": 0.2, "logit_bias": {2: -9.0, 11: 1.0}},
    {"thinking_token_budget": 2, "min_tokens": 9, "stop_token_ids": [2]},
]


@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_as_steps(seed: int) -> None:
    """Found: budgets of requests that have left the walk forced onto others' rows; any list that does not grow."""
    kinds = KINDS * 2
    random.Random(seed).shuffle(kinds)
    params = [SamplingParams(**kind) for kind in kinds[: 3 + 2 * seed]]
    expected = one_by_one(params, seed, 30)
    assert any(END[0] in output for output in expected)
    assert several_at_once(params, seed, 30) == expected


def test_who_is_idle() -> None:
    """A processor whose class says all that it does; of any other nobody knows."""

    class Loud(Forbid):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits + 1.0

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))
    kinds = (*BUILTIN_LOGITS_PROCESSORS, Forbid, Loud, Count)
    idle = [is_idle(kind(config, CPU, False)) for kind in kinds]
    assert idle == [True, True, True, True, False, False]
