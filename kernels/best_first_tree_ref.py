# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `best_first_tree`, on dictionaries that forget nothing.

A row's key is its token ``(t,)`` or its pair ``(previous, t)``; a text's key is the context, oldest first.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Row = list[tuple[int, int]]  # token and class of each entry
Node = tuple[int, int, float, int]  # token, parent, path probability, group


def record_row_ref(
    rows: dict[tuple[int, ...], Row],
    previous: int,
    token: int,
    top_ids: Sequence[int],
    top_logits: Sequence[float],
    shares: Sequence[float],
) -> None:
    """One row of `record_rows`."""
    weights = np.exp(np.array(top_logits, np.float32) - np.float32(top_logits[0]))
    bases = [1 + sum(bool(weight > bound) for bound in shares) for weight in weights / weights.sum()]
    rows[token,] = list(zip(top_ids, bases, strict=True))
    if previous >= 0:
        rows[previous, token] = [(i, base + len(shares) + 1) for i, base in rows[token,]]


def record_text_ref(
    text: dict[tuple[int, ...], int], tokens: Sequence[int], start: int, longest: int
) -> None:
    """See `record_text`."""
    for i in range(start, len(tokens)):
        for length in range(2, min(longest, i) + 1):
            text[tuple(tokens[i - length : i])] = tokens[i]


def grow_tree_ref(
    rows: dict[tuple[int, ...], Row],
    text: dict[tuple[int, ...], int],
    estimates: npt.NDArray[np.float32],
    context: Sequence[int],
    budget: int,
    max_depth: int,
    template: Sequence[Sequence[int]] = (),
    chain: bool = False,
) -> list[Node]:
    """The tree of one request; see `grow_trees`."""
    longest, num_bases, num_depths = estimates.shape

    def children(path: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """Rank, token and group."""
        row = rows.get(path[-2:]) if longest > 1 else None
        row = row or rows.get(path[-1:], [])
        known = [length for length in range(2, min(longest, len(path)) + 1) if path[-length:] in text]
        level = max(known, default=1) - 1
        successor = text[path[-max(known) :]] if known else None
        for rank, (token, base) in enumerate(row):
            yield rank, token, base + (level * num_bases if token == successor else 0)
        if successor is not None and successor not in (token for token, _ in row):
            from_logits = bool(row) and row[0][1] > 0
            absent = num_bases - (1 if longest > 1 and path[-2:] in rows else 2)
            yield -1, successor, level * num_bases + (absent if from_logits else 0)

    root = tuple(token for token in context if token >= 0)
    tree: list[Node] = []
    paths: list[tuple[int, ...]] = []  # the tokens below the root
    frontier: list[tuple[float, int, int, int, int]] = []
    path: tuple[int, ...] = ()
    node, position, above = -1, 0, np.float32(1)
    while len(tree) < budget:
        if chain:
            frontier.clear()
        if len(path) < max_depth:
            for rank, token, group in children(root + path):
                child = 0
                if len(template):
                    child = template[position][rank] if rank >= 0 else -1
                if child >= 0:
                    own = estimates[group // num_bases, group % num_bases, min(len(path), num_depths - 1)]
                    frontier.append((float(above * own), token, node, group, child))
        best = max(frontier, key=lambda entry: entry[0], default=(0.0, 0, 0, 0, 0))  # of equals the first
        if best[0] <= 0.0:
            break
        frontier.remove(best)
        probability, token, parent, group, position = best
        node, above = len(tree), np.float32(probability)
        path = (*(paths[parent] if parent >= 0 else ()), token)
        tree.append((token, parent, probability, group))
        paths.append(path)
    return tree


def judge_tree_ref(
    tokens: Sequence[int], parents: Sequence[int], groups: Sequence[int], emitted: Sequence[int]
) -> list[tuple[int, int, bool]]:
    """The trials of `judge_tree`, in order: group, depth from 0, and whether it was a hit."""
    trials = []
    paths: list[list[int]] = []
    for token, parent, group in zip(tokens, parents, groups, strict=True):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, token])
        depth = len(above)
        if depth < len(emitted) and above == list(emitted[:depth]):
            trials.append((group, depth, token == emitted[depth]))
    return trials
