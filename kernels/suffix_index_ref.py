# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `suffix_index`: it scans the whole text, and has no cap on occurrences.

A log is a list of tokens from position 0 on, which is a separator like every negative id.
"""

from collections.abc import Sequence

import numpy as np

from vllm_ext.kernels.suffix_index import NUM_ORDERS, Estimates

Node = tuple[int, int, float, int]  # token, parent, path probability, group


def find_ref(
    log: Sequence[int],
    text: Sequence[int],
    min_match: int,
    max_match: int,
    oldest: int = 0,
    unfindable: frozenset[int] = frozenset(),
) -> list[tuple[int, int]]:
    """See `find`. Of ``log`` only what is at ``oldest`` and later exists, and no match ends at ``unfindable``."""
    found = []
    for at in range(oldest, len(log) - 1):
        length = 0
        while (
            length < min(max_match, at - oldest + 1, len(text))
            and log[at - length] == text[-1 - length]
            and log[at - length] >= 0
        ):
            length += 1
        if length >= min_match and log[at + 1] >= 0 and at not in unfindable:
            found.append((at, length))
    return sorted(found, key=lambda match: (-min(match[1].bit_length(), NUM_ORDERS), -match[0]))


def grow_tree_ref(
    own: Sequence[int],
    shared: Sequence[int],
    estimates: Estimates,
    min_match: int,
    max_match: int,
    budget: int,
    max_depth: int,
    chain: bool = False,
) -> list[Node]:
    """See `grow_tree`."""
    num_lengths, num_shares = estimates.chances.shape[1:]
    occurrences = [
        (source, at, length)
        for source, log in ((1, own), (2, shared))
        for at, length in find_ref(log, own, min_match, max_match)
    ]

    def children(path: list[int]) -> list[tuple[int, int, np.float32]]:
        """Token, group and own probability."""
        matches: dict[int, list[tuple[int, int]]] = {}  # by token: source, length
        for source, at, length in occurrences:
            following = [*own[at + 1 :], *path] if source == 1 else list(shared[at + 1 :])
            if following[: len(path)] == path and len(following) > len(path) and following[len(path)] >= 0:
                matches.setdefault(following[len(path)], []).append((source, length + len(path)))
        lengths = [length for found in matches.values() for _, length in found]
        total = sum(length**2 for length in lengths) + max(lengths, default=0) ** 2
        result = []
        for token, found in matches.items():
            sources = {source for source, _ in found}
            place = (
                sum(sources) - 1,
                sum(max(length for _, length in found) > bound for bound in estimates.lengths.tolist()),
                sum(
                    sum(length**2 for _, length in found) / total > bound
                    for bound in estimates.shares.tolist()
                ),
            )
            group = (place[0] * num_lengths + place[1]) * num_shares + place[2]
            result.append((token, group, estimates.chances[place]))
        return result

    tree: list[Node] = []
    paths: list[list[int]] = []
    frontier: list[tuple[float, int, int, int]] = []
    path: list[int] = []
    node, above = -1, np.float32(1)
    while len(tree) < budget:
        if chain:
            frontier.clear()
        if len(path) < max_depth:
            frontier += [
                (float(above * own_chance), token, node, group) for token, group, own_chance in children(path)
            ]
        best = max(frontier, key=lambda entry: entry[0], default=(0.0, 0, 0, 0))  # of equals the first
        if best[0] <= 0.0:
            break
        frontier.remove(best)
        probability, token, parent, group = best
        node, above = len(tree), np.float32(probability)
        path = [*(paths[parent] if parent >= 0 else []), token]
        tree.append((token, parent, probability, group))
        paths.append(path)
    return tree
