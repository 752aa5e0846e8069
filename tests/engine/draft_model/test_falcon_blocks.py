# SPDX-License-Identifier: Apache-2.0
"""Which rows Falcon's passes have, and what each sees; no model. Engine: test_eagle_engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.engine.draft_model.eagle import _Unread
from vllm_ext.engine.draft_model.falcon import FalconPasses
from vllm_ext.engine.draft_model.passes import Growth
from vllm_ext.engine.models.node_states import NodeStates
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.sampled import ROOT


class Passes(FalconPasses):
    """What a row puts out is the number of the step's row that it is; features are such numbers too."""

    def __init__(self) -> None:
        self._trees, self._last, self._growth, self._roots = {}, {}, {}, {}
        self._streams, self.passes = NodeStates(), []
        self.seen: list[list[tuple[str, list[int], int, int]]] = []  # by pass, of each row
        self._rows = 0

    def plant(self, *names: str) -> None:
        for name in names:
            self._growth[name] = Growth(0, 10)
        self._plant(names, *self._numbers(2 * len(names)))

    def _numbers(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._rows += count
        numbers = torch.arange(self._rows - count, self._rows)[:, None].float()
        return numbers, numbers

    def _pass_over(self, growing: dict[str, int]) -> Any:
        assert self._features is not None
        takes = iter(self._features[:, 0].long().tolist())
        rows = []
        for name, before in growing.items():
            growth = self._growth[name]
            for row in range(before, len(growth.parents)):
                path = [row]
                while growth.parents[path[0]] != ROOT:
                    path.insert(0, growth.parents[path[0]])
                position = growth.context + growth.depths[row]
                rows.append((name, [growth.tokens[each] for each in path], position, next(takes)))
        self.seen.append(rows)
        return self._numbers(len(rows))

    def _distributions(self, hidden: Any) -> Rows:
        return Rows(hidden.numpy().astype(np.int32), hidden.numpy())

    def _to(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))


class Reading(Passes):
    """Reads committed rows: of each its request, its slot's place, the place it stands for, its token and feature."""

    def __init__(self, first: int, rows: int, names: str) -> None:
        super().__init__()
        self._group_id, self._block_size, self.blind = 0, 4, set()
        self._head: Any = SimpleNamespace(num_before=0)
        self._known, self._right = dict.fromkeys(names, first), np.zeros(16, bool)
        self._unread = {
            name: _Unread(first, rows, [torch.arange(first, first + rows)[:, None].float()]) for name in names
        }
        self._step = [(slot, first, np.zeros(0, np.int32)) for slot in range(len(names))]
        self._target_config: Any = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64)
        )
        self._runner = SimpleNamespace(
            requests={
                name: SimpleNamespace(block_ids=([1 + 4 * slot, 2 + 4 * slot, 3 + 4 * slot],))
                for slot, name in enumerate(names)
            },
            input_batch=SimpleNamespace(
                req_ids=list(names), token_ids_cpu=np.arange(100, 120)[None].repeat(2, 0)
            ),
        )
        self.read: list[list[tuple[int, int, int, int, int]]] = []

    def _take(self, num_tokens: Any) -> None:
        pass

    def _pass(self, slots: Any, start: Any, end: Any, inputs: Any, read_as: Any = None) -> Any:
        lengths = end - start
        owner = np.repeat(slots, lengths)
        places = np.concatenate([np.arange(a, b) for a, b in zip(start, end, strict=True)])
        stands = read_as(owner, places)
        assert self._features is not None
        features = self._features[:, 0].long().tolist()
        self.read.append(
            list(
                zip(
                    owner.tolist(),
                    places.tolist(),
                    stands.tolist(),
                    inputs(owner, stands).tolist(),
                    features,
                    strict=True,
                )
            )
        )
        return self._numbers(len(places)), np.array([0, *np.cumsum(lengths)])


def test_what_is_read_again_is_never_committed() -> None:
    """Its keys lie behind the text's, in a block that counts as not read; of who is not drafted for there is none."""
    passes = Reading(5, 3, "xy")
    passes.advance([9, 9], {"x"})
    (rows,) = passes.read
    assert rows == [
        *((0, place, place, 101 + place, place) for place in (5, 6, 7)),
        (0, 8, 6, 107, 6),  # where the next row will be, as the row before the last
        *((1, place, place, 101 + place, place) for place in (5, 6, 7)),
    ]
    assert passes._known == {"x": 8, "y": 8}
    assert np.nonzero(passes._right)[0].tolist() == [2, 6]
    # What is read again says what comes next.
    assert passes.roots(["x"]).ids[:, 0].tolist() == [3]
    assert passes.nodes(["x"], [ROOT], [5]).ids[:, 0].tolist() == [2]


def test_a_step_of_one_row_reads_the_one_before_again() -> None:
    passes = Reading(5, 1, "x")
    passes._last["x"] = torch.tensor([[4.0]])
    passes.advance([7], {"x"})
    assert passes.read == [[(0, 5, 5, 106, 5), (0, 6, 4, 105, 4)]]


def test_each_row_sees_its_block_and_the_blocks_above() -> None:
    passes = Passes()
    passes.plant("x", "y")  # puts out 0 and 1, 2 and 3: what comes next, and after that
    assert passes.roots(["x", "y"]).ids[:, 0].tolist() == [0, 2]
    # No pass: whatever comes next, the text's last row has said what follows.
    assert passes.nodes(["x", "x", "y"], [ROOT] * 3, [5, 6, 7]).ids[:, 0].tolist() == [1, 1, 3]
    assert not passes.seen
    found = passes.nodes(["x", "x", "x", "y"], [0, 0, 1, 0], [50, 51, 60, 70])
    first = [
        # Rows that stay: their keys are there for what is below.
        ("x", [5], 10, 0),
        ("x", [5, 50], 11, 1),
        ("x", [5, 51], 11, 1),
        ("x", [6], 10, 0),
        ("x", [6, 60], 11, 1),
        # Read again, with the whole block before them.
        ("x", [5, 50, 5], 10, 0),
        ("x", [5, 51, 5], 10, 0),
        ("x", [6, 60, 6], 10, 0),
        ("y", [7], 10, 2),
        ("y", [7, 70], 11, 3),
        ("y", [7, 70, 7], 10, 2),
    ]
    assert passes.seen == [first]
    assert found.ids[:, 0].tolist() == [4 + row for row in (5, 6, 7, 10)]
    assert [passes._growth[name].tokens for name in "xy"] == [[5, 50, 51, 6, 60], [7, 70]]
    # Below the second block's ends: again one depth without a pass, one with.
    assert passes.nodes(["x", "y"], [3, 1], [500, 700]).ids[:, 0].tolist() == [4 + 2, 4 + 9]
    passes.nodes(["x", "y"], [5, 2], [501, 701])
    assert [row[:3] for row in passes.seen[1]] == [
        ("x", [5, 51, 500], 12),
        ("x", [5, 51, 500, 501], 13),
        ("x", [5, 51, 500, 501, 500], 12),
        ("y", [7, 70, 700], 12),
        ("y", [7, 70, 700, 701], 13),
        ("y", [7, 70, 700, 701, 700], 12),
    ]
    assert len(passes.passes) == 2  # of four depths below the root


def test_features_are_of_the_block_above() -> None:
    passes = Passes()
    passes.plant("x")
    passes.nodes(["x"], [ROOT], [5])
    passes.nodes(["x"], [0], [50])  # rows 2, 3 and 4 of the step: 4 says what comes next, 3 what after that
    passes.nodes(["x"], [1], [500])
    passes.nodes(["x"], [2], [501])
    assert [row[3] for row in passes.seen[1]] == [4, 3, 4]


def test_a_node_of_an_end_that_was_asked_for_before() -> None:
    """The row of a block's first node is there once, however many passes go on below it."""
    passes = Passes()
    passes.plant("x")
    passes.nodes(["x"], [ROOT], [5])
    passes.nodes(["x"], [0], [50])
    passes.nodes(["x"], [0], [51])
    assert [row[:3] for row in passes.seen[1]] == [("x", [5, 51], 11), ("x", [5, 51, 5], 10)]
    assert passes._growth["x"].tokens == [5, 50, 51]


def test_the_row_before_the_last_may_be_of_an_earlier_step() -> None:
    passes = Passes()
    rows = torch.arange(6.0)[:, None]
    assert passes._features_before("x", rows[:1]).tolist() == [[0.0]]  # nothing is before it: its own
    assert passes._features_before("x", rows[1:2]).tolist() == [[0.0]]
    assert passes._features_before("x", rows[2:5]).tolist() == [[3.0]]
    assert passes._features_before("x", rows[5:]).tolist() == [[4.0]]
