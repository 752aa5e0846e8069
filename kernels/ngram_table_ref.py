# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `ngram_table`, on dictionaries that forget nothing. Contexts are oldest first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.ngram_table import Classes, Growing, Shape

Context = tuple[int, ...]
Node = tuple[int, int, float, int]  # token, parent, path probability, group
UINT64 = (1 << 64) - 1
MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass
class Entry:
    """What followed one context."""

    count: int = 0
    weights: dict[int, float] = field(default_factory=dict)  # by successor; the heaviest first


def _cut(weights: Mapping[int, float], width: int) -> dict[int, float]:
    return dict(sorted(weights.items(), key=lambda item: -item[1])[:width])


def record_row_ref(
    table: dict[Context, Entry],
    text: Sequence[int],
    top_ids: Sequence[int],
    top_logits: Sequence[float],
    longest: int,
    width: int,
) -> None:
    """One accepted row of `record_rows`: what the target said after ``text``."""
    shares = np.exp(np.array(top_logits, np.float64) - top_logits[0])
    shares /= shares.sum()
    for order in range(1, min(longest, len(text)) + 1):
        if text[-order] < 0:
            break
        entry = table.setdefault(tuple(text[-order:]), Entry())
        mean = {token: weight * entry.count / (entry.count + 1) for token, weight in entry.weights.items()}
        for token, share in zip(top_ids, shares.tolist(), strict=True):
            mean[token] = mean.get(token, 0.0) + share / (entry.count + 1)
        entry.weights = _cut(mean, width)
        entry.count += 1


def record_text_ref(
    table: dict[Context, Entry],
    tokens: Sequence[int],
    order: int,
    step: float,
    cap: float,
    width: int,
) -> None:
    """See `record_text`."""
    for i in range(order, len(tokens)):
        if min(tokens[i - order : i + 1]) < 0:
            continue
        entry = table.setdefault(tuple(tokens[i - order : i]), Entry())
        others = {token: weight for token, weight in entry.weights.items() if token != tokens[i]}
        weight = min(entry.weights.get(tokens[i], 0.0) + step, cap)
        # The latest of equals first; the lightest of too many goes.
        entry.weights = _cut({tokens[i]: weight, **_cut(others, width - 1)}, width)


def mix_ref(key: int, token: int) -> int:
    """`mix`, without a sign."""
    return (key ^ (token + 1)) * MULTIPLIER & UINT64


def gumbel_ref(key: int) -> float:
    """The noise of a key."""
    bits = key & UINT64
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ bits >> 33) * multiplier & UINT64
    bits ^= bits >> 33
    return float(-np.log(-np.log(((bits >> 12) + 0.5) * 2.0**-52)))


def grow_tree_ref(
    table: Mapping[Context, Entry],
    context: Sequence[int],
    longest: int,
    shortest: int,
    classes: Classes,
    growing: Growing,
    budget: int,
    max_depth: int,
    chain: bool = False,
) -> list[Node]:
    """See `grow_tree`."""
    num_levels, num_shares, num_depths = classes.chances.shape

    def children(path: tuple[int, ...]) -> list[tuple[int, int, np.float32]]:
        """Token, group and own probability."""
        text = (*context, *path)
        known = [n for n in range(shortest, min(longest, len(text)) + 1) if text[-n:] in table]
        if not known:
            return []
        entry = table[text[-max(known) :]]
        weights: npt.NDArray[np.float64] = np.array(list(entry.weights.values()), np.float64)
        weights = (weights / weights[0]) ** (1 / growing.temperature)
        shares = weights / weights.sum()
        order = [i for i, share in enumerate(shares) if share > 0]
        level = min(max(known) - shortest, num_levels - 1)
        result = []
        for i in order[: growing.branches]:
            share = sum(bool(shares[i] > bound) for bound in classes.shares)
            group = level * num_shares + share
            own = classes.chances[level, share, min(len(path), num_depths - 1)]
            result.append((list(entry.weights)[i], group, own))
        return result

    tree: list[Node] = []
    paths: list[tuple[int, ...]] = []
    frontier: list[tuple[float, int, int, int]] = []

    def score(child: tuple[float, int, int, int]) -> float:
        above = paths[child[2]] if child[2] >= 0 else ()
        below = sum(len(path) > len(above) and path[: len(above)] == above for path in paths)
        return float(child[0] * (1 + growing.exploration * np.sqrt(below)))

    path: tuple[int, ...] = ()
    node, probability = -1, 1.0
    while len(tree) < budget:
        if chain:
            frontier.clear()
        if len(path) < max_depth:
            frontier += [
                (float(np.float32(probability) * own), token, node, group)
                for token, group, own in children(path)
            ]
        best = max(frontier, key=score, default=(0.0, 0, 0, 0))  # of equals the first
        if best[0] <= 0.0:
            break
        frontier.remove(best)
        probability, token, parent, group = best
        node = len(tree)
        path = (*(paths[parent] if parent >= 0 else ()), token)
        tree.append((token, parent, probability, group))
        paths.append(path)
    return tree


def shared_out_ref(weights: Sequence[float], shape: Shape) -> npt.NDArray[np.float64]:
    """float64 ``[len(weights)]``: what a request draws from, of a context's weights, heaviest first."""
    heavy: npt.NDArray[np.float64] = np.array(weights, np.float64)
    q = (heavy / heavy[0]) ** (1 / shape.temperature)
    if shape.top_k > 0:
        q[shape.top_k :] = 0.0
    q[q < shape.min_p] = 0.0
    if shape.top_p < 1.0:
        q[np.cumsum(q) - q >= shape.top_p * q.sum()] = 0.0
    return np.array(q / q.sum())


def draw_tree_ref(
    table: Mapping[Context, Entry],
    context: Sequence[int],
    longest: int,
    classes: Classes,
    shape: Shape,
    noise: int,
    budget: int,
    max_depth: int,
) -> list[Node]:
    """See `draw_tree`: the paths, and for each all that is said of its next child."""
    num_levels, num_ranks, num_shares, num_depths = classes.chances.shape
    tree: list[Node] = []
    paths: list[tuple[int, ...]] = [()]
    # By path: the chance that it is accepted, the length of its context, what is left of its q, its children so far.
    open_: dict[tuple[int, ...], tuple[float, int, dict[int, float], int]] = {}

    def estimate(path: tuple[int, ...], token: int) -> tuple[int, float]:
        """Of a child: its group, and the chance that it is accepted where the node is."""
        _, order, left, rank = open_[path]
        level = min(order - 1, num_levels - 1)
        s = sum(left[token] / sum(left.values()) > bound for bound in classes.shares)
        own = float(classes.chances[level, rank, s, min(len(path), num_depths - 1)])
        return int((level * num_ranks + rank) * num_shares + s), own

    def value(path: tuple[int, ...]) -> float:
        reached, _, left, rank = open_[path]
        if not left or rank == num_ranks:
            return 0.0
        total = sum(left.values())
        return reached * sum(share / total * estimate(path, token)[1] for token, share in left.items())

    def learn(path: tuple[int, ...], reached: float) -> None:
        text = (*context, *path)
        known = [n for n in range(1, min(longest, len(text)) + 1) if text[-n:] in table]
        if len(path) < max_depth and known:
            entry = table[text[-max(known) :]]
            q = shared_out_ref(list(entry.weights.values()), shape)
            left = {token: share for token, share in zip(entry.weights, q.tolist(), strict=True) if share > 0}
            open_[path] = reached, max(known), left, 0

    def gumbel(path: tuple[int, ...], token: int) -> float:
        key = mix_ref(0, noise)
        for each in (*path, token):
            key = mix_ref(key, each)
        return gumbel_ref(key)

    learn((), 1.0)
    least = 1.0
    while len(tree) < budget:
        path = max((p for p in paths if p in open_), key=value, default=None)  # of equals the first
        if path is None or value(path) <= 0.0:
            break
        least = min(least, value(path))
        reached, order, left, rank = open_[path]
        token = max(left, key=lambda each: np.log(left[each]) + gumbel(path, each))
        group, own = estimate(path, token)
        tree.append((token, paths.index(path) - 1, least, group))
        paths.append((*path, token))
        open_[path] = reached, order, {each: share for each, share in left.items() if each != token}, rank + 1
        learn(paths[-1], reached * own)
    return tree
