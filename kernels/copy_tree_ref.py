# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `copy_tree`: each copy as a path, the most probable path of the union next."""

from collections.abc import Sequence

import numpy as np

from vllm_ext.kernels.copy_tree import Float32

Node = tuple[int, int, float, int]  # token, parent, path probability, group


def copy_tree_ref(
    text: Sequence[int],
    copies: Sequence[tuple[int, int, int]],
    chances: Float32,
    lengths: Sequence[int],
    vocab_size: int,
    budget: int,
    max_depth: int,
    chain: bool = False,
) -> list[Node]:
    """See `copy_tree`."""
    paths = []  # what each copy has, and its groups
    for at, length, kind in copies:
        path = list(text[at : at + max(max_depth, 0)])
        known = next((i for i, token in enumerate(path) if not 0 <= token < vocab_size), len(path))
        groups = [
            kind * chances.shape[1] + sum(length + depth > bound for bound in lengths)
            for depth in range(known)
        ]
        paths.append((path[:known], groups))
    tree: dict[tuple[int, ...], tuple[float, int]] = {}  # path probability and group by path
    newest: tuple[int, ...] = ()
    while len(tree) < budget:
        children: list[tuple[float, int, tuple[int, ...]]] = []
        for path, groups in paths:
            depth = next((d for d in range(len(path)) if tuple(path[: d + 1]) not in tree), len(path))
            above = tuple(path[:depth])
            if depth == len(path) or (chain and above != newest):
                continue
            own = chances.reshape(-1, chances.shape[2])[groups[depth], min(depth, chances.shape[2] - 1)]
            probability = float(np.float32(tree[above][0] if above else 1.0) * own)
            children.append((probability, groups[depth], tuple(path[: depth + 1])))
        probability, group, newest = max(children, key=lambda child: child[0], default=(0.0, 0, ()))
        if probability <= 0.0:
            break
        tree[newest] = probability, group
    order = list(tree)
    return [(path[-1], order.index(path[:-1]) if len(path) > 1 else -1, *tree[path]) for path in order]
