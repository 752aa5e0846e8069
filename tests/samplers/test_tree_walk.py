# SPDX-License-Identifier: Apache-2.0
"""The walk is exact: its output has the target's law, whatever the tree, and the best expected length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.samplers.tree_walk import greedy_walk, walk

VOCAB = 3


class MarkovTarget:
    """p(token | last token) of a random order-1 model."""

    def __init__(self, seed: int) -> None:
        self.p = np.random.default_rng(seed).dirichlet(np.ones(VOCAB), size=VOCAB)


class Tree:
    """Rows of one request: tokens and parents as the walk takes them, root token 0."""

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        rows: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents = [0], [-1]
        for path in sorted({tuple(p[: i + 1]) for p in paths for i in range(len(p))}, key=len):
            rows[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(rows[path[:-1]])
        self.tokens = np.array(tokens, dtype=np.int32)
        self.parents = np.array(parents, dtype=np.int32)
        self.nodes = [path for path in rows if path]

    @property
    def row_start(self) -> np.ndarray:
        return np.array([0, len(self.tokens)], dtype=np.int32)


TREES = [
    [],
    [[1]],
    [[1, 2, 0]],
    [[0], [1], [2]],
    [[0, 1], [0, 2], [1, 1], [2]],
    [list(path) for path in itertools.product(range(VOCAB), repeat=2)],
]


def law(target: MarkovTarget, tree: Tree, length: int) -> np.ndarray:
    """The exact law of the first ``length`` tokens: every outcome of every draw, weighted by ``p``."""
    result = np.zeros((VOCAB,) * length)

    def extend(prefix: list[int], weight: float) -> None:
        """Plain decoding of what the step left open."""
        if len(prefix) >= length:
            result[tuple(prefix[:length])] += weight
            return
        for token in range(VOCAB):
            extend([*prefix, token], weight * target.p[prefix[-1] if prefix else 0][token])

    # A walk draws at most depth + 1 tokens: run it on every sequence of draws, weighted by those it used.
    depth = max(map(len, tree.nodes), default=0) + 1
    seen: set[tuple[int, ...]] = set()
    for draws in itertools.product(range(VOCAB), repeat=depth):
        used: list[int] = []
        weight = [1.0]

        def draw(
            requests: Sequence[int],
            rows: Sequence[int],
            emitted: Sequence[Sequence[int]],
            draws: tuple[int, ...] = draws,
            used: list[int] = used,
            weight: list[float] = weight,
        ) -> list[int]:
            token = draws[len(used)]
            # The row asked for must be the one whose input is the path's last token.
            weight[0] *= target.p[tree.tokens[rows[0]]][token]
            used.append(token)
            return [token]

        _, emitted = walk(tree.row_start, tree.tokens, tree.parents, draw)
        if tuple(used) not in seen:
            seen.add(tuple(used))
            extend(list(emitted[0]), weight[0])
    return result


def plain_law(target: MarkovTarget, length: int) -> np.ndarray:
    result = np.zeros((VOCAB,) * length)
    for sequence in itertools.product(range(VOCAB), repeat=length):
        result[sequence] = np.prod([target.p[a][b] for a, b in zip((0, *sequence), sequence, strict=False)])
    return result


@pytest.mark.parametrize("paths", TREES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_law_of_three_tokens_is_the_targets(seed: int, paths: list[list[int]]) -> None:
    target = MarkovTarget(seed)
    assert np.abs(law(target, Tree(paths), 3) - plain_law(target, 3)).max() < 1e-12


def test_a_draw_per_path_would_be_biased() -> None:
    """R3, the mutation: sampling each root-to-leaf path on its own and keeping the longest is caught."""
    target, tree = MarkovTarget(0), Tree(TREES[4])
    rng = np.random.default_rng(1)
    counts = np.zeros(VOCAB)
    for _ in range(4000):
        best: list[int] = []
        for path in TREES[4]:
            out: list[int] = []
            for expected in [*path, -1]:
                out.append(int(rng.choice(VOCAB, p=target.p[out[-1] if out else 0])))
                if out[-1] != expected:
                    break
            best = max(best, out, key=len)
        counts[best[0]] += 1
    assert np.abs(counts / 4000 - plain_law(target, 1)).max() > 0.03
    assert np.abs(law(target, tree, 1) - plain_law(target, 1)).max() < 1e-12


@pytest.mark.parametrize("paths", TREES, ids=str)
def test_expected_tokens_is_one_plus_the_sum_of_path_probabilities(paths: list[list[int]]) -> None:
    target, tree = MarkovTarget(5), Tree(paths)
    by_rule = 1 + sum(
        float(np.prod([target.p[a][b] for a, b in zip((0, *node), node, strict=False)]))
        for node in tree.nodes
    )
    rng = np.random.default_rng(0)

    def draw(requests: Sequence[int], rows: Sequence[int], emitted: Sequence[Sequence[int]]) -> list[int]:
        return [int(rng.choice(VOCAB, p=target.p[tree.tokens[row]])) for row in rows]

    runs = [len(walk(tree.row_start, tree.tokens, tree.parents, draw)[1][0]) for _ in range(6000)]
    assert np.mean(runs) == pytest.approx(by_rule, abs=5 * np.std(runs) / np.sqrt(6000) + 1e-9)


def random_batch(rng: np.random.Generator, num_requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random trees with distinct siblings; tokens from a small vocabulary so that walks go deep."""
    tokens: list[int] = []
    parents: list[int] = []
    row_start = [0]
    for _ in range(num_requests):
        mine, seen = [(int(rng.integers(4)), -1)], set()
        for _ in range(int(rng.integers(0, 12))):
            parent, token = int(rng.integers(len(mine))), int(rng.integers(4))
            if (parent, token) not in seen:
                seen.add((parent, token))
                mine.append((token, parent))
        tokens += [token for token, _ in mine]
        parents += [parent for _, parent in mine]
        row_start.append(len(tokens))
    return tuple(np.array(values, dtype=np.int32) for values in (row_start, tokens, parents))  # type: ignore[return-value]


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), num_requests=st.integers(1, 6))
def test_greedy_walk_is_the_walk_with_known_draws(seed: int, num_requests: int) -> None:
    rng = np.random.default_rng(seed)
    row_start, tokens, parents = random_batch(rng, num_requests)
    choice = rng.integers(4, size=len(tokens)).astype(np.int32)

    def draw(requests: Sequence[int], rows: Sequence[int], emitted: Sequence[Sequence[int]]) -> list[int]:
        return [int(choice[row_start[i] + row]) for i, row in zip(requests, rows, strict=True)]

    paths, emitted = greedy_walk(row_start, tokens, parents, choice)
    assert (paths, emitted) == walk(row_start, tokens, parents, draw)
    for request, (path, out) in enumerate(zip(paths, emitted, strict=True)):
        assert len(out) == len(path) + 1
        rows = [0, *path]
        start = row_start[request]
        # A path from the root along parents, each node the target's choice at its parent.
        assert [int(parents[start + row]) for row in path] == rows[:-1]
        assert [int(tokens[start + row]) for row in path] == out[:-1]
        assert [int(choice[start + row]) for row in rows] == out
        # And it could not go on.
        children = {
            int(tokens[start + row])
            for row in range(row_start[request + 1] - start)
            if parents[start + row] == rows[-1]
        }
        assert out[-1] not in children


def test_padding_never_matches() -> None:
    """A row whose token is -1 is no token, so nothing below it is accepted."""
    row_start = np.array([0, 3], dtype=np.int32)
    parents = np.array([-1, 0, 1], dtype=np.int32)
    tokens = np.array([5, -1, 7], dtype=np.int32)
    assert greedy_walk(row_start, tokens, parents, np.array([0, 7, 7], dtype=np.int32)) == ([[]], [[0]])
