# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `grow_trees` and `judge_tree`, on dictionaries."""

from collections.abc import Mapping, Sequence

import numpy as np

Entry = tuple[int, int]  # token, class


def grow_tree_ref(
    rows: Mapping[tuple[int, ...], Sequence[Entry]],
    text: Mapping[tuple[int, ...], int],
    estimates: Sequence[Sequence[Sequence[float]]],
    context: Sequence[int],
    budget: int,
    max_depth: int,
    template: Sequence[Sequence[int]],
) -> list[tuple[int, int, float, int]]:
    """The tree of one request: token, parent, path probability and group of each node.

    Args:
        rows: by token ``(t,)`` or pair ``(previous, t)``.
        text: by context, oldest token first; what followed.
        estimates, context, budget, max_depth, template: see `grow_trees`.
    """
    longest, num_bases, num_depths = len(estimates), len(estimates[0]), len(estimates[0][0])
    tree: list[tuple[int, int, float, int]] = []
    paths: list[tuple[int, ...]] = []  # from the root, with it
    positions: list[int] = []
    frontier: list[tuple[float, tuple[int, int, int, int]]] = []
    node = -1
    while len(tree) < budget:
        known = tuple(token for token in context if token >= 0)
        path = known if node < 0 else known + paths[node]
        depth = len(path) - len(known)
        above = np.float32(1.0) if node < 0 else np.float32(tree[node][2])
        if depth < max_depth:
            row = rows.get(path[-2:], ()) if longest > 1 and len(path) > 1 else ()
            row = row or rows.get(path[-1:], ())
            lengths = [n for n in range(2, longest + 1) if n <= len(path) and path[-n:] in text]
            level = max(lengths, default=1) - 1
            followed = text[path[-level - 1 :]] if lengths else None
            children = [
                (token, base + (level * num_bases if token == followed else 0)) for token, base in row
            ]
            ranks = list(range(len(children)))
            if followed is not None and followed not in [token for token, _ in row]:
                children.append((followed, level * num_bases))
                ranks.append(-1)
            for (token, group), rank in zip(children, ranks, strict=True):
                position = 0
                if len(template):
                    position = template[0 if node < 0 else positions[node]][rank] if rank >= 0 else -1
                if position >= 0:
                    own = np.float32(
                        estimates[group // num_bases][group % num_bases][min(depth, num_depths - 1)]
                    )
                    frontier.append((float(above * own), (token, node, group, position)))
        if not frontier:
            break
        best = max(frontier, key=lambda child: child[0])  # of equals the first
        if best[0] <= 0.0:
            break
        frontier.remove(best)
        probability, (token, parent, group, position) = best
        paths.append(((token,) if parent < 0 else (*paths[parent], token)))
        positions.append(position)
        node = len(tree)
        tree.append((token, parent, probability, group))
    return tree
