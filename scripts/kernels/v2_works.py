# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the V2 runner's steps: integers and copies, so exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from work import Work

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import RecycledTable, RowLayout, SlotTrees, grow, lay_out, walk
from vllm_ext.kernels.path_move import Caches, move_paths

CLASSES, DEPTHS = 5, 3


def works(device: str) -> Iterator[Work]:
    """All of them; ``device`` is "cuda", or "cpu" for the interpreter."""
    for requests, nodes, width, vocab in ((3, 6, 8, 50), (2, 16, 3, 20)):
        yield from _trees(device, requests, nodes, width, vocab, timed=False)
    yield _moves(device, layers=3, requests=4, columns=5, timed=False)
    if device == "cuda":
        for requests, nodes in ((1, 16), (32, 16), (256, 8)):
            yield from _trees(device, requests, nodes, 8, 128256, timed=True)
            yield _moves(device, layers=32, requests=requests, columns=1 + nodes, timed=True)


def _trees(device: str, requests: int, nodes: int, width: int, vocab: int, timed: bool) -> Iterator[Work]:
    generator = torch.Generator(device).manual_seed(nodes)

    def draw(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device, dtype=dtype)

    table = RecycledTable.empty(vocab, width, torch.device(device))
    table.successors[:] = draw(vocab, *table.successors.shape, dtype=torch.int32)
    table.classes[:] = draw(CLASSES, *table.classes.shape, dtype=torch.int32)
    estimates = torch.rand(CLASSES, DEPTHS, generator=generator, device=device)
    slots = torch.randperm(requests + 2, generator=generator, device=device)[:requests]
    roots = draw(vocab, requests + 2)
    chains = (draw(4, requests + 2) == 0).to(torch.int32)
    deepest = draw(9, requests + 2, dtype=torch.int32) + 1
    rows = requests * (1 + nodes)
    start = torch.arange(0, rows + 1, 1 + nodes, device=device, dtype=torch.int32)
    seq_lens = start[1:] * 2 + 7
    sampled = draw(vocab, rows)

    def run(backend: Backend) -> tuple[list[Callable[[], None]], list[torch.Tensor]]:
        trees = SlotTrees.of_size(requests + 2, nodes, torch.device(device))
        tokens = torch.zeros(requests, nodes, dtype=torch.int64, device=device)
        layout = RowLayout.of_size(requests + 1, rows, torch.device(device))
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        emitted = torch.zeros(requests, 1 + nodes, dtype=torch.int64, device=device)
        path, count = emitted.to(torch.int32), start[1:].clone()
        accepted = torch.zeros(rows, dtype=torch.int32, device=device)

        @functools.cache  # once trees have grown, so that it is not timed
        def given_and_drawn() -> tuple[torch.Tensor, torch.Tensor]:
            # Every other row samples what its first child is: paths are walked.
            given = torch.cat([roots[slots][:, None], tokens], 1).flatten()
            return given, torch.where(torch.arange(rows, device=device) % 2 == 0, given.roll(-1), sampled)

        def walk_it() -> None:
            given, drawn = given_and_drawn()
            walk(start, given, layout.parents, drawn, emitted, count, path, accepted, backend)

        calls: list[Callable[[], None]] = [
            functools.partial(
                grow, table, estimates, roots, slots, chains, deepest, None, trees, tokens, backend
            ),
            functools.partial(lay_out, trees, slots, start, start, seq_lens, positions, layout, backend),
            walk_it,
        ]
        results = [*trees, tokens, *layout, positions, emitted, path, count, accepted]
        return calls, results

    def error() -> float:
        outputs = []
        for backend in ("torch", "triton"):
            calls, results = run(backend)
            for call in calls:
                call()
            outputs.append([result.clone() for result in results])
        return float(sum(not torch.equal(one, other) for one, other in zip(*outputs, strict=True)))

    size = f"{requests} trees of {nodes} nodes, {width} of {vocab}"
    calls, _ = run("triton")
    for name, call in zip(("grow", "lay_out", "walk"), calls, strict=True):
        if timed:
            call()
        yield Work("device_trees", "triton", f"{name}: {size}", error, 0.0, call if timed else None)


def _moves(device: str, layers: int, requests: int, columns: int, timed: bool) -> Work:
    generator = torch.Generator(device).manual_seed(columns)
    blocks, heads, block_size, head_size = requests * 4, 8, 16, 128 if timed else 8
    shape = blocks, block_size, heads, 2 * head_size
    caches = [
        torch.randn(shape, generator=generator, device=device).to(torch.bfloat16).transpose(1, 2)
        for _ in range(layers)
    ]
    place = torch.arange(columns, device=device)
    base = torch.arange(requests, device=device)[:, None] * 4 * block_size + 3
    source, target = base + place * 2, base + place

    def moved(backend: Any) -> list[torch.Tensor]:
        copies = [cache.clone(memory_format=torch.preserve_format) for cache in caches]
        move_paths(Caches(copies), source, target, backend)
        return copies

    def error() -> float:
        both = zip(moved("torch"), moved("triton"), strict=True)
        return float(sum(not torch.equal(one, other) for one, other in both))

    size = f"{columns} tokens of {requests} in {layers} layers, {heads} KV heads of {head_size}, bfloat16"
    num_bytes = 2 * source.numel() * layers * heads * 2 * head_size * 2
    call = functools.partial(move_paths, Caches(caches), source, target, "triton")
    return Work("path_move", "triton", size, error, 0.0, call if timed else None, num_bytes)
