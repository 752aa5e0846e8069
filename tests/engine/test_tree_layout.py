# SPDX-License-Identifier: Apache-2.0
"""How a step's flat draft lists become trees again: rows, positions, KV moves, and what is read as a chain."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.tree import DraftTree


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.linspace(0.9, 0.1, len(tokens)).astype(np.float32),
    )


#      root -+- 5 -+- 8 --- 9
#            |     +- 7
#            +- 6
BRANCHING = tree([5, 6, 8, 9, 7], [-1, -1, 0, 2, 0])


def step(
    proposed: dict[str, DraftTree], scheduled: dict[str, list[int]], computed: dict[str, int], **prompt: int
) -> StepTrees:
    """One step of requests ``computed``, each with its scheduled drafts, ``prompt`` rows before the root."""
    num_drafts = [len(scheduled.get(name, [])) for name in computed]
    lengths = [n + 1 + prompt.get(name, 0) for n, name in zip(num_drafts, computed, strict=True)]
    query_start = np.cumsum([0, *lengths]).astype(np.int32)
    input_ids = np.full(query_start[-1], 3, dtype=np.int32)
    for end, drafts in zip(query_start[1:], (scheduled.get(name, []) for name in computed), strict=True):
        input_ids[end - len(drafts) : end] = drafts
    return StepTrees.from_step(
        list(computed),
        num_drafts,
        scheduled,
        proposed,
        query_start,
        np.array(lengths, dtype=np.int32),
        np.array(list(computed.values()), dtype=np.int32),
        input_ids,
    )


def test_mixed_batch() -> None:
    """A prompt chunk, a tree, a chain and a request without drafts."""
    trees = step(
        {"tree": BRANCHING, "chain": tree([4, 2], [-1, 0])},
        {"tree": [5, 6, 8, 9, 7], "chain": [4, 2]},
        {"prompt": 0, "tree": 10, "chain": 20, "none": 30},
        prompt=6,
    )
    assert trees.branching == [1]
    assert trees.decoding == [1, 2, 3]
    assert trees.row_start.tolist() == [0, 1, 7, 10, 11]
    assert trees.tokens.tolist() == [3, 3, 5, 6, 8, 9, 7, 3, 4, 2, 3]
    assert trees.parents.tolist() == [-1, -1, 0, 0, 1, 3, 1, -1, 0, 1, -1]
    assert trees.query_row.tolist() == [6, 7, 13, 16]
    assert trees.context.tolist() == [6, 10, 20, 30]
    rows, positions = trees.branching_rows()
    assert rows.tolist() == [7, 8, 9, 10, 11, 12]
    assert positions.tolist() == [10, 11, 11, 12, 13, 12]


@pytest.mark.parametrize("size", range(1, 6))
def test_any_truncation_by_the_scheduler_is_a_tree(size: int) -> None:
    drafts = BRANCHING.tokens[:size].tolist()
    trees = step({"a": BRANCHING}, {"a": drafts}, {"a": 10})
    assert trees.parents.tolist() == [-1, 0, 0, 1, 3, 1][: size + 1]
    assert trees.branching == ([0] if size > 1 else [])  # one node is a chain


@pytest.mark.parametrize(
    "drafts",
    [[5, 6, 8, 7], [6], [5, 6, 8, 9, 7, 1], [1, 2, 3]],
    ids=["changed", "other", "longer", "unknown"],
)
def test_a_list_we_did_not_propose_is_a_chain(drafts: list[int]) -> None:
    trees = step({"a": BRANCHING}, {"a": drafts}, {"a": 10})
    assert trees.branching == []
    assert trees.parents.tolist() == list(range(-1, len(drafts)))


def test_drafts_behind_prompt_rows_are_a_chain() -> None:
    trees = step({"a": BRANCHING}, {"a": [5, 6, 8]}, {"a": 10}, a=4)
    assert trees.branching == []
    assert trees.query_row.tolist() == [4]
    assert trees.context.tolist() == [14]


def test_moves_bring_the_accepted_path_together() -> None:
    trees = step(
        {"a": BRANCHING, "b": BRANCHING, "c": BRANCHING},
        {name: BRANCHING.tokens.tolist() for name in "abc"},
        {"a": 10, "b": 10, "c": 10},
    )
    trees.accepted = [[1, 3, 4], [2], []]
    source, target = trees.moves()
    # a: row 1 is in place, 3 goes to 2, 4 goes to 3 (a target that was a source). b: row 2 goes to 1.
    assert source.tolist() == [3, 4, 6 + 2]
    assert target.tolist() == [2, 3, 6 + 1]
