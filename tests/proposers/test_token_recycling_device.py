# SPDX-License-Identifier: Apache-2.0
"""Token Recycling on the device, by its readable kernels: what it has seen it drafts, what was right counts."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.proposers.token_recycling import TokenRecyclingOptions
from vllm_ext.proposers.token_recycling_device import DeviceTokenRecycling

VOCAB, WIDTH, NODES, SLOTS = 30, 3, 7, 4
CPU = torch.device("cpu")


def drafter(**options: object) -> DeviceTokenRecycling:
    given = TokenRecyclingOptions.model_validate(
        {"num_speculative_tokens": NODES, "matrix_width": WIDTH, **options}
    )
    return DeviceTokenRecycling(given, VOCAB, SLOTS, CPU, "torch")


def propose(recycler: DeviceTokenRecycling, root: int, slot: int = 1, chain: bool = False) -> list[int]:
    roots = torch.full((SLOTS,), root)
    zeros = torch.zeros(SLOTS, dtype=torch.int32)
    tokens = recycler.propose(roots, torch.tensor([slot]), zeros + chain, zeros + NODES)
    count = int((recycler.trees.parents[slot] >= 0).sum())
    assert (tokens[0, count:] == root).all()  # padding
    return [int(token) for token in tokens[0, :count]]


def observe(recycler: DeviceTokenRecycling, rows: dict[int, list[int]], logits: list[float]) -> None:
    known = torch.ones(len(rows), dtype=torch.bool)
    recycler.observe(
        torch.tensor(list(rows)),
        known,
        known.to(torch.int32),
        torch.tensor(list(rows.values()), dtype=torch.int32),
        torch.tensor([logits] * len(rows)),
    )


def test_what_was_ranked_highest_is_drafted() -> None:
    recycler = drafter()
    assert propose(recycler, 5) == []
    observe(recycler, {5: [6, 7, 8], 6: [9, 10, 11]}, [4.0, 1.0, 0.0])
    assert propose(recycler, 5)[:2] == [6, 9]  # sure: its best successor comes before its other siblings
    assert set(propose(recycler, 5)) == {6, 7, 8, 9, 10, 11}
    assert propose(recycler, 5, chain=True) == [6, 9]
    assert propose(drafter(tree="chain"), 5) == []
    observe(recycler, {5: [12, 13, 14]}, [0.1, 0.1, 0.1])
    assert set(propose(recycler, 5)) == {12, 13, 14}


def test_a_prompt_gives_first_successors() -> None:
    recycler = drafter()
    recycler.start(torch.tensor([3, 4, 5, 3, 6], dtype=torch.int32))
    assert propose(recycler, 4) == [5, 3, 6]
    recycler.start(torch.tensor([9], dtype=torch.int32))
    recycler.forget()
    assert propose(recycler, 4) == []


def test_of_two_rows_the_accepted_one_is_kept() -> None:
    recycler = drafter()
    recycler.observe(
        torch.tensor([5, 5, 5]),
        torch.tensor([True, True, False]),
        torch.tensor([1, 0, 1], dtype=torch.int32),
        torch.tensor([[1, 2, 3], [4, 6, 7], [8, 9, 10]], dtype=torch.int32),
        torch.zeros(3, 3),
    )
    assert set(propose(recycler, 5)) == {1, 2, 3}


@pytest.mark.parametrize("right", [True, False])
def test_groups_that_are_right_are_promised_more(right: bool) -> None:
    recycler = drafter()
    observe(recycler, {5: [6, 7, 8]}, [1.0, 0.5, 0.0])
    propose(recycler, 5)
    before = recycler.estimates.clone()
    groups = recycler.trees.groups[1]
    accepted = torch.zeros(1 + NODES, dtype=torch.int32)
    accepted[0] = 1
    accepted[1] = right
    for _ in range(300):
        recycler.judge(groups, recycler.trees.parents[1].clamp(min=0).to(torch.int64), accepted)
    node, sibling = int(groups[1]), int(groups[2])
    assert node != sibling
    after = recycler.estimates.view(-1)
    assert after[node] == pytest.approx(1.0 if right else 0.0, abs=0.1)
    assert after[sibling] < 0.1  # tried as often, and never right
    untouched = [g for g in range(after.numel()) if g not in groups.tolist()]
    assert torch.equal(after[untouched], before.view(-1)[untouched])
    # Children of what was not accepted were not tried.
    assert recycler._trials.view(-1)[node] <= 201 * (1 << 20)


def test_memory_is_what_it_says() -> None:
    recycler = drafter()
    table = (VOCAB + 1) * (8 * WIDTH + 8)
    assert table < recycler.memory_bytes < table + SLOTS * (1 + NODES) * 48 + 4000
