# SPDX-License-Identifier: Apache-2.0
"""Trees and caches for kernels of tree attention, and what is right for them: for tests and for `make kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from interpreter import IN_INTERPRETER

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.kv_layouts import amx_layout, in_order, sizes, token, vec_layout
from vllm_ext.kernels.tree_attention import PLAIN, Scoring, TreeRows, tree_attention

BLOCK_SIZE = 16 if IN_INTERPRETER else 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# float32: sums of a few hundred products of size 1 in another order; of 350 random cases each form is within 1e-6 of
# float64, and two forms within 1.5e-6 of each other. Found: 2.2e-6, once. 16 bits: both round a float32 of size 1
# or so to nearest, so they differ by one unit in the last place where that float32 lies near the middle.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 4e-6, "rtol": 4e-6},
    torch.bfloat16: {"atol": 1e-5, "rtol": 2**-7},
    torch.float16: {"atol": 1e-5, "rtol": 2**-10},
}
if torch.cuda.is_available():
    # tl.dot takes 16-bit weights where the values have 16 bits, which the interpreter and the CPU do not.
    TOLERANCE[torch.bfloat16] = {"atol": 2e-2, "rtol": 2**-7}
    TOLERANCE[torch.float16] = {"atol": 3e-3, "rtol": 2**-10}
NAN, SENTINEL = math.nan, 77.0
TENSORS = ("block_table", "first_row", "num_rows", "num_past", "context_len", "parents")
CPU_LAYOUTS = {"vec": vec_layout, "vec16": vec_layout, "amx": amx_layout}


@dataclass(frozen=True)
class Case:
    """Arguments of `tree_attention`, on the CPU."""

    query: torch.Tensor
    keys: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_size], any strides; or as in amx_layout
    values: torch.Tensor
    trees: TreeRows
    scale: float
    scoring: Scoring = PLAIN

    def run(self, backend: Backend) -> torch.Tensor:
        """The output, SENTINEL where nothing was written."""
        device = "cuda" if backend == "triton" and not IN_INTERPRETER else "cpu"
        query = move(self.query, device)
        output = torch.full_like(query, SENTINEL)
        # Not copied, so that what is prepared for it is used again.
        trees = self.trees if device == "cpu" else each(self.trees, lambda tensor: tensor.to(device))
        scoring = self.scoring
        if scoring.sinks is not None:
            scoring = scoring._replace(sinks=scoring.sinks.to(device))
        caches = move(self.keys, device), move(self.values, device)
        tree_attention(query, *caches, output, trees, self.scale, backend, scoring)
        return output.cpu()


def move(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """As .to(device), strides and all."""
    if device == "cpu":
        return tensor
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((size,), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(
    trees: list[tuple[int, list[int]]],  # context length and parents of each request
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (3, 1),  # query heads, KV heads
    head_size: int = 64,
    block_size: int = BLOCK_SIZE,
    gap: int = 2,  # rows of other requests before, between and behind
    layout: str = "vec",
    past: list[int] | None = None,  # rows of each request that have no query
) -> Case:
    generator = torch.Generator().manual_seed(len(trees) * 1000 + head_size + trees[0][0])

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    needed = [-(-(context + len(parents)) // block_size) for context, parents in trees]
    num_blocks = sum(needed) + 2
    # What no token was written to is NaN, as in memory nobody has cleared.
    if layout in CPU_LAYOUTS:
        kv_cache = torch.full((num_blocks, heads[1], block_size, 2 * head_size), NAN, dtype=dtype)
        keys, values = CPU_LAYOUTS[layout](kv_cache)
    else:  # vLLM's flash layout, tokens before heads
        kv_cache = torch.full((2, num_blocks, block_size, heads[1], head_size), NAN, dtype=dtype)
        keys, values = kv_cache.transpose(2, 3).unbind(0)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((len(trees), max(needed) + 1), -1, dtype=torch.int32)
    rows, first_row = gap, []
    past = past or [0] * len(trees)
    for request, (context, parents) in enumerate(trees):
        first_row.append(rows)
        rows += len(parents) - past[request] + gap
        for i in range(needed[request]):
            table[request, i] = block = free.pop()
            there = min(block_size, context + len(parents) - i * block_size)
            for cache in (keys, values):
                write(cache[block], randn(heads[1], there, head_size).to(dtype))
    return Case(
        query=randn(rows, heads[0], head_size).to(dtype),
        keys=keys,
        values=values,
        trees=TreeRows(
            block_table=table,
            first_row=ints(first_row),
            num_rows=ints([len(parents) for _, parents in trees]),
            num_past=ints(past),
            context_len=ints([context for context, _ in trees]),
            parents=ints([parent for _, parents in trees for parent in parents]),
        ),
        scale=head_size**-0.5,
    )


def write(block: torch.Tensor, tokens: torch.Tensor) -> None:
    """The first tokens of a block, ``[num_kv_heads, num_tokens, head_size]``."""
    for t in range(tokens.shape[1]):
        place = token(block, t)
        place.copy_(tokens[:, t].view(place.shape))


def each(trees: TreeRows, change: Callable[[torch.Tensor], torch.Tensor]) -> TreeRows:
    """The same with every tensor changed."""
    changed: dict[str, Any] = {name: change(getattr(trees, name)) for name in TENSORS}
    return replace(trees, **changed)


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def star(rows: int) -> list[int]:
    return [-1] + [0] * (rows - 1)


def binary(rows: int) -> list[int]:
    return [-1] + [(row - 1) // 2 for row in range(1, rows)]


def random_tree(rows: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(row, (1,), generator=generator)) for row in range(1, rows)]


def dense(case: Case) -> torch.Tensor:
    """The definition in float64: a loop over rows and heads, with no code of the reference's."""
    output = torch.full(case.query.shape, SENTINEL, dtype=torch.float64)
    kv_heads, block_size, _ = sizes(case.keys)
    group, all_keys, all_values = case.query.shape[1] // kv_heads, in_order(case.keys), in_order(case.values)
    start = 0
    for request, rows in enumerate(case.trees.num_rows.tolist()):
        parents = case.trees.parents[start : start + rows].tolist()
        start += rows
        context, past = int(case.trees.context_len[request]), int(case.trees.num_past[request])
        first = int(case.trees.first_row[request]) - past
        for row in range(past, rows):
            path, seen, places = row, list(range(context)), list(range(context))
            nodes = []
            while path != -1:
                nodes.append(context + path)
                path = parents[path]
            seen += nodes
            places += [context + len(nodes) - 1 - above for above in range(len(nodes))]
            if case.scoring.window:
                first_seen = context + len(nodes) - case.scoring.window
                seen = [token for token, place in zip(seen, places, strict=True) if place >= first_seen]
            if case.scoring.chunk:
                own = (context + len(nodes) - 1) // case.scoring.chunk
                seen = [
                    token
                    for token, place in zip(seen, places, strict=True)
                    if place // case.scoring.chunk == own
                ]
            slots = [(int(case.trees.block_table[request, t // block_size]), t % block_size) for t in seen]
            blocks, offsets = (torch.tensor(column) for column in zip(*slots, strict=True))
            for head in range(case.query.shape[1]):
                keys = all_keys[blocks, head // group, offsets].double()
                values = all_values[blocks, head // group, offsets].double()
                scores = keys @ case.query[first + row, head].double() * case.scale
                if case.scoring.soft_cap:
                    scores = case.scoring.soft_cap * torch.tanh(scores / case.scoring.soft_cap)
                weights, sink = torch.exp(scores), 0.0
                if case.scoring.sinks is not None:
                    sink = float(case.scoring.sinks[head].double().exp())
                output[first + row, head] = weights @ values / (weights.sum() + sink)
    return output


def check(case: Case, backend: Backend, **tolerance: float) -> None:
    got, want = case.run(backend), case.run("torch")
    torch.testing.assert_close(got, want, **(tolerance or TOLERANCE[case.query.dtype]))
    others = torch.ones(len(got), dtype=torch.bool)
    asked = (case.trees.num_rows - case.trees.num_past).tolist()
    for first, rows in zip(case.trees.first_row.tolist(), asked, strict=True):
        others[first : first + rows] = False
    assert (got[others] == SENTINEL).all()


MIXED = [(60, binary(16)), (0, [-1]), (131, chain(7)), (5, star(9)), (33, random_tree(12))]
