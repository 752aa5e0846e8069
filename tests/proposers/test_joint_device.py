# SPDX-License-Identifier: Apache-2.0
"""Heads' trees beside others' on the device, against a plain form in dictionaries of paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from vllm_ext.kernels.ancestor_bits import ancestor_bits
from vllm_ext.kernels.device_trees import EMPTY, WORDS, SlotTrees
from vllm_ext.proposers.hybrid import BOUNDS
from vllm_ext.proposers.joint_device import MIDDLES, MOST, Bins, Joint, Others, joint_prior
from vllm_ext.proposers.likeliest_device import Likeliest
from vllm_ext.proposers.sampled import widths
from vllm_ext.proposers.sampled_device import SUPPORT, Growth, Limits, Rows

Path = tuple[int, ...]
VOCAB, LEVELS, BASES, DEPTHS = 60, 3, 36, 4
HEAD = LEVELS - 1  # the level of its groups
BINS = Bins.on(torch.device("cpu"))


def after(path: Path, spread: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """int32 ids and float32 probabilities of the path's own."""
    draw = np.random.default_rng([11, *path])
    q = np.sort(np.exp(spread * draw.normal(size=SUPPORT)))[::-1]
    return draw.permutation(VOCAB)[:SUPPORT].astype(np.int32), (q / q.sum()).astype(np.float32)


def estimates_of(seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    made = draw.uniform(0.05, 0.95, (LEVELS, BASES, DEPTHS))
    made[HEAD] = joint_prior(BASES)[:, None] * draw.uniform(0.7, 1.1, (BASES, DEPTHS))
    return made.astype(np.float32)


def others_of(seed: int, nodes: int, chain: bool) -> dict[Path, int]:
    """Paths, parents first, with their groups; some go on as the head would."""
    draw = np.random.default_rng([3, seed])
    found: dict[Path, int] = {}
    while len(found) < nodes - seed % 3:
        above: Path = list(found)[-1] if chain and found else ((), *found)[draw.integers(1 + len(found))]
        token = int(after(above)[0][draw.integers(4)] if draw.random() < 0.6 else draw.integers(VOCAB))
        found.setdefault((*above, token), int(draw.integers(HEAD * BASES * DEPTHS)))
    return found


def trees_of(requests: Sequence[Mapping[Path, int]], nodes: int) -> tuple[SlotTrees, torch.Tensor]:
    trees = SlotTrees.of_size(len(requests), nodes, torch.device("cpu"))
    tokens = torch.zeros((len(requests), nodes), dtype=torch.int64)
    for slot, paths in enumerate(requests):
        rows = {(): 0} | {path: row for row, path in enumerate(paths, 1)}
        for row, (path, group) in enumerate(paths.items(), 1):
            trees.parents[slot, row], trees.depths[slot, row] = rows[path[:-1]], len(path)
            trees.groups[slot, row], tokens[slot, row - 1] = group, path[-1]
    start = torch.arange(0, (1 + len(requests)) * (1 + nodes), 1 + nodes, dtype=torch.int32)
    bits = ancestor_bits(trees.parents.flatten(), start, backend="torch").view(-1, 1 + nodes, WORDS)
    return trees._replace(bits=bits), tokens


def grow(growth: Growth, limits: Limits) -> list[list[list[Path]]]:
    """Grow; by request, the paths below which each pass was asked."""
    requests = len(limits.depth)
    asked_paths: list[list[list[Path]]] = [[] for _ in range(requests)]
    by_place: list[list[Path]] = [[] for _ in range(requests)]
    newest: list[list[Path]] = [[()] for _ in range(requests)]
    depth = 0
    while True:
        found = [[after(path) for path in of] for of in newest]
        rows = Rows(*(torch.from_numpy(np.array([[row[i] for row in of] for of in found])) for i in (0, 1)))
        asked = growth.give(depth, rows, limits, lambda first, count: torch.empty(0))
        if asked is None:
            return asked_paths
        assert asked.tokens.shape == asked.parents.shape == (requests, growth.widths[depth])
        for request in range(requests):
            places = zip(asked.tokens[request].tolist(), asked.parents[request].tolist(), strict=True)
            newest[request] = [
                (*(by_place[request][parent] if parent >= 0 else ()), token) for token, parent in places
            ]
            by_place[request] += newest[request]
            asked_paths[request].append([path for path in newest[request] if len(path) == depth + 1])
        depth += 1


def plain(
    others: Mapping[Path, int],
    estimates: np.ndarray,
    num_nodes: int,
    max_depth: int,
    most_depth: int,
    chain: bool,
) -> tuple[list[Path], dict[Path, int]]:
    """The tree's paths, the best first, and their groups."""
    groups = dict(others)
    chances = {path: min(float(estimates.flat[group]), MOST) for path, group in others.items()}

    def value(path: Path) -> float:
        return float(np.prod([chances[path[: length + 1]] for length in range(len(path))]))

    def learnt(given: float, shared: int, depth: int) -> tuple[int, float]:
        column = int((np.float32(given) > BOUNDS).sum())
        group = ((HEAD * BASES) + shared * len(MIDDLES) + column) * DEPTHS + min(depth, DEPTHS - 1)
        return group, min(float(estimates.flat[group]) * given / float(MIDDLES[column]), MOST)

    def better(path: Path) -> int:
        return sum(value(other) >= value(path) for other in chances)

    asked: list[Path] = [()]
    for depth in range(min(max_depth, num_nodes)):
        own: dict[Path, tuple[int, float]] = {}
        below: list[Path] = []
        for path in asked:
            for rank, (token, q) in enumerate(zip(*after(path), strict=True)):
                child = (*path, int(token))
                if child in others and child in chances:
                    groups[child], chances[child] = learnt(max(float(q), chances[child]), 1, depth)
                elif rank < num_nodes and depth < most_depth:
                    own[child] = learnt(float(q), 0, depth)
            below += [child for child in others if child[:-1] == path and child in chances]
        groups |= {child: group for child, (group, _) in own.items()}
        chances |= {child: chance for child, (_, chance) in own.items()}
        kept = sorted(own, key=lambda path: -value(path))[:num_nodes]
        if chain:
            rivals = [path for path in chances if path in others and len(path) == depth + 1]
            best = max(map(value, rivals), default=0.0)
            kept = kept[:1] if kept and value(kept[0]) > best else []
            if kept:
                for path in [path for path in chances if path in others and len(path) > depth]:
                    del chances[path]
                below = []
        for child in own.keys() - set(kept):
            del chances[child]
        sizes = widths(num_nodes, min(max_depth, num_nodes))
        if depth >= len(sizes):
            break
        newest = [path for path in (*below, *kept) if better(path) <= num_nodes]
        asked = sorted(newest, key=lambda path: -value(path))[: sizes[depth]]
    best_paths = sorted(chances, key=lambda path: -value(path))[:num_nodes]
    return best_paths, groups


def paths_of(growth: Growth, request: int) -> list[Path]:
    grown = growth.grown()
    rows: dict[int, Path] = {0: ()}
    places = zip(grown.tokens[request].tolist(), grown.parents[request].tolist(), strict=True)
    for row, (token, parent) in enumerate(places, 1):
        if parent >= 0:
            rows[row] = (*rows[parent], token)  # a parent stands before
            assert grown.depths[request, row - 1] == len(rows[row])
    return list(rows.values())[1:]


@pytest.mark.parametrize("nodes", [1, 3, 8, 16])
@pytest.mark.parametrize("max_depth", [1, 4, 8])
def test_it_is_the_plain_form(nodes: int, max_depth: int) -> None:
    requests = [others_of(seed, nodes, seed in (4, 5)) for seed in range(6)]
    requests[3] = {}
    chains = torch.tensor([False, False, False, False, True, True])
    depths = torch.tensor([99, 99, 2, 99, 99, 99], dtype=torch.int32)
    estimates = estimates_of(nodes)
    trees, tokens = trees_of(requests, nodes)
    limits = Limits(depths, chains)
    others = Others.of(trees, torch.arange(6), tokens)
    growth = Joint(nodes, max_depth, others, torch.from_numpy(estimates), BINS)
    grow(growth, limits)
    both = 0
    for request, said in enumerate(requests):
        wanted, groups = plain(said, estimates, nodes, max_depth, int(depths[request]), bool(chains[request]))
        found = paths_of(growth, request)
        assert found == wanted
        assert growth.groups()[request, : len(found)].tolist() == [groups[path] for path in found]
        assert (growth.groups()[request, len(found) :] == EMPTY).all()
        if chains[request]:
            assert [len(path) for path in found] == list(range(1, len(found) + 1))
        both += sum(path in said and groups[path] != said[path] for path in found)
    assert both > 0  # heads and others agree somewhere


def test_beside_nothing_it_asks_as_the_likeliest_tree() -> None:
    """With chances that are what the head gives."""
    nodes = 8
    estimates = torch.from_numpy(np.ones((LEVELS, BASES, DEPTHS), np.float32))
    estimates[HEAD, : len(MIDDLES)] = torch.from_numpy(MIDDLES)[:, None]
    trees, tokens = trees_of([{}, {}], nodes)
    limits = Limits(torch.tensor([99, 3], dtype=torch.int32), torch.tensor([False, True]))
    joint = Joint(nodes, 5, Others.of(trees, torch.arange(2), tokens), estimates, BINS)
    alone = Likeliest(nodes, 5)
    assert joint.widths == alone.widths
    assert grow(joint, limits) == grow(alone, limits)
    for request in range(2):
        assert paths_of(joint, request) == paths_of(alone, request)


def test_all_is_done_in_shapes_that_the_options_say() -> None:
    """No value is asked for: a graph can hold it."""
    nodes, estimates, noise = 8, torch.from_numpy(estimates_of(1)), torch.empty(0)
    trees, tokens = trees_of([others_of(seed, nodes, False) for seed in range(3)], nodes)
    slots = torch.arange(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda self: pytest.fail("waits"))
        patch.setattr(torch.Tensor, "__bool__", lambda self: pytest.fail("waits"))
        for name in ("from_numpy", "tensor", "as_tensor"):
            patch.setattr(torch, name, lambda *_, **__: pytest.fail("copies from the host"))
        growth = Joint(nodes, 4, Others.of(trees, slots, tokens), estimates, BINS)
        rows = Rows(torch.zeros(3, 1, SUPPORT, dtype=torch.int32), torch.full((3, 1, SUPPORT), 1 / SUPPORT))
        limits = Limits(torch.full((3,), 9, dtype=torch.int32), torch.zeros(3, dtype=torch.bool))
        for depth, width in enumerate((1, *growth.widths)):
            growth.give(depth, Rows(*(part.expand(-1, width, -1) for part in rows)), limits, lambda *_: noise)
        growth.grown()
