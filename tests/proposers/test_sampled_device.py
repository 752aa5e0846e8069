# SPDX-License-Identifier: Apache-2.0
"""Trees that grow on the device are those of the host's builders, node by node, by the same distributions and noise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import Model
from scipy.stats import chisquare, kstest

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.acceptance import Acceptance
from vllm_ext.proposers.base import Sampling
from vllm_ext.proposers.draft_model import shaped as shaped_on_host
from vllm_ext.proposers.dyspec import SampledTree
from vllm_ext.proposers.dyspec_device import DynamicTrees
from vllm_ext.proposers.likeliest_device import Likeliest
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.mixed_device import Mixed
from vllm_ext.proposers.rsd import BeamTree, BranchingTree
from vllm_ext.proposers.rsd_device import Beams, FixedBranching
from vllm_ext.proposers.sampled import ROOT, TreeBuilder, grow, widths
from vllm_ext.proposers.sampled_device import (
    SUPPORT,
    Asked,
    Grown,
    Growth,
    Limits,
    Rows,
    shaped,
    uniform,
)
from vllm_ext.proposers.spectr import IndependentDrafts
from vllm_ext.proposers.spectr_device import IndependentDrafts as DeviceDrafts

VOCAB = 40
DRAFTS = [Model(seed, VOCAB) for seed in range(4)]  # one of each request


def after(request: int, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """int32 ids and float32 probabilities, SUPPORT of them, likeliest first."""
    q = DRAFTS[request].after(list(path))
    ids = np.argsort(-q, kind="stable")[:SUPPORT].astype(np.int32)
    kept = q[ids].astype(np.float32)
    return ids, kept / kept.sum()


class Seen:
    """What a growth was given and has asked, by request: paths of places."""

    def __init__(self, requests: int, seed: int = 0, zeros: int = 0) -> None:
        self.requests, self.zeros = requests, zeros
        self.noise_of = np.random.default_rng(seed).random((requests, 300, SUPPORT))
        self.paths: list[list[list[int]]] = [[] for _ in range(requests)]  # by place

    def noise(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self.noise_of[:, first : first + count])

    def rows(self, paths: list[list[list[int]]]) -> Rows:
        found = [[after(request, path) for path in of] for request, of in enumerate(paths)]
        ids = np.array([[row[0] for row in of] for of in found])
        q = np.array([[row[1] for row in of] for of in found])
        if self.zeros:
            q[..., -self.zeros :] = 0.0
        return Rows(torch.from_numpy(ids), torch.from_numpy(q / q.sum(-1, keepdims=True)))

    def run(self, growth: Growth, limits: Limits | None = None) -> Any:
        free = (
            torch.full((self.requests,), 99, dtype=torch.int32),
            torch.zeros(self.requests, dtype=torch.bool),
        )
        rows = self.rows([[[]] for _ in range(self.requests)])
        for depth in itertools.count():
            asked = growth.give(depth, rows, limits or Limits(*free), self.noise)
            if asked is None:
                return growth.grown()
            assert asked.tokens.shape == asked.parents.shape == (self.requests, growth.widths[depth])
            newest = self._newest(asked)
            rows = self.rows(newest)
            for of, new in zip(self.paths, newest, strict=True):
                of.extend(new)

    def _newest(self, asked: Asked) -> list[list[list[int]]]:
        return [
            [
                [*(known[parent] if parent >= 0 else []), token]
                for token, parent in zip(tokens, parents, strict=True)
            ]
            for known, tokens, parents in zip(
                self.paths, asked.tokens.tolist(), asked.parents.tolist(), strict=True
            )
        ]


def nodes_of(grown: Any, request: int) -> list[tuple[int, int]]:
    """Parents' indices, ROOT for the root's children, and tokens, those without a parent left out."""
    parents, tokens = grown.parents[request].tolist(), grown.tokens[request].tolist()
    index = {
        row: place for place, row in enumerate(row for row, parent in enumerate(parents, 1) if parent >= 0)
    }
    return [
        (ROOT if parent == 0 else index[parent], token)
        for parent, token in zip(parents, tokens, strict=True)
        if parent >= 0
    ]


def host_tree(builder: TreeBuilder, request: int, zeros: int = 0) -> list[tuple[int, int]]:
    def row(node: int) -> Sparse:
        ids, q = after(request, path_of(builder, node))
        kept = slice(0, SUPPORT - zeros)
        return Sparse(ids[kept], q[kept].astype(np.float64) / q[kept].astype(np.float64).sum())

    grow([builder], lambda asked: [row(node) for _, node in asked])
    tree = builder.tree()
    return list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))


def all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for as many nodes as there may be, on the device and on the host."""
    from vllm_ext.proposers import dyspec, likeliest_device, likeliest_tree

    for module in (dyspec, likeliest_device):
        monkeypatch.setattr(module, "widths", lambda nodes, depth, *_: [nodes] * (depth - 1))
    monkeypatch.setattr(likeliest_tree, "share", lambda room: 1000)


@pytest.mark.parametrize("nodes", [1, 2, 5, 16])
def test_the_likeliest_trees_are_the_hosts(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    all_widths(monkeypatch)
    grown = Seen(4).run(Likeliest(nodes, 6))
    for request in range(4):
        assert nodes_of(grown, request) == host_tree(LikeliestTree(nodes, 6, asked_per_node=99), request)


def test_trees_keep_to_their_limits() -> None:
    depths, chains = torch.tensor([0, 1, 3, 9], dtype=torch.int32), torch.tensor([False, False, True, True])
    for growth in (Likeliest(12, 6), FixedBranching([3, 2, 1, 1], 12, drawn=False)):
        grown = Seen(4).run(growth, Limits(depths, chains))
        sizes = [len(nodes_of(grown, request)) for request in range(4)]
        assert sizes[0] == 0
        assert sizes[1] > 2
        assert sizes[2] == 3 <= sizes[3]
        assert grown.depths[1][grown.parents[1] >= 0].max() == 1
        for request in (2, 3):
            assert [parent for parent, _ in nodes_of(grown, request)] == list(range(-1, sizes[request] - 1))


class Drawing:
    """A host `Chance` that draws by rows of noise: the largest perturbed log-probability."""

    def __init__(self, noise: Iterator[np.ndarray]) -> None:
        self._noise = noise

    def draw(self, weights: np.ndarray) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(weights) - np.log(-np.log(next(self._noise)[: len(weights)]))))


class DrawingByNode(Drawing):
    """The same of a `SampledTree`, which comes back to a node's distribution later on."""

    builder: SampledTree

    def __init__(self, rows: np.ndarray, places: dict[tuple[int, ...], int]) -> None:
        super().__init__(iter(()))
        self._rows, self._places = rows, places

    def draw(self, weights: np.ndarray) -> int:
        (node,) = [node for node, left in self.builder._left.items() if left is weights]
        path = path_of(self.builder, node)
        self._noise = iter([self._rows[self._places[tuple(path)] + 1 if path else 0]])
        return super().draw(weights)


def path_of(builder: TreeBuilder, node: int) -> list[int]:
    if node == ROOT:
        return []
    return [*path_of(builder, builder.parents[node]), builder.tokens[node]]


def each_rows_children(rows: np.ndarray, branching: list[int]) -> Iterator[np.ndarray]:
    """A row of noise for each draw of a tree of fixed branching."""
    row, width = 0, 1
    for children in branching:
        for _ in range(width):
            yield from [rows[row]] * children
            row += 1
        width *= children


@pytest.mark.parametrize("branching", [[3, 2, 1, 1], [1, 1, 1], [5], [2, 3, 2]])
@pytest.mark.parametrize("drawn", [True, False])
def test_fixed_trees_are_the_hosts(branching: list[int], drawn: bool) -> None:
    seen = Seen(4, zeros=3)
    grown = seen.run(FixedBranching(branching, 10, drawn))
    for request in range(4):
        chance: Any = Drawing(each_rows_children(seen.noise_of[request], branching)) if drawn else None
        builder = BranchingTree(branching, 10, chance)
        assert nodes_of(grown, request) == host_tree(builder, request, zeros=3)


def test_beams_are_the_hosts() -> None:
    class Noise:
        def __init__(self, values: np.ndarray) -> None:
            self._values, self._next = values, 0

        def gumbel(self, size: tuple[int]) -> np.ndarray:
            row = self._values[self._next]
            self._next += 1
            perturbed: np.ndarray = -np.log(-np.log(row[: size[0]]))
            return perturbed

    for width, length, nodes in ((4, 4, 16), (3, 5, 11), (1, 4, 4), (16, 2, 20)):
        seen = Seen(4, seed=width)
        grown = seen.run(Beams(width, length, nodes))
        for request in range(4):
            builder = BeamTree(width, length, nodes, Noise(seen.noise_of[request]))  # type: ignore[arg-type]
            assert nodes_of(grown, request) == host_tree(builder, request)


def test_independent_drafts_are_the_hosts() -> None:
    for drafts, depth, nodes in ((4, 4, 16), (3, 5, 11), (1, 4, 4), (8, 2, 16)):
        seen = Seen(4, seed=drafts, zeros=28)
        growth = DeviceDrafts(drafts, depth, nodes)
        grown = seen.run(growth)
        agreed = 0
        for request in range(4):
            chance: Any = Drawing(iter(seen.noise_of[request]))
            builder = IndependentDrafts(drafts, min(depth, nodes // drafts), chance)
            expected = host_tree(builder, request, zeros=28)
            assert nodes_of(grown, request) == expected
            # Each draft's row counts as a child of the one that stands for its parent.
            own = grown.child_of[request].reshape(-1, drafts).tolist()
            for depth_, of in enumerate(own):
                for draft, row in enumerate(of):
                    assert (row == 0) == (depth_ == 0)
                    if row:
                        assert grown.parents[request][row - 1] >= 0
                        assert (
                            grown.tokens[request][row - 1]
                            == grown.tokens[request][(depth_ - 1) * drafts + draft]
                        )
            agreed += int((grown.parents[request] < 0).sum())
        assert bool(agreed) == (drafts > 1)


@pytest.mark.parametrize("nodes", [1, 3, 8, 16])
def test_dynamic_trees_have_the_values_of_the_hosts(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host draws a token when its slot is reached, so that one row's draws are spread: noise by row, kept there."""
    all_widths(monkeypatch)
    seen = Seen(4, seed=nodes)
    growth = DynamicTrees(nodes, 5)
    grown = seen.run(growth)
    paths = [{tuple(path): place for place, path in enumerate(of) if len(path)} for of in seen.paths]
    for request in range(4):
        chance = DrawingByNode(seen.noise_of[request], paths[request])
        chance.builder = SampledTree(nodes, 5, chance, Acceptance())  # type: ignore[arg-type]
        assert nodes_of(grown, request) == host_tree(chance.builder, request)


def test_two_kinds_in_one_batch() -> None:
    """Each request's tree is what it would be among its like; places are common."""
    flags = torch.tensor([True, False, True, False])
    for drawn in (lambda: FixedBranching([3, 2, 1, 1], 10, drawn=True), lambda: DeviceDrafts(3, 3, 10)):
        mixed = Seen(4, seed=5)
        growth = Mixed(Likeliest(10, 5), drawn(), flags)
        together = mixed.run(growth)
        alone = [Seen(4, seed=5).run(Likeliest(10, 5)), Seen(4, seed=5).run(drawn())]
        for request, flag in enumerate(flags.tolist()):
            own = alone[int(flag)]
            size = own.tokens.shape[1]
            for name in ("tokens", "parents", "child_of"):
                there = own.parents[request] >= 0 if name == "tokens" else slice(None)
                assert (
                    getattr(together, name)[request][:size][there] == getattr(own, name)[request][there]
                ).all()
            asked = (own.places[request] >= 0).nonzero()[:, 0].tolist()
            assert asked == (together.places[request] >= 0).nonzero()[:, 0].tolist()
            for node in asked:
                place = int(together.places[request][node])
                assert mixed.paths[request][place] == path_to(own, request, node)


def path_to(grown: Grown, request: int, node: int) -> list[int]:
    parent = int(grown.parents[request][node])
    above = path_to(grown, request, parent - 1) if parent > 0 else []
    return [*above, int(grown.tokens[request][node])]


def test_what_is_behind_no_node_does_not_matter() -> None:
    class Broken(Seen):
        def rows(self, paths: list[list[list[int]]]) -> Rows:
            found = super().rows(paths)
            if paths[0] == [[]]:
                return found
            filler = torch.tensor(
                [[path == [0] for path in of] for of in paths]
            )  # no node: token 0, no parent
            return found._replace(q=torch.where(filler[..., None], torch.nan, found.q))

    for make in (
        lambda: Likeliest(6, 5),
        lambda: DynamicTrees(6, 5),
        lambda: FixedBranching([3, 3], 12, drawn=True),
        lambda: Beams(4, 3, 12),
    ):
        depths = torch.tensor([9, 9, 1, 2], dtype=torch.int32)
        limits = Limits(depths, torch.zeros(4, dtype=torch.bool))
        good, bad = (
            Seen(4, seed=1, zeros=29).run(make(), limits),
            Broken(4, seed=1, zeros=29).run(make(), limits),
        )
        for request in range(4):
            assert nodes_of(good, request) == nodes_of(bad, request)


@pytest.mark.parametrize(
    "sampling",
    [
        (0.0, 1.0, 0, 0.0),
        (1.0, 1.0, 0, 0.0),
        (0.6, 0.8, 0, 0.0),
        (1.3, 1.0, 5, 0.0),
        (0.9, 0.95, 12, 0.1),
        (0.2, 0.01, 0, 0.0),
    ],
)
def test_distributions_are_shaped_as_on_the_host(sampling: tuple[float, float, int, float]) -> None:
    ids, q = after(1, [3])
    temperature, top_p, top_k, min_p = sampling
    expected = shaped_on_host(ids, np.log(q), Sampling(temperature, top_p, top_k, min_p, None))
    values = [torch.tensor([value]) for value in (temperature, top_p, top_k or VOCAB, min_p)]
    found = shaped(torch.from_numpy(ids)[None, None], torch.from_numpy(np.log(q))[None, None], values)
    kept = found.q[0, 0] > 0.0
    assert found.ids[0, 0][kept].tolist() == expected.ids.tolist()
    assert found.q[0, 0][kept].numpy() == pytest.approx(expected.q, rel=1e-4)


def test_noise_is_uniform_and_depends_on_each_of_its_keys() -> None:
    seeds, positions = torch.arange(200) * (1 << 33) - 77, torch.arange(200) % 7
    numbers = torch.arange(500)
    found = uniform(seeds, positions, numbers)
    assert kstest(found.flatten().numpy(), "uniform").pvalue > 1e-3
    for axis in (0, 1):  # neighbours are independent: the four quarters of pairs are as often
        a, b = found.narrow(axis, 0, found.shape[axis] - 1), found.narrow(axis, 1, found.shape[axis] - 1)
        counts = np.bincount(((a > 0.5) * 2 + (b > 0.5) * 1).flatten().numpy(), minlength=4)
        assert chisquare(counts).pvalue > 1e-3
    assert (uniform(seeds, positions + 1, numbers) != found).all()
    assert torch.equal(uniform(seeds, positions, numbers[100:]), found[:, 100:])


def test_as_many_nodes_are_asked_for_as_have_slots() -> None:
    for nodes in (1, 2, 7, 16, 53):
        for depth in (1, 2, 8, 32):
            found = widths(nodes, depth)
            assert len(found) < max(depth, 2)
            assert all(found)
            assert sum(found) <= 2 * nodes
