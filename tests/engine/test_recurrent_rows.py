# SPDX-License-Identifier: Apache-2.0
"""What recurrent layers read of a step: pending rows before each tree, and whose rows are ours."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.recurrent.rows import Pending, RecurrentRows, decoding, recurrent_rows
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.engine.v1.recurrent_step import RecurrentSteps

PARENTS = ([-1, 0, 0, 1], [-1], [-1, 0, 1, 1, 2])  # a tree, a root, a tree


def trees(context: list[int], prompt_rows: tuple[int, ...] = (0, 0, 0)) -> StepTrees:
    lengths = np.array([len(parents) for parents in PARENTS])
    query_end = np.cumsum(lengths + prompt_rows)
    return StepTrees(
        row_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        tokens=np.arange(lengths.sum(), dtype=np.int32),
        parents=np.concatenate(PARENTS).astype(np.int32),
        query_row=(query_end - lengths).astype(np.int32),
        context=np.array(context, dtype=np.int32),
        branching=[0, 2],
        decoding=[i for i, rows in enumerate(prompt_rows) if not rows],
    )


def packed_parents(rows: RecurrentRows) -> list[list[int]]:
    ends = rows.packed_start.tolist()
    return [rows.packed_parents[a:b].tolist() for a, b in itertools.pairwise(ends)]


def test_pending_rows_are_a_chain_before_the_tree() -> None:
    blocks = torch.tensor([7, 8, 9], dtype=torch.int32)
    rows = recurrent_rows(trees([5, 5, 5]), np.array([0, 1, 2]), [[2, 4], [], [1]], blocks.device).over(
        blocks
    )
    assert packed_parents(rows) == [[-1, 0, 1, 2, 2, 3], [-1], [-1, 0, 1, 2, 2, 3]]
    assert rows.certain.tolist() == [3, 1, 2]
    assert rows.verified.tolist() == [2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert rows.own == slice(0, 10)
    assert rows.pending.tolist() == [[2, 4], [0, 0], [1, 0]]
    assert rows.num_pending.tolist() == [2, 0, 1]
    assert [part.tolist() for part in rows.read] == [[0, 1, 7], [7, 7, 9], [2, 4, 1]]
    assert [part.tolist() for part in rows.kept] == [
        [1, 2, 3, 6, 7, 8, 9],
        [7, 7, 7, 9, 9, 9, 9],
        [1, 2, 3, 1, 2, 3, 4],
    ]
    assert rows.num_packed == 13
    assert rows.max_rows == 5


def test_rows_of_some_requests() -> None:
    """Prompt rows of the second stand between the others."""
    step = trees([5, 0, 5], (0, 3, 0))
    assert decoding(step).tolist() == [0, 2]
    rows = recurrent_rows(step, decoding(step), [[], [3]], torch.device("cpu"))
    assert isinstance(rows.own, torch.Tensor)
    assert rows.own.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    assert rows.row_start.tolist() == [0, 4, 9]
    assert packed_parents(rows) == [[-1, 0, 0, 1], [-1, 0, 1, 2, 2, 3]]


def test_a_request_without_a_state_is_not_ours() -> None:
    assert decoding(trees([5, 0, 5])).tolist() == [0, 2]


def test_pending_rows_are_those_that_lead_to_the_context() -> None:
    pending = Pending()
    step = trees([5, 9, 3])
    step.accepted = [[2], [], [1, 2]]
    pending.note(["a", "b", "c"], step)
    assert pending.take("a", 7) == [2]
    assert pending.take("a", 7) == []  # once
    assert pending.take("b", 10) == []
    assert pending.take("c", 5) == []  # it was preempted, and has come again
    pending.note(["c"], trees_of_one())
    pending.forget("c")
    assert pending.take("c", 7) == []


def trees_of_one() -> StepTrees:
    step = trees([5, 5, 5])
    step.accepted = [[2]]
    return step


def test_models_without_recurrent_layers_have_no_part_in_it() -> None:
    class Backend:
        @staticmethod
        def is_ssm() -> bool:
            return False

    class Group:
        backend = Backend

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is asked of the runner")

    metadata: dict[str, Any] = {}
    steps = RecurrentSteps([[Group]])
    steps.mark(trees([5, 5, 5]), None, metadata, None, never)
    assert metadata == {}
