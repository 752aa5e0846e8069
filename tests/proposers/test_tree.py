# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.proposers.tree import DraftTree

Path = tuple[int, ...]
FLOATS: Any = np.zeros(1)  # not what a tree takes


def tree_of(tokens: list[int], parents: list[int], probabilities: list[float]) -> DraftTree:
    """As given, in the right types."""
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probabilities, np.float32)
    )


def paths(tree: DraftTree) -> dict[Path, float]:
    """Every node as the tokens from the root to it, with its probability."""
    found: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append(((*found[parent],) if parent >= 0 else ()) + (token,))
    assert len(set(found)) == len(found)
    return dict(zip(found, tree.probabilities.tolist(), strict=True))


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> DraftTree:
    """Random tries, some probabilities equal, given to `from_nodes` in random order."""
    nodes: dict[Path, float] = {}
    for _ in range(draw(st.integers(0, max_nodes))):
        above = draw(st.sampled_from([(), *nodes]))
        path = (*above, draw(st.integers(0, 4)))
        nodes.setdefault(path, nodes.get(above, 1.0) * draw(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])))
    order = draw(st.permutations(list(nodes)))
    index = {path: i for i, path in enumerate(order)}
    return DraftTree.from_nodes(
        np.array([path[-1] for path in order], np.int32),
        np.array([index.get(path[:-1], -1) for path in order], np.int32),
        np.array([nodes[path] for path in order], np.float32),
    )


@given(trees())
def test_from_nodes_gives_valid_trees_and_so_is_every_prefix(tree: DraftTree) -> None:
    for size in range(-1, len(tree) + 2):
        prefix = tree.prefix(size)
        prefix.validate()
        assert len(prefix) == min(max(size, 0), len(tree))


@given(trees(max_nodes=8))
def test_prefix_is_the_best_subtree_of_its_size(tree: DraftTree) -> None:
    parents, probabilities = tree.parents.tolist(), tree.probabilities.tolist()
    for size in range(len(tree) + 1):
        best = max(
            sum(probabilities[node] for node in nodes)
            for nodes in combinations(range(len(tree)), size)
            if all(parents[node] in (-1, *nodes) for node in nodes)
        )
        assert sum(tree.prefix(size).probabilities.tolist()) == pytest.approx(best)


def test_from_nodes_lowers_children_to_their_ancestors() -> None:
    # Node 0 is the child of node 2, which is the child of node 1.
    tree = DraftTree.from_nodes(
        np.array([7, 8, 9], np.int32), np.array([2, -1, 1], np.int32), np.array([0.9, 0.5, 0.6], np.float32)
    )
    assert paths(tree) == {(8,): 0.5, (8, 9): 0.5, (8, 9, 7): 0.5}
    assert tree.is_chain


def test_equal_nodes_keep_their_order() -> None:
    tree = DraftTree.from_nodes(
        np.array([3, 1, 2], np.int32), np.full(3, -1, np.int32), np.full(3, 0.5, np.float32)
    )
    assert tree.tokens.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 2], r"parents\[1\]=2 is no node"),
        ([-2, 0], r"parents\[0\]=-2 is no node"),
        ([1, 0], r"parents\[0\]=1: the node is its own ancestor"),
        ([-1, 1], r"parents\[1\]=1: the node is its own ancestor"),
    ],
)
def test_from_nodes_refuses_what_is_no_tree(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree.from_nodes(
            np.zeros(2, np.int32), np.array(parents, np.int32), np.array([0.5, 0.5], np.float32)
        )


@given(st.lists(trees(), max_size=4))
def test_merge_is_the_union_of_the_paths_with_the_largest_probability(parts: list[DraftTree]) -> None:
    expected: dict[Path, float] = {}
    for part in parts:
        for path, probability in paths(part).items():
            expected[path] = max(probability, expected.get(path, 0.0))
    merged = DraftTree.merge(parts, 1000)
    merged.validate()
    assert paths(merged) == expected
    assert paths(DraftTree.merge(parts[::-1], 1000)) == expected
    for size in range(len(merged)):
        cut = DraftTree.merge(parts, size)
        assert cut.tokens.tolist() == merged.tokens[:size].tolist()
        assert cut.parents.tolist() == merged.parents[:size].tolist()


@given(trees())
def test_merge_with_itself_or_nothing_changes_nothing(tree: DraftTree) -> None:
    for parts in ([tree], [tree, tree], [tree, DraftTree.empty()], [DraftTree.empty(), tree]):
        merged = DraftTree.merge(parts, len(tree))
        assert paths(merged) == paths(tree)
        assert merged.probabilities.tolist() == tree.probabilities.tolist()


def test_merge_shares_the_common_beginning() -> None:
    chain = DraftTree.chain(np.array([1, 2, 3], np.int32), np.array([0.9, 0.8, 0.7], np.float32))
    other = tree_of([1, 5, 2], [-1, -1, 0], [0.5, 0.4, 0.3])
    merged = DraftTree.merge([other, chain], 4)
    assert merged.tokens.tolist() == [1, 2, 3, 5]
    assert merged.parents.tolist() == [-1, 0, 1, -1]
    assert merged.probabilities.tolist() == pytest.approx([0.9, 0.8, 0.7, 0.4])


@given(trees())
def test_depths_and_best_chain(tree: DraftTree) -> None:
    found = list(paths(tree))
    assert tree.depths().tolist() == [len(path) for path in found]
    chain = tree.best_chain()
    chain.validate()
    assert chain.is_chain
    chosen: Path = ()
    while children := [path for path in found if path[:-1] == chosen]:
        chosen = max(children, key=lambda path: paths(tree)[path])  # the first of equals
    assert tuple(chain.tokens.tolist()) == chosen


def test_empty_tree() -> None:
    tree = DraftTree.empty()
    tree.validate()
    assert len(tree) == len(tree.depths()) == len(tree.best_chain()) == len(DraftTree.merge([], 5)) == 0
    assert tree.is_chain


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tree_of([1, 2], [-1], [0.5, 0.5]), r"parents is int32\[1\]; expected int32\[2\]"),
        (DraftTree(FLOATS, np.full(1, -1, np.int32), np.ones(1, np.float32)), "tokens is float64"),
        (tree_of([1, -1], [-1, 0], [0.5, 0.5]), r"tokens\[1\]=-1 .* at least 0"),
        (tree_of([1, 2], [-1, 1], [0.5, 0.5]), r"parents\[1\]=1 .* before its node"),
        (tree_of([1, 2], [-2, 0], [0.5, 0.5]), r"parents\[0\]=-2 .* before its node"),
        (tree_of([1, 2], [-1, 0], [0.25, 0.5]), r"probabilities\[1\]=0.5 .* descending"),
        (tree_of([1], [-1], [1.5]), r"probabilities\[0\]=1.5 .* between 0 and 1"),
        (tree_of([1], [-1], [float("nan")]), r"probabilities\[0\]=nan .* between 0 and 1"),
        (tree_of([1, 2, 1], [-1, -1, -1], [0.5, 0.4, 0.3]), r"tokens\[2\]=1 .* siblings are distinct"),
    ],
)
def test_validate_names_field_and_value(tree: DraftTree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.validate()
