# SPDX-License-Identifier: Apache-2.0
"""Token Recycling on the device, by its readable kernels: what it has seen it drafts, what was right counts.

That its tables and trees are the host's is tested where the kernels are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.kernels.device_trees import RowLayout
from vllm_ext.kernels.recycling import WalkedRows
from vllm_ext.proposers.joint_device import MIDDLES
from vllm_ext.proposers.token_recycling_device import DeviceTokenRecycling

VOCAB, WIDTH, NODES, SLOTS = 30, 3, 7, 4
CPU = torch.device("cpu")
ONES = torch.ones(SLOTS, dtype=torch.int32)


def drafter(longest: int = 4, tree: str = "dynamic") -> DeviceTokenRecycling:
    return DeviceTokenRecycling(NODES, WIDTH, longest, tree, VOCAB, SLOTS, CPU, "torch")


def text_of(*tokens: int) -> torch.Tensor:
    text = torch.full((SLOTS, 20), -1, dtype=torch.int32)
    text[1, : len(tokens)] = torch.tensor(tokens)
    return text


def propose(recycler: DeviceTokenRecycling, *tokens: int, chain: bool = False) -> list[int]:
    """Behind a text."""
    slots, zeros = torch.tensor([1]), 0 * ONES
    drafts = recycler.propose(text_of(*tokens), ONES * len(tokens), slots, zeros + chain, zeros + NODES)
    count = int((recycler.trees.parents[1] >= 0).sum())
    assert (drafts[0, count:] == tokens[-1]).all()  # padding
    return [int(token) for token in drafts[0, :count]]


def observe(recycler: DeviceTokenRecycling, text: list[int], best: list[int], put_out: int) -> None:
    """A step without drafts behind a text: what the target ranks highest, and what it put out."""
    logits = torch.full((1, VOCAB), -9.0)
    for rank, token in enumerate(best):
        logits[0, token] = 4.0 - 3.0 * rank
    verified = WalkedRows(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1]),
        torch.tensor(text[-1:], dtype=torch.int32),
        torch.tensor([len(text) - 1]),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([[put_out]]),
        torch.tensor([1], dtype=torch.int32),
    )
    recycler.observe(verified, None, text_of(*text), 0 * ONES, ONES, logits)


def test_what_was_ranked_highest_is_drafted() -> None:
    recycler = drafter(longest=1)
    assert propose(recycler, 5) == []
    observe(recycler, [5], [6, 7, 8], 6)
    observe(recycler, [6], [9, 10, 11], 9)
    assert propose(recycler, 3, 5)[:2] == [6, 9]  # sure: its best successor comes before its other siblings
    assert set(propose(recycler, 5)) == {6, 7, 8, 9, 10, 11}
    assert propose(recycler, 5, chain=True) == [6, 9]
    assert propose(drafter(tree="chain"), 5) == []
    observe(recycler, [5], [12, 13, 14], 12)
    assert set(propose(recycler, 5)) == {12, 13, 14}


def test_a_pair_knows_better_than_its_last_token() -> None:
    recycler = drafter()
    observe(recycler, [2, 5], [6, 7, 8], 6)
    observe(recycler, [3, 5], [9, 10, 11], 9)
    assert propose(recycler, 1, 2, 5)[0] == 6
    assert propose(recycler, 1, 3, 5)[0] == 9
    assert propose(recycler, 1, 4, 5)[0] == 9  # the last time that it was read


def test_text_goes_on_as_it_did() -> None:
    """What followed the longest context seen before; of all requests, prompts and outputs alike."""
    recycler = drafter()
    prompt = [1, 2, 3, 4, 7, 2, 3, 5]
    recycler.start(text_of(*prompt), torch.tensor([1]), ONES * len(prompt), len(prompt))
    assert propose(recycler, 9, 1, 2, 3)[0] == 4
    assert propose(recycler, 9, 7, 2, 3)[0] == 5
    observe(recycler, [8, 2, 3], [20, 21, 22], 20)
    assert propose(recycler, 9, 8, 2, 3)[0] == 20
    short = drafter(longest=1)
    short.start(text_of(*prompt), torch.tensor([1]), ONES * len(prompt), len(prompt))
    assert propose(short, 9, 1, 2, 3)[0] == propose(short, 9, 7, 2, 3)[0] == 5


def test_a_prompt_gives_first_successors() -> None:
    recycler = drafter(longest=1)
    prompt = [3, 4, 5, 3, 6]
    recycler.start(text_of(*prompt), torch.tensor([1]), ONES * 5, 5)
    assert propose(recycler, 4) == [5, 3, 6]
    recycler.start(text_of(9), torch.tensor([1]), ONES, 1)
    recycler.forget()
    assert propose(recycler, 4) == []


@pytest.mark.parametrize("right", [True, False])
def test_nodes_that_are_right_are_promised_more(right: bool) -> None:
    recycler = drafter(longest=1)
    observe(recycler, [5], [6, 7, 8], 6)
    propose(recycler, 5)
    group = int(recycler.trees.groups[1, 1])
    before = float(recycler.calibration.estimates.view(-1)[group])
    layout = RowLayout.of_size(SLOTS, SLOTS * (1 + NODES), CPU)
    for _ in range(30):
        layout.parents[:2] = torch.tensor([-1, 0])
        layout.groups[:2] = recycler.trees.groups[1, :2]
        verified = WalkedRows(
            torch.tensor([0, 2], dtype=torch.int32),
            torch.tensor([1]),
            torch.tensor([5, 6], dtype=torch.int32),
            torch.tensor([3, 4]),
            torch.tensor([1, int(right)], dtype=torch.int32),
            torch.tensor([[6, 7]]),
            torch.tensor([1 + right], dtype=torch.int32),
        )
        recycler.observe(verified, layout, text_of(1, 2, 3, 5), 0 * ONES, ONES, torch.zeros(2, VOCAB))
    after = float(recycler.calibration.estimates.view(-1)[group])
    assert (after > before + 0.1) if right else (after < before - 0.1)
    recycler.forget()
    assert float(recycler.calibration.estimates.view(-1)[group]) == before


def learnt(longest: int = 4) -> DeviceTokenRecycling:
    recycler = drafter(longest)
    prompt = [1, 2, 3, 4, 7, 2, 3, 5]
    recycler.start(text_of(*prompt), torch.tensor([1]), ONES * len(prompt), len(prompt))
    observe(recycler, [2, 5], [6, 7, 8], 6)
    observe(recycler, [8, 2, 3], [20, 21, 22], 20)
    counts = recycler.calibration
    counts.hits[0, 1, 0] //= 2
    counts.estimates.copy_(counts.hits.float() / counts.trials.float())
    return recycler


def test_what_was_saved_is_drafted() -> None:
    before, after = learnt(), drafter()
    observe(after, [5], [1, 2], 1)  # what it knows already is gone
    after.load_state_dict(before.state_dict())
    for text in ([9, 1, 2, 3], [9, 8, 2, 3], [1, 2, 5], [4, 2, 5], [5], [6]):
        assert propose(after, *text) == propose(before, *text), text
    assert propose(after, 9, 8, 2, 3)[0] == 20
    assert (after.calibration.estimates == before.calibration.estimates).all()
    observe(after, [2, 5], [9, 10, 11], 9)  # it goes on learning
    assert propose(after, 1, 2, 5)[0] == 9


def test_heads_are_counted_at_a_level_of_their_own() -> None:
    beside = DeviceTokenRecycling(NODES, WIDTH, 4, "dynamic", VOCAB, SLOTS, CPU, "torch", beside_heads=True)
    alone = drafter()
    own, others = beside.calibration.estimates, alone.calibration.estimates
    assert torch.equal(own[:-1], others)
    middles = torch.from_numpy(MIDDLES)
    assert torch.allclose(own[-1, : len(MIDDLES), 0], middles, atol=1e-6)
    shared = own[-1, len(MIDDLES) : 2 * len(MIDDLES), 0]
    assert torch.allclose(1 - shared, (1 - middles) * 2 / 3, atol=1e-6)
    with pytest.raises(ValueError, match=r"trials.*expected"):
        beside.load_state_dict(alone.state_dict())
    beside.load_state_dict(beside.state_dict())


def test_what_is_saved_stays_as_it_was() -> None:
    recycler = learnt()
    saved = recycler.state_dict()
    copies = {name: array.copy() for name, array in saved.items()}
    recycler.forget()
    assert all((saved[name] == copies[name]).all() for name in copies)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("successors", lambda array: array.fill(VOCAB), "successors has values"),
        ("successors", lambda array: array.fill(3), "one token twice"),
        ("classes", lambda array: array.fill(1000), "classes has values"),
        ("text_successors", lambda array: array.fill(-2), "text_successors has values"),
        ("trials", lambda array: array.fill(0), "trials has values"),
        ("hits", lambda array: array.fill(np.iinfo(np.int64).max), "more than there were trials"),
    ],
)
def test_what_could_not_have_been_saved_is_refused(name: str, change: Any, says: str) -> None:
    recycler = learnt()
    saved = recycler.state_dict()
    change(saved[name])
    with pytest.raises(ValueError, match=says):
        recycler.load_state_dict(saved)
    assert propose(recycler, 9, 8, 2, 3)[0] == 20  # as it was
    with pytest.raises(ValueError, match="is missing"):
        recycler.load_state_dict({key: saved[key] for key in saved if key != name})
    with pytest.raises(ValueError, match="expected"):
        recycler.load_state_dict({**saved, name: saved[name][:1]})
    with pytest.raises(ValueError, match="expected"):
        recycler.load_state_dict({**saved, name: saved[name].astype(np.float32)})


def test_memory_is_what_it_says() -> None:
    recycler = drafter()
    tables = (VOCAB + (1 << 16)) * 8 * (WIDTH + 1) + (1 << 19) + (1 << 18) * 16
    assert tables < recycler.memory_bytes < tables + SLOTS * (1 + NODES) * 200 + 50_000
