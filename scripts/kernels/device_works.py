# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: on a GPU in the sizes of an 8B model, in the interpreter in small ones, checked alone.

Where a kernel has the same cases for numba, that form is checked and timed here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from drawn_cases import many_draws, random_batch
from top_k_cases import contract, random_logits, special, strided, tied
from tree_cases import MIXED, Case, binary, chain, dense, each, make, move, random_tree, star
from work import Work, distance

from vllm_ext.kernels.ancestor_bits import MAX_ROWS, ancestor_bits
from vllm_ext.kernels.ancestor_bits_ref import ancestor_bits_ref
from vllm_ext.kernels.attend_nodes import attend_nodes
from vllm_ext.kernels.attend_nodes_ref import attend_context_ref, attend_nodes_ref
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.block_mass import AskedRows, add_block_mass
from vllm_ext.kernels.drawn_rows import RECURSIVE, choose_drawn
from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.kernels.tree_attention import TreeRows, tree_attention
from vllm_ext.kernels.tree_attention_triton import tree_attention_triton

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, VOCAB = 32, 8, 128, 16, 128256
SCALE = HEAD_SIZE**-0.5


def works(device: str) -> Iterator[Work]:
    """All of them; ``device`` is "cuda", or "cpu" for the interpreter."""
    yield from _top_k(device)
    yield from _bits(device, "triton")
    yield from _bits("cpu", "numba")
    yield from _drawn(device, "triton")
    yield from _drawn("cpu", "numba")
    yield from _attention(device)
    yield from _mass(device)
    if device == "cuda":
        yield from _attention_of_a_model()


def _top_k(device: str) -> Iterator[Work]:
    def error() -> float:
        wrong = 0.0
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows = [(random_logits(2, vocab, dtype), min(8, vocab)) for vocab in (1, 33, 1023, 1025, 5000)]
            for logits, k in [*rows, (tied(1025, dtype), 32), *special(dtype)]:
                there = strided(logits, logits.shape[1] + 7, device)
                wrong += top_k_ids(there, k, "triton").tolist() != contract(logits, k)
        return wrong

    yield Work("top_k_ids", "triton", "cases of tests/top_k_cases.py", error, 0.0)
    for rows in (1, 32, 256) if device == "cuda" else ():
        logits = torch.randn(rows, VOCAB, device=device).to(torch.bfloat16)

        def same(logits: torch.Tensor = logits) -> float:
            return float(not torch.equal(top_k_ids(logits, 8, "triton"), top_k_ids(logits, 8, "torch")))

        call = functools.partial(top_k_ids, logits, 8, "triton")
        yield Work("top_k_ids", "triton", f"{rows} x {VOCAB} bfloat16, k=8", same, 0.0, call, logits.nbytes)


def _bits(device: str, form: Backend) -> Iterator[Work]:
    trees = [chain(MAX_ROWS), binary(65), star(33), random_tree(MAX_ROWS), [-1], [], random_tree(64, 1)]
    if device == "cuda":
        trees *= 32
    starts = torch.tensor([0, *map(len, trees)]).cumsum(0).to(torch.int32)
    parents = torch.tensor([parent for tree in trees for parent in tree], dtype=torch.int32)

    def error() -> float:
        want = torch.zeros(len(parents), 5, dtype=torch.int32)
        ancestor_bits_ref(parents, starts, want)
        return float(not torch.equal(call().cpu(), want))

    call: Callable[[], torch.Tensor] = functools.partial(
        ancestor_bits, parents.to(device), starts.to(device), None, form
    )
    size = f"{len(trees)} trees of up to {MAX_ROWS} rows"
    timed = device == "cuda" or form == "numba"
    yield Work("ancestor_bits", form, size, error, 0.0, call if timed else None)


def _drawn(device: str, form: Backend) -> Iterator[Work]:
    def error() -> float:
        wrong = 0.0
        for seed in range(6):
            batch = random_batch(np.random.default_rng(seed)).to(device)
            (want, left), (got, ours) = (batch.chosen("torch"), batch.chosen(form))
            wrong = max(wrong, float(got != want), float(distance(ours.softmax(-1), left.softmax(-1))))
        return wrong

    yield Work("drawn_rows", form, "5 trees of up to 9 nodes, 50 tokens", error, 1e-4)
    if device == "cpu" and form == "triton":
        return
    for requests in (1, 32):
        batch = many_draws(RECURSIVE, requests, "", np.random.default_rng(0)).to(device)
        logits = torch.randn(len(batch.logits), VOCAB, device=device)
        call = functools.partial(choose_drawn, logits, *batch[1:], form)
        size = f"{requests} x 3 nodes, {VOCAB} tokens"
        yield Work("drawn_rows", form, size, lambda: 0.0, 0.0, call, requests * VOCAB * 4)


def _mass(device: str) -> Iterator[Work]:
    """The last rows of a prompt, asked what they attend to."""
    on_gpu = device == "cuda"
    heads, kv_heads, size, blocks = (HEADS, KV_HEADS, HEAD_SIZE, 128) if on_gpu else (4, 2, 16, 3)
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    number, block_size, dtype = (32, 64, torch.bfloat16) if on_gpu else (3, 16, torch.float32)
    keys, query = draw(blocks, kv_heads, block_size, size).to(dtype), draw(number, heads, size).to(dtype)
    place = torch.arange(number, device=device, dtype=torch.int32)
    table = torch.randperm(blocks, generator=generator, device=device).to(torch.int32)[None]
    seen = blocks * block_size - number + 1 + place

    def told(form: Backend) -> torch.Tensor:
        asked = AskedRows(table, place * 0, place, seen, torch.zeros(number, blocks, device=device))
        add_block_mass(query, keys, asked, size**-0.5, form)
        return asked.mass

    def error() -> float:
        return distance(told("triton"), told("torch"))

    call = functools.partial(told, "triton") if on_gpu else None
    num_bytes = keys.numel() * keys.element_size()
    yield Work(
        "block_mass",
        "triton",
        f"{number} rows behind {blocks * block_size} tokens",
        error,
        1e-5,
        call,
        num_bytes,
    )


def _attention(device: str) -> Iterator[Work]:
    """Trees of all kinds, beside float64."""
    for dtype, limit in LIMIT.items():
        cases = [
            make(MIXED, dtype, heads=(6, 2), block_size=16, layout="flash"),
            make([(300, random_tree(70)), (0, binary(40))], dtype, heads=(4, 1), head_size=80),
        ]
        for form, run in (("1 share", 1), ("3 shares", 3), ("nodes", None)):
            op = "attend_nodes" if run is None else "tree_attention"

            def error(cases: list[Case] = cases, run: int | None = run) -> float:
                errors = []
                for case in cases:
                    there = replace(
                        case,
                        query=move(case.query, device),
                        keys=move(case.keys, device),
                        values=move(case.values, device),
                        trees=each(case.trees, lambda tensor: tensor.to(device)),
                    )
                    got = torch.full_like(there.query, torch.nan)
                    _run(there, got, run)
                    want = dense(case)
                    rows = _query_rows(case.trees)
                    others = torch.ones(len(want), dtype=torch.bool)
                    others[rows] = False
                    untouched = bool(got.cpu()[others].isnan().all())
                    errors.append(distance(got.cpu()[rows], want[rows]) if untouched else torch.inf)
                return max(errors) if all(error == error for error in errors) else torch.nan

            name = str(dtype).removeprefix("torch.")
            yield Work(op, "triton", f"cases of tests/tree_cases.py, {name}, {form}", error, limit)


def _run(case: Case, output: torch.Tensor, splits: int | None) -> None:
    if splits is not None:
        tree_attention_triton(case.query, case.keys, case.values, output, case.trees, case.scale, {}, splits)
        return
    context = attend_context_ref(case.query, case.keys, case.values, case.trees, case.scale)
    attend_nodes(case.query, case.keys, case.values, *context, output, case.trees, case.scale, "triton")


def _query_rows(trees: TreeRows) -> torch.Tensor:
    asked = zip(trees.first_row.tolist(), (trees.num_rows - trees.num_past).tolist(), strict=True)
    return torch.tensor([row for first, rows in asked for row in range(first, first + rows)])


def _attention_of_a_model() -> Iterator[Work]:
    """Of a model of 8 billion parameters: 32 heads, 8 KV heads of 128, blocks of 16, bfloat16."""
    for requests, context in ((1, 2048), (1, 32768), (8, 2048), (32, 2048), (32, 8192)):
        for rows in (1, 16, 64):
            case = _model_case(requests, context, rows)
            length = context + rows
            num_bytes = 2 * requests * length * KV_HEADS * HEAD_SIZE * 2
            flops = 4 * requests * rows * HEADS * HEAD_SIZE * length
            size = f"{requests} x {rows} rows, context {context}, bfloat16"
            output = torch.empty_like(case.query)
            arguments: Any = case.query, case.keys, case.values, output, case.trees, SCALE, "triton"
            both = functools.partial(tree_attention, *arguments)
            limit = LIMIT[torch.bfloat16]
            error = functools.partial(_error, case, both, output)
            yield Work("tree_attention", "triton", size, error, limit, both, num_bytes, flops)
            part = attend_context_ref(case.query, case.keys, case.values, case.trees, SCALE)
            arguments = case.query, case.keys, case.values, *part, output, case.trees, SCALE, "triton"
            nodes = functools.partial(attend_nodes, *arguments)
            error = functools.partial(_error, case, nodes, output)
            few = num_bytes // length * rows + 4 * case.query.nbytes
            yield Work("attend_nodes", "triton", size, error, limit, nodes, few, flops // length * rows)
            in_two = _with_flash_attention(case, output, context)
            if in_two is not None:
                error = functools.partial(_error, case, in_two, output)
                what = "FlashAttention + attend_nodes"
                yield Work(what, "triton", size, error, limit, in_two, num_bytes, flops)


def _model_case(requests: int, context: int, rows: int) -> Case:
    blocks = -(-(context + rows) // BLOCK_SIZE)
    generator = torch.Generator("cuda").manual_seed(requests + context + rows)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    cache = randn(requests * blocks, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE).transpose(1, 2)
    order = torch.randperm(requests * blocks, generator=generator, device="cuda")

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    trees = TreeRows(
        order.view(requests, blocks).to(torch.int32),
        first_row=ints(*range(0, requests * rows, rows)),
        num_rows=ints(*[rows] * requests),
        num_past=ints(*[0] * requests),
        context_len=ints(*[context] * requests),
        parents=ints(*binary(rows) * requests),
        max_rows=rows,
    )
    query = randn(requests * rows, HEADS, HEAD_SIZE)
    return Case(query, cache[..., :HEAD_SIZE], cache[..., HEAD_SIZE:], trees, SCALE)


def _error(case: Case, call: Callable[[], object], output: torch.Tensor) -> float:
    output.fill_(torch.nan)
    call()
    wide = replace(case, query=case.query.double(), keys=case.keys.double(), values=case.values.double())
    context_output, context_lse = attend_context_ref(wide.query, wide.keys, wide.values, wide.trees, SCALE)
    want = torch.full_like(wide.query, torch.nan)
    attend_nodes_ref(wide.query, wide.keys, wide.values, context_output, context_lse, want, wide.trees, SCALE)
    return distance(output, want)


def _with_flash_attention(case: Case, output: torch.Tensor, context: int) -> Callable[[], None] | None:
    """Both forms' rival, where there is vLLM with FlashAttention."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError:
        return None
    keys, values = case.keys.transpose(1, 2), case.values.transpose(1, 2)
    trees, version = case.trees, get_flash_attn_version()

    def call() -> None:
        part, lse = flash_attn_varlen_func(
            q=case.query,
            k=keys,
            v=values,
            out=torch.empty_like(case.query),
            cu_seqlens_q=trees.row_start,
            max_seqlen_q=trees.max_rows,
            seqused_k=trees.context_len,
            max_seqlen_k=context + trees.max_rows,
            softmax_scale=SCALE,
            causal=False,
            block_table=trees.block_table,
            return_softmax_lse=True,
            fa_version=version,
        )
        attend_nodes(case.query, case.keys, case.values, part, lse, output, trees, SCALE, "triton")

    return call
