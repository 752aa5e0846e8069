# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `suffix_array`, on lists, by looking at everything."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.suffix_array import EMPTY, SORTED_TOKENS

Node = tuple[int, int, float, int]  # token, parent, path probability, group


def sort_key_ref(tokens: Sequence[int], separator: int, position: int) -> tuple[int, ...]:
    """What the positions of a text are sorted by."""
    key: list[int] = []
    for token in tokens[max(position + 1 - SORTED_TOKENS, 0) : position + 1][::-1]:
        key.append(token)
        if token == separator:
            break
    return tuple(key)


def find_ref(tokens: Sequence[int], separator: int, context: Sequence[int]) -> tuple[int, set[int]]:
    """See `find`: the length and the positions."""
    for length in range(len(context), 0, -1):
        wanted = list(context[-length:])
        if all(0 <= token < separator for token in wanted):
            ends = range(length - 1, len(tokens))
            found = {end for end in ends if list(tokens[end + 1 - length : end + 1]) == wanted}
            if found:
                return length, found
    return 0, set()


def continuation_ref(tokens: Sequence[int], separator: int, position: int, width: int) -> list[int]:
    """What stands behind a position, to the end of its document."""
    following = [*tokens[position + 1 : position + 1 + width], separator]
    return following[: following.index(separator)]


def grow_tree_ref(
    rows: Sequence[Sequence[int]],
    level: int,
    estimates: npt.NDArray[np.float32],
    shares: npt.NDArray[np.float32],
    evidence: Sequence[int],
    budget: int,
    max_depth: int,
    chain: bool,
) -> list[Node]:
    """See `grow_tree`; rows end before their first `EMPTY`."""
    ended = [tuple(row[: list(row).index(EMPTY)] if EMPTY in row else row) for row in rows]
    weights = Counter(row[:depth] for row in ended for depth in range(1, len(row) + 1))
    weights[()] = len(rows)
    tree: list[Node] = []
    nodes: dict[tuple[int, ...], int] = {(): -1}
    frontier: dict[tuple[int, ...], tuple[float, int]] = {}
    path: tuple[int, ...] = ()
    above = np.float32(1)
    while len(tree) < budget:
        if chain:
            frontier.clear()
        if len(path) < max_depth:
            for child in weights:
                if child and child[:-1] == path:
                    share = np.float32(weights[child]) / np.float32(weights[path])
                    e = sum(weights[path] > bound for bound in evidence)
                    s = int((share > shares).sum())
                    group = (level * (len(evidence) + 1) + e) * (len(shares) + 1) + s
                    own = estimates[group, min(len(path), estimates.shape[1] - 1)]
                    frontier[child] = float(above * own), group
        possible = [child for child, (probability, _) in frontier.items() if probability > 0]
        if not possible:
            break
        best = min(possible, key=lambda c: (-frontier[c][0], -weights[c], len(c), c[-1], nodes[c[:-1]]))
        probability, group = frontier.pop(best)
        nodes[best] = len(tree)
        tree.append((best[-1], nodes[best[:-1]], probability, group))
        path, above = best, np.float32(probability)
    return tree
