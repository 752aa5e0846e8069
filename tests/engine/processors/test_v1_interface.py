# SPDX-License-Identifier: Apache-2.0
"""Logits processors of V1's interface on V2: what they are told is what V1 tells them. Without an engine."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import v1_processors
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor, MinTokensLogitsProcessor

from vllm_ext.engine.processors import v1_interface
from vllm_ext.engine.processors.v1_batch import V1Batch

VOCABULARY = 12
CONFIG = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))


def request(name: str, prompt: list[int], output: list[int], **params: Any) -> Any:
    return SimpleNamespace(
        req_id=name,
        prompt_len=len(prompt),
        prompt_token_ids=prompt,
        prefill_token_ids=[*prompt, *output],
        sampling_params=SamplingParams(**params),
    )


def rows(*chains: tuple[int, list[int], int]) -> Any:
    """A context with requests' chains: the slot, each row's token, and the first one's position."""
    count = [len(tokens) for _, tokens, _ in chains]
    return SimpleNamespace(
        expanded_idx_mapping=torch.tensor([slot for slot, tokens, _ in chains for _ in tokens]),
        expanded_local_pos=torch.tensor([place for length in count for place in range(length)]),
        input_ids=torch.tensor([token for _, tokens, _ in chains for token in tokens]),
        pos=torch.tensor([start + place for _, tokens, start in chains for place in range(len(tokens))]),
        idx_mapping_np=np.array([slot for slot, _, _ in chains]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_processor_knows_who_is_where(seed: int) -> None:
    """Requests come, go and come back, several in a step, and keep or change their slots."""
    draw, batch = random.Random(seed), V1Batch()
    known: dict[int, Any] = {}
    slots: dict[str, int] = {}
    for step in range(60):
        for name in draw.sample(sorted(slots), min(len(slots), draw.choice((0, 0, 1, 2, 5)))):
            del slots[name]
        free = [slot for slot in range(8) if slot not in slots.values()]
        draw.shuffle(free)
        new = [request(f"{step}-{slot}", [1, slot], [2]) for slot in free[: draw.choice((0, 0, 1, 3))]]
        if slots and draw.random() < 0.2:  # one comes back in its slot
            new.append(request(draw.choice(sorted(slots)), [3], [4, 5]))
        for each, slot in zip(new, free, strict=False):
            slots.setdefault(each.req_id, slot)
        update = batch.change(slots, new)
        assert (update is None) == (not new and len(slots) == len(known))
        process_dict_updates(known, update, lambda params, prompt, output: (prompt, output))
        assert sorted(known) == list(range(len(slots)))
        assert {member.name for member in batch.members} == set(slots)
        for place, member in enumerate(batch.members):
            assert known[place][1] is member.output
            assert batch.place(slots[member.name]) == place
        if update is not None:
            assert update.batch_size == len(slots)


class Told(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """Writes down what it is told, and forbids the last token."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.told: list[list[list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.outputs, batch_update, lambda params, prompt, output: output)
        self.told.append([list(output) for _, output in sorted(self.outputs.items())])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for place, output in self.outputs.items():
            logits[place, output[-1:]] = -float("inf")
        return logits


def adapter(*kinds: type[Any], serves: bool = True) -> Any:
    made = type("Made", (v1_interface.V1Processors,), {"kinds": kinds})
    processors = made(CONFIG, SimpleNamespace(device=torch.device("cpu")))
    if serves:
        processors.serve()
    return processors


def forbidden(logits: torch.Tensor) -> list[list[int]]:
    return [row.isinf().nonzero().flatten().tolist() for row in logits]


def test_depths_are_to_a_processor_what_steps_are() -> None:
    processors = adapter(Told)
    told = processors._unscaled[0]._processor.told
    processors.take({"a": 5, "b": 2}, [request("a", [1, 1], []), request("b", [1], [7])])
    assert told == []  # nothing new yet
    # The prompts' last rows; then a step with drafts, depth by depth: a's path has ended at the second.
    for ctx, last, expected in (
        (rows((2, [7], 1), (5, [1], 1)), [[7], []], [[], [7]]),
        (rows((2, [3], 2), (5, [4], 2)), [[3], [4]], [[4], [7, 3]]),
        (rows((2, [3, 8], 2), (5, [4, 9], 2)), [[], [8], [], [9]], [[4, 9], [7, 3, 8]]),
        (rows((2, [3, 8, 6], 2), (5, [4, 9, -1], 2)), [[], [], [6], [], [], []], [[4, 9], [7, 3, 8, 6]]),
        (rows((2, [5], 5), (5, [2], 4)), [[5], [2]], [[4, 9, 2], [7, 3, 8, 6, 5]]),
    ):
        logits = torch.zeros(len(ctx.pos), VOCABULARY)
        assert processors.apply(logits, ctx) is logits
        assert forbidden(logits) == last
        assert told[-1] == expected
    assert len(told) == 5  # once for each
    processors.take({"b": 2}, [])
    processors.take({"b": 2, "c": 5}, [request("c", [1], [])])
    processors.apply(torch.zeros(1, VOCABULARY), rows((5, [1], 0)))
    assert told[5:] == [[[7, 3, 8, 6, 5]], [[7, 3, 8, 6, 5], []]]
    with pytest.raises(AssertionError, match="3 tokens of request c were not seen"):
        processors.apply(torch.zeros(1, VOCABULARY), rows((5, [1], 3)))


def test_whom_it_concerns() -> None:
    kinds = (v1_processors.NoEcho, MinTokensLogitsProcessor, MinPLogitsProcessor, v1_processors.Gap)
    requests: dict[str, dict[str, Any]] = {
        "free": {"temperature": 0},
        "asks": {"temperature": 0, "extra_args": {"no_echo": True}},
        "min_tokens": {"temperature": 0, "min_tokens": 4},
        "min_p": {"min_p": 0.3},
        "min_p, greedy": {"min_p": 0.3, "temperature": 0},
        "seeded": {"seed": 3},
    }
    new = [request(name, [1], [], **params) for name, params in requests.items()]
    slots = {name: slot for slot, name in enumerate(requests)}

    def concerned(*kinds: type[Any], serves: bool = True) -> set[str]:
        processors = adapter(*kinds, serves=serves)
        processors.take(slots, new)
        return {name for name, slot in slots.items() if processors.is_under(slot)}

    assert concerned(*kinds[:3]) == {"asks", "min_tokens", "min_p"}
    assert concerned(*kinds) == {"asks", "min_tokens", "min_p", "seeded"}
    assert concerned(v1_processors.Sums) == set(requests)
    assert concerned(v1_processors.Sums, serves=False) == set()
    assert [v1_interface.concerns_all(kind) for kind in kinds] == [False, False, False, True]


def test_without_a_request_that_it_concerns_nothing_is_read() -> None:
    processors = adapter(v1_processors.NoEcho)
    processors.take({"a": 0}, [request("a", [1], [])])
    assert not processors.add_request(0, SamplingParams())
    processors.apply(torch.zeros(1, VOCABULARY), SimpleNamespace(idx_mapping_np=np.array([0])))


def test_what_leaves_the_likeliest_comes_behind_the_temperature() -> None:
    processors = adapter(v1_processors.Sums, v1_processors.Gap)
    asked = {"extra_args": {"gap": True}}
    new = [
        request("warm", [1], [], temperature=2.0, **asked),
        request("cold", [1], [], temperature=0, **asked),
    ]
    processors.take({"warm": 0, "cold": 1}, new)
    (last,) = processors.after_temperature
    assert last.is_under(0)
    assert not last.add_request(0, SamplingParams())
    logits = torch.arange(VOCABULARY, dtype=torch.float32).repeat(2, 1)
    ctx = rows((0, [1], 0), (1, [1], 0))
    assert forbidden(processors.apply(logits, ctx)) == [[], []]
    last.apply(logits, ctx)
    assert forbidden(logits) == [list(range(7)), []]  # 11 / 2 - 2 is 7 / 2
    assert logits[0, 7:].tolist() == [7, 8, 9, 10, 11]
    assert adapter(v1_processors.Sums).after_temperature == []


def test_a_name_says_which_they_are() -> None:
    names = ["v1_processors:Sums", "v1_processors:NoEcho"]
    path = v1_interface.name_of(names)
    made = v1_interface.load(path)
    assert made.kinds == [v1_processors.Sums, v1_processors.NoEcho]
    assert made is v1_interface.load(path)
    assert v1_interface.names_in(["another:Class", v1_processors.Sums, path]) == names
    assert pickle.loads(pickle.dumps(path)) == path
    made.validate_params(SamplingParams(extra_args={"sums": True}))
    with pytest.raises(ValueError, match="sums: True"):
        made.validate_params(SamplingParams(extra_args={"sums": 1.5}))
    with pytest.raises(AttributeError):
        _ = v1_interface.configured.other
