# SPDX-License-Identifier: Apache-2.0
"""The kernels of the V2 runner's steps, Triton's and numba's: integers and copies, so exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from work import Work

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import RowLayout, SlotTrees, Walked, lay_out, walk
from vllm_ext.kernels.kept_blocks import KeptParts, Window, end_with_block, keep_blocks
from vllm_ext.kernels.path_move import Caches, move_paths
from vllm_ext.kernels.recycling import (
    FIRST_CALL,
    Calibration,
    Marks,
    RecyclingTables,
    WalkedRows,
    grow,
    learn,
    mark,
)
from vllm_ext.proposers.token_recycling import SHARES

BASES, DEPTHS, LONGEST = 36, 4, 4
PAIRS, TEXTS = 1 << 16, 1 << 18


def works(device: str) -> Iterator[Work]:
    """All of them; ``device`` is Triton's: "cuda", or "cpu" for the interpreter."""
    forms: tuple[tuple[str, Backend], ...] = (device, "triton"), ("cpu", "numba")
    for where, form in forms:
        for requests, nodes, width, vocab in ((3, 6, 8, 50), (2, 15, 3, 20)):
            yield from _steps(where, requests, nodes, width, vocab, timed=False, form=form)
        if form == "triton":
            yield from _kept(where, requests=5, block_size=16, blocks=12, timed=False)
        yield _moves(where, layers=3, requests=4, columns=5, timed=False, form=form)
    yield from _steps("cpu", 4, 15, 8, 49152, timed=True, form="numba")
    yield _moves("cpu", layers=30, requests=4, columns=16, timed=True, form="numba")
    if device == "cuda":
        for requests in (1, 32, 256):
            yield from _kept(device, requests, block_size=64, blocks=128, timed=True)
        for requests, nodes in ((1, 15), (32, 15), (64, 3), (256, 7)):
            yield from _steps(device, requests, nodes, 8, 128256, timed=True)
            yield _moves(device, layers=32, requests=requests, columns=1 + nodes, timed=True)


class _Step:
    """A step's kernels, one after the other, as the drafter has them."""

    def __init__(
        self, device: str, requests: int, nodes: int, width: int, vocab: int, backend: Backend
    ) -> None:
        where, rows = torch.device(device), requests * (1 + nodes)
        generator = torch.Generator(device).manual_seed(nodes)

        def draw(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=generator, device=device, dtype=dtype)

        self.backend, self.call = backend, FIRST_CALL
        self.tables = RecyclingTables.empty(vocab, width, PAIRS, TEXTS, where)
        self.tables.successors[:vocab] = draw(vocab, vocab, width, dtype=torch.int32)
        self.tables.classes[:vocab] = draw(BASES // 2, vocab, width, dtype=torch.int32)
        prior = torch.rand(LONGEST, BASES, DEPTHS, generator=generator, device=device, dtype=torch.float64)
        self.calibration = Calibration.of_prior(prior, 8.0)
        self.trees, slots = SlotTrees.of_size(requests + 2, nodes, where), requests + 2
        self.layout = RowLayout.of_size(requests + 1, rows, where)
        self.marks = Marks.of_size(rows, where)
        self.walked = Walked.of_size(requests, rows, 1 + nodes, where)
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)
        self.slots = torch.randperm(slots, generator=generator, device=device)[:requests]
        self.text = draw(vocab, slots, 64, dtype=torch.int32)
        self.lengths = torch.full((slots,), 40, dtype=torch.int32, device=device)
        self.zeros, self.ones = (torch.full((slots,), n, dtype=torch.int32, device=device) for n in (0, 1))
        self.start = torch.arange(0, rows + 1, 1 + nodes, device=device, dtype=torch.int32)
        self.drafts = torch.zeros(requests, nodes, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logits = torch.randn(rows, vocab, generator=generator, device=device).to(torch.bfloat16)
        self.other = draw(vocab, rows)
        self.shares = torch.from_numpy(SHARES).to(device)
        self.rows = rows

    def grow(self) -> None:
        grow(
            self.tables,
            self.calibration.estimates,
            self.text,
            self.lengths,
            self.slots,
            self.zeros,
            self.ones * 99,
            None,
            LONGEST,
            self.trees,
            self.drafts,
            self.backend,
        )

    def lay_out(self) -> None:
        seq_lens = self.lengths[self.slots] + self.drafts.shape[1]
        lay_out(
            self.trees,
            self.slots,
            self.start,
            self.start,
            seq_lens,
            self.positions,
            self.layout,
            self.backend,
        )

    @functools.cached_property
    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and what is sampled: every other row samples what its first child is, so paths are walked."""
        roots = self.text[self.slots, 39][:, None].to(torch.int64)
        tokens = torch.cat([roots, self.drafts], 1).flatten()
        even = torch.arange(self.rows, device=tokens.device) % 2 == 0
        return tokens.to(torch.int32), torch.where(even, tokens.roll(-1), self.other)

    def walk(self) -> None:
        tokens, sampled = self.given
        walk(
            self.start,
            self.slots,
            tokens,
            self.positions,
            self.layout.parents,
            sampled,
            None,
            self.zeros,
            self.ones,
            self.walked,
            self.totals,
            self.backend,
        )

    def mark(self) -> None:
        walked = self.walked
        rows = WalkedRows(
            self.start,
            self.slots,
            self.given[0],
            self.positions,
            walked.accepted,
            walked.emitted,
            walked.num_emitted,
        )
        mark(
            self.tables,
            self.calibration,
            rows,
            self.layout,
            self.text,
            self.zeros,
            self.ones,
            LONGEST,
            self.call,
            self.marks,
            self.backend,
        )

    def learn(self) -> None:
        learn(
            self.tables,
            self.calibration,
            self.logits,
            self.given[0],
            self.shares,
            self.marks,
            self.backend,
        )

    @property
    def results(self) -> list[torch.Tensor]:
        """All that the kernels write."""
        parts = *self.tables, *self.calibration, *self.trees, *self.layout, *self.walked, *self.marks
        return [*parts, self.totals, self.drafts, self.positions]


def _steps(
    device: str, requests: int, nodes: int, width: int, vocab: int, timed: bool, form: Backend = "triton"
) -> Iterator[Work]:
    names = "grow", "lay_out", "walk", "mark", "learn"

    def error() -> float:
        outputs = []
        backends: tuple[Backend, Backend] = ("torch", form)
        for backend in backends:
            step = _Step(device, requests, nodes, width, vocab, backend)
            for name in names * 2:  # the second time with what was learnt
                getattr(step, name)()
                step.__dict__.pop("given", None) if name == "grow" else None
            outputs.append(step.results)
        return float(sum(not torch.equal(one, other) for one, other in zip(*outputs, strict=True)))

    if timed:
        # The readable form goes row by row: on a GPU small sizes are checked, and large ones timed.
        step = _Step(device, requests, nodes, width, vocab, form)
        for name in names:
            getattr(step, name)()
    for name in names:
        op = "device_trees" if name in ("lay_out", "walk") else "recycling"
        size = f"{name}: {requests} trees of {nodes} nodes, {width} of {vocab}"
        num_bytes = step.logits.nbytes if timed and name == "learn" else 0
        call = getattr(step, name) if timed else None
        yield Work(op, form, size, (lambda: 0.0) if timed else error, 0.0, call, num_bytes)


def _moves(
    device: str, layers: int, requests: int, columns: int, timed: bool, form: Backend = "triton"
) -> Work:
    generator = torch.Generator(device).manual_seed(columns)
    blocks, heads, block_size, head_size = requests * 4, 8, 16, 128 if timed else 8
    shape = blocks, block_size, heads, 2 * head_size
    caches = [
        torch.randn(shape, generator=generator, device=device).to(torch.bfloat16).transpose(1, 2)
        for _ in range(layers)
    ]
    blocks_of = torch.arange(requests, device=device)[:, None] * 4 * block_size + 3
    slots = (blocks_of + torch.arange(columns, device=device)).flatten()
    first_row = torch.arange(0, len(slots), columns, device=device, dtype=torch.int32)
    place = torch.arange(columns, device=device, dtype=torch.int32)
    path = torch.where(place < columns // 2, place * 2, place).repeat(requests, 1)

    def moved(backend: Any) -> list[torch.Tensor]:
        copies = [cache.clone(memory_format=torch.preserve_format) for cache in caches]
        move_paths(Caches(copies), path, first_row, slots, backend)
        return copies

    def error() -> float:
        both = zip(moved("torch"), moved(form), strict=True)
        return float(sum(not torch.equal(one, other) for one, other in both))

    size = f"{columns} tokens of {requests} in {layers} layers, {heads} KV heads of {head_size}, bfloat16"
    num_bytes = 2 * requests * (columns // 2 - 1) * layers * heads * 2 * head_size * 2
    call = functools.partial(move_paths, Caches(caches), path, first_row, slots, form)
    return Work("path_move", form, size, error, 0.0, call if timed else None, num_bytes)


def _kept(device: str, requests: int, block_size: int, blocks: int, timed: bool) -> Iterator[Work]:
    """Trees of eight rows behind texts of any length, of which a quarter is read."""
    generator, where = torch.Generator(device).manual_seed(requests), torch.device(device)
    window, rows = Window(1, blocks // 4, block_size), 8

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int32)

    table, ends = draw(0, 1 << 20, requests, blocks), draw(rows, blocks * block_size, requests)
    start = torch.arange(requests + 1, device=device, dtype=torch.int32) * rows
    kept = KeptParts.of_size(requests, window.sinks + window.blocks + 2, where)
    layout = RowLayout.of_size(requests, requests * rows, where)
    positions = ((ends - rows)[:, None] + torch.arange(rows, device=device)).flatten().to(torch.int64)

    def keep(backend: Backend) -> KeptParts:
        keep_blocks(table, ends, start, None, None, window, kept, backend=backend)
        return kept

    def end(backend: Backend) -> RowLayout:
        for values, laid in (
            (start, layout.row_start),
            (start[:-1], layout.first_row),
            (ends - rows, layout.context),
        ):
            laid.copy_(values)
        for values in layout.num_rows, layout.parents, layout.groups:
            values.fill_(rows)
        end_with_block(layout, positions, window, backend)
        return layout

    def wrong(call: Callable[[Backend], Iterable[torch.Tensor]]) -> float:
        got = [values.clone() for values in call("triton")]
        return float(sum(not torch.equal(one, other) for one, other in zip(got, call("torch"), strict=True)))

    size = f"{requests} of {blocks} blocks, {window.blocks} of them read"
    run, num_bytes = functools.partial(keep, "triton"), 8 * requests * kept.table.shape[1]
    yield Work("kept_blocks", "triton", size, lambda: wrong(keep), 0.0, run if timed else None, num_bytes)
    run_end = functools.partial(end_with_block, layout, positions, window, "triton")
    size = f"{requests} trees of {rows} rows"
    yield Work("kept_blocks", "triton", size, lambda: wrong(end), 0.0, run_end if timed else None)
