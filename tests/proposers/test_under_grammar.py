# SPDX-License-Identifier: Apache-2.0
"""Trees under a grammar, beside every path looked at alone; the grammar is a set of sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_ext.proposers.tree import DraftTree
from vllm_ext.proposers.under_grammar import legal_nodes, under_grammar


class Prefixes:
    """Allows the prefixes of some sequences."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._allowed = {sequence[:n] for sequence in sequences for n in range(len(sequence) + 1)}
        self.taken: tuple[int, ...] = ()

    def accept(self, token: int) -> bool:
        if (*self.taken, token) not in self._allowed:
            return False
        self.taken = (*self.taken, token)
        return True

    def rollback(self, num_tokens: int) -> None:
        self.taken = self.taken[: len(self.taken) - num_tokens]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    parents: list[int] = []
    tokens: list[int] = []
    taken: set[tuple[int, int]] = set()
    for node in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, 3))
        if (parent, token) not in taken and parent < len(parents):
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    chances = sorted((draw(st.floats(0, 1, width=32)) for _ in parents), reverse=True)
    return DraftTree.from_nodes(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(chances, np.float32)
    )


SEQUENCES = st.lists(st.lists(st.integers(0, 3), max_size=5).map(tuple), max_size=6)


@given(trees(), SEQUENCES)
def test_a_node_is_legal_if_its_path_is(tree: DraftTree, sequences: list[tuple[int, ...]]) -> None:
    matcher = Prefixes(sequences)
    legal = legal_nodes(matcher, tree)
    assert matcher.taken == ()
    assert legal.tolist() == [path in matcher._allowed for path in paths(tree)]
    kept = tree.where(legal)
    kept.validate()
    assert paths(kept) == list(itertools.compress(paths(tree), legal))
    assert kept.probabilities.tolist() == tree.probabilities[legal].tolist()


def test_prompt_tokens_stand_where_their_nodes_do() -> None:
    """Ids behind the vocabulary, 4 here, are no text: the grammar is not asked of them."""
    tree = DraftTree(
        np.array([2, 4, 1, 5, 4, 4], np.int32),
        np.array([-1, -1, -1, 1, 0, 2], np.int32),
        np.linspace(0.9, 0.4, 6, dtype=np.float32),
    )
    matcher = Prefixes([(2, 3)])
    assert legal_nodes(matcher, tree, 4).tolist() == [True, True, False, True, True, False]
    assert matcher.taken == ()
    assert under_grammar(matcher, tree, [], 9, 9, 4).tokens.tolist() == [2, 4, 5, 4]


CERTAIN = DraftTree.chain(np.array([2], np.int32), np.ones(1, np.float32))


@given(trees(), SEQUENCES, st.lists(st.integers(0, 3), max_size=4), st.integers(0, 8), st.integers(1, 4))
@example(CERTAIN, [(0, 0), (2,)], [0, 0], 2, 2)
def test_what_is_forced_stands_first(
    tree: DraftTree, sequences: list[tuple[int, ...]], forced: list[int], num_nodes: int, max_depth: int
) -> None:
    matcher = Prefixes(sequences)
    result = under_grammar(matcher, tree, forced, num_nodes, max_depth)
    result.validate()
    assert len(result) <= num_nodes
    found = paths(result)
    assert set(found) <= matcher._allowed
    expected = [tuple(forced[:n]) for n in range(1, min(len(forced), max_depth) + 1)]
    expected = [path for path in expected if path in matcher._allowed][:num_nodes]
    assert set(found) >= set(expected)
    assert all(
        probability == 1.0
        for path, probability in zip(found, result.probabilities.tolist(), strict=True)
        if path in expected
    )
    # No legal node is lost while there is room.
    legal = set(paths(tree)) & matcher._allowed
    assert len(result) == num_nodes or set(found) == legal | set(expected)
