# SPDX-License-Identifier: Apache-2.0
"""The numba kernels that have a reference, in the sizes of a small model's steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gates
import numpy as np
import torch
from top_k_cases import contract, random_logits, special, strided, tied
from tree_cases import Case, binary, dense, make
from work import Work, distance

from vllm_ext.codecs.kivi import Kivi, KiviOptions
from vllm_ext.kernels import (
    best_first_tree,
    copy_tree,
    fuse_trees,
    ngram_table,
    suffix_array,
    suffix_index,
    trie,
)
from vllm_ext.kernels.encoded_attention import EncodedRows, encoded_attention
from vllm_ext.kernels.kv_layouts import vec_layout
from vllm_ext.kernels.kv_move import Places, move_tokens
from vllm_ext.kernels.linear import linear, pack
from vllm_ext.kernels.linear8 import linear8, pack8
from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.kernels.tree_attention import tree_attention

VOCAB, WIDTH, NODES = 49152, 8, 16
COLD = 128 << 20  # bytes of logits that are cycled through: they come from memory
Call = Callable[[], object]


def works(ops: set[str] | None) -> Iterator[Work]:
    """Those of some ops; None: of all."""
    rng = np.random.default_rng(0)
    makers: dict[str, Callable[[np.random.Generator], Iterator[tuple[str, Call, int]]]] = {
        "best_first_tree": _best_first,
        "copy_tree": _copies,
        "fuse_trees": _fused,
        "kv_move": _moved,
        "ngram_table": _ngrams,
        "suffix_array": _suffix_array,
        "suffix_index": _suffix_index,
        "trie": _trie,
    }
    assert set(makers) == set(gates.TESTS)
    wanted = [op for op in makers if ops is None or op in ops]
    right = gates.passed(wanted)

    def held(op: str) -> float:
        return 0.0 if right[op] else float("inf")

    for op in wanted:
        for size, call, num_bytes in makers[op](rng):
            yield Work(op, "numba", size, functools.partial(held, op), 0.0, call, num_bytes)
    if ops is None or "top_k_ids" in ops:
        yield from _top_k()
    if ops is None or "tree_attention" in ops:
        yield from _attention()
    if ops is None or "encoded_attention" in ops:
        yield from _encoded()
    if ops is None or "linear" in ops:
        yield from _linear()
    if ops is None or "linear8" in ops:
        yield from _linear8()


def _top_k() -> Iterator[Work]:
    for dtype in (torch.bfloat16, torch.float32):

        def error(dtype: torch.dtype = dtype) -> float:
            wrong = 0.0
            for logits, k in [
                *((random_logits(2, vocab, dtype), min(8, vocab)) for vocab in (1, 33, 256, 1025, 5000)),
                (tied(1025, dtype), 32),
                *special(dtype),
            ]:
                there = strided(logits, logits.shape[1] + 7)
                wrong += top_k_ids(there, k, "numba").tolist() != contract(logits, k)
            return wrong

        logits = torch.randn(6, VOCAB).to(dtype)
        pool = itertools.cycle(logits.repeat(max(1, COLD // logits.nbytes), 1, 1))

        def call(pool: Iterator[torch.Tensor] = pool) -> object:
            return top_k_ids(next(pool), WIDTH, "numba")

        size = f"6 x {VOCAB} {_name(dtype)} from memory, k={WIDTH}"
        yield Work("top_k_ids", "numba", size, error, 0.0, call, logits.nbytes)


def _attention() -> Iterator[Work]:
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for context in (60, 1900):
            case = make([(context, binary(16))], dtype, heads=(9, 3), block_size=128, gap=0)
            output = torch.empty_like(case.query)
            arguments: Any = case.query, case.keys, case.values, output, case.trees, case.scale, "numba"
            call = functools.partial(tree_attention, *arguments)

            def error(case: Case = case) -> float:
                return distance(case.run("numba"), dense(case))

            flops = 4 * 16 * 9 * 64 * (context + 16)
            size = f"16 rows, context {context}, {_name(dtype)}"
            num_bytes = 2 * (context + 16) * 3 * 64 * dtype.itemsize
            yield Work("tree_attention", "numba", size, error, limit, call, num_bytes, flops)


def _encoded() -> Iterator[Work]:
    heads, kv_heads, head_size, context = 9, 3, 64, 1900
    codec = Kivi(KiviOptions(), 64, head_size)
    blocks = context // codec.block_size + 2 + codec.format.tail_blocks(4, codec.block_size + 32)
    pages = torch.zeros((blocks, kv_heads, codec.block_size, codec.bytes_per_token), dtype=torch.uint8)
    table, scale = torch.arange(blocks, dtype=torch.int32)[None], head_size**-0.5
    query, key, value = (torch.randn(context + 1, n, head_size) for n in (heads, kv_heads, kv_heads))
    output = torch.empty_like(query)

    def step(first: int, num: int) -> Callable[[], None]:
        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        rows = EncodedRows(table, ints(0), ints(num), ints(num), ints(first), ints(*range(-1, num - 1)))
        q, k, v, out = (each[first : first + num] for each in (query, key, value, output))
        return lambda: encoded_attention(q, k, v, pages, out, rows, codec.format, scale, "numba")

    def error() -> float:
        """The last row beside float64, over what the blocks decode to and what is not encoded yet."""
        call()
        whole = context // codec.block_size
        decoded = codec.decode(pages[table[0, :whole]].flatten(2))
        sides = (
            torch.cat(
                [side.transpose(0, 1).flatten(1, 2), raw[whole * codec.block_size :].transpose(0, 1)], 1
            )
            for side, raw in zip(decoded, (key, value), strict=True)
        )
        keys, values = (side.double().repeat_interleave(heads // kv_heads, 0) for side in sides)
        weights = ((keys @ query[context].double()[..., None])[..., 0] * scale).softmax(1)
        return distance(output[context], (weights[:, None] @ values)[:, 0])

    step(0, context)()
    call = step(context, 1)
    size = f"1 row, context {context}, kivi 4 bits, float32"
    num_bytes = context * kv_heads * codec.bytes_per_token
    yield Work("encoded_attention", "numba", size, error, 1e-5, call, num_bytes)


def _linear() -> Iterator[Work]:
    rows, inputs, outputs = 12, 576, 3072
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(COLD // (2 * inputs * outputs))]
    packed, bias = [pack(weight) for weight in weights], torch.randn(outputs)
    x = torch.randn(rows, inputs).bfloat16()

    def error() -> float:
        exact = x.double() @ weights[0].double().T + bias.double()
        return distance(linear(x, packed[0], bias, "numba"), exact)

    pool = itertools.cycle(packed)
    size = f"{rows} rows, {inputs} to {outputs}, bfloat16 from memory"
    num_bytes, flops = weights[0].nbytes, 2 * rows * inputs * outputs
    yield Work(
        "linear", "numba", size, error, 1e-2, lambda: linear(x, next(pool), bias, "numba"), num_bytes, flops
    )


def _linear8() -> Iterator[Work]:
    inputs, outputs = 576, 8192
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(COLD // (inputs * outputs))]
    packed, bias = [pack8(weight) for weight in weights], torch.randn(outputs)
    pool = itertools.cycle(packed)
    for rows in (1, 4):
        x = torch.randn(rows, inputs).bfloat16()

        def error(x: torch.Tensor = x) -> float:
            exact = x.double() @ weights[0].double().T + bias.double()
            return distance(linear8(x, packed[0], bias, "numba"), exact)

        def call(x: torch.Tensor = x) -> torch.Tensor:
            return linear8(x, next(pool), bias, "numba")

        size = f"{rows} rows, {inputs} to {outputs}, 8 bits from memory"
        num_bytes = packed[0].codes.nbytes + packed[0].scale.nbytes
        yield Work("linear8", "numba", size, error, 3e-2, call, num_bytes, 2 * rows * inputs * outputs)


def _moved(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    layers, moved = 30, 4
    views = [
        view
        for _ in range(layers)
        for view in vec_layout(torch.zeros(16, 3, 128, 2 * 64, dtype=torch.bfloat16))
    ]
    places = Places(views)
    source, target = np.arange(10, 10 + moved), np.arange(5, 5 + moved)
    size = f"{moved} tokens in {layers} layers, 3 KV heads of 64, bfloat16"
    yield size, functools.partial(move_tokens, places, source, target), 2 * moved * layers * 3 * 2 * 64 * 2


def _best_first(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    tables = best_first_tree.SuccessorTables.empty(VOCAB, WIDTH, 1 << 16, 1 << 16)
    tables.successors[:] = rng.integers(0, VOCAB, tables.successors.shape)
    tables.bases[:] = rng.integers(1, 4, tables.bases.shape)
    estimates = np.sort(rng.random((4, 9, 4)).astype(np.float32))[:, :, ::-1].copy()
    grow = functools.partial(
        best_first_tree.grow_trees,
        tables,
        estimates,
        rng.integers(0, VOCAB, (8, 4)).astype(np.int32),
        np.full(8, NODES),
        np.full(8, NODES),
        np.zeros(8, np.bool_),
        np.zeros((0, WIDTH), np.int32),
    )
    yield f"grow_trees: 8 of {NODES} nodes", grow, 0
    rows = 8 * (1 + NODES)
    record = functools.partial(
        best_first_tree.record_rows,
        tables,
        np.arange(0, rows + 1, 1 + NODES, dtype=np.int32),
        rng.integers(0, VOCAB, rows).astype(np.int32),
        np.tile(np.array(binary(1 + NODES), np.int32), 8),
        rng.random(rows) < 0.3,
        rng.integers(0, VOCAB, 8).astype(np.int32),
        rng.integers(0, VOCAB, (rows, WIDTH)).astype(np.int32),
        -np.sort(rng.random((rows, WIDTH)).astype(np.float32)),
        np.array([0.1, 0.3, 0.6], np.float32),
    )
    yield f"record_rows: {rows}", record, 0


def _copies(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    text = rng.integers(0, VOCAB, 2000).astype(np.int32)
    call = functools.partial(
        copy_tree.copy_tree,
        text,
        np.array([[100, 5, 0], [700, 3, 1], [1500, 2, 1]]),
        np.full((3, 3, 2), 0.9, np.float32),
        np.array([1, 4]),
        VOCAB,
        NODES,
        NODES,
        False,
    )
    yield f"{NODES} nodes of 3 copies", call, 0


def _fused(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    parents = np.tile(np.array(binary(1 + NODES)[1:], np.int32) - 1, 3)
    tokens = rng.integers(0, 3, len(parents)).astype(np.int32) + np.tile(np.arange(NODES), 3).astype(np.int32)
    chances = np.tile(np.linspace(0.9, 0.05, NODES, dtype=np.float32), 3)
    call = functools.partial(
        fuse_trees.fuse_trees,
        tokens,
        parents,
        chances,
        np.arange(0, len(parents) + 1, NODES, dtype=np.int32),
        np.full((7, 3, 2), 0.5, np.float32),
        np.array([0.3, 0.7], np.float32),
        NODES,
    )
    yield f"3 trees of {NODES} nodes", call, 0


def _ngrams(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    table = ngram_table.NgramTable.empty(1 << 16, WIDTH)
    rows = 8
    record = functools.partial(
        ngram_table.record_rows,
        table,
        np.array([0, rows], np.int32),
        rng.integers(0, 50, rows).astype(np.int32),
        np.arange(-1, rows - 1, dtype=np.int32),
        np.ones(rows, np.bool_),
        rng.integers(0, 50, (1, 3)).astype(np.int32),
        np.stack([rng.permutation(50)[:WIDTH] for _ in range(rows)]).astype(np.int32),
        -np.sort(rng.random((rows, WIDTH)).astype(np.float32)),
        VOCAB,
    )
    for order in (1, 2):
        ngram_table.record_text(table, rng.integers(0, 50, 5000).astype(np.int32), order, 0.04, 3.0, VOCAB)
    grow = functools.partial(
        ngram_table.grow_tree,
        table,
        rng.integers(0, 50, 4).astype(np.int32),
        1,
        ngram_table.Classes(np.full((4, 3, 4), 0.8, np.float32), np.array([0.1, 0.4], np.float32)),
        ngram_table.Growing(branches=3, temperature=1.0, exploration=0.0),
        NODES,
        NODES,
        False,
    )
    draw = functools.partial(
        ngram_table.draw_tree,
        table,
        rng.integers(0, 50, 4).astype(np.int32),
        ngram_table.Classes(np.full((4, 3, 3, 4), 0.8, np.float32), np.array([0.1, 0.4], np.float32)),
        ngram_table.Shape(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
        1,
        NODES,
        NODES,
    )
    yield f"grow_tree: {NODES} nodes", grow, 0
    yield f"draw_tree: {NODES} nodes", draw, 0
    yield f"record_rows: {rows} accepted", record, 0


def _suffix_array(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    words = 200
    tokens = np.concatenate([[words], rng.integers(0, words, 1 << 17), [words]]).astype(np.uint16)
    # Sorted by their first four tokens, which is enough for contexts of four.
    padded = np.concatenate([tokens, np.full(4, words, np.uint16)])
    suffixes = np.lexsort([padded[i : i + len(tokens)] for i in (3, 2, 1, 0)]).astype(np.int32)
    context = tokens[500:503].astype(np.int32)
    find = functools.partial(suffix_array.find, tokens, suffixes, words, context)
    yield f"find: 3 tokens among {len(tokens)}", find, 0
    rows = rng.integers(0, 3, (64, 8)).astype(np.int32)
    grow = functools.partial(
        suffix_array.grow_tree,
        rows,
        0,
        np.full((18, 4), 0.8, np.float32),
        np.array([0.3, 0.6], np.float32),
        np.array([1, 3], np.int32),
        NODES,
        NODES,
        False,
    )
    yield f"grow_tree: {NODES} nodes of 64 continuations", grow, 0


def _suffix_index(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    own, shared = suffix_index.SuffixIndex.empty(1 << 13), suffix_index.SuffixIndex.empty(1 << 16)
    suffix_index.append(own, rng.integers(0, 30, 4000).astype(np.int32), 0, VOCAB)
    suffix_index.append(shared, rng.integers(0, 30, 60000).astype(np.int32), 0, VOCAB)
    estimates = suffix_index.Estimates(
        np.full((3, 4, 5), 0.8, np.float32), np.array([1, 2, 5]), np.array([0.2, 0.4, 0.5, 0.7])
    )
    call = functools.partial(suffix_index.grow_tree, own, shared, estimates, 1, 32, NODES, NODES, False)
    yield f"grow_tree: {NODES} nodes, 64,000 tokens of text", call, 0


def _trie(rng: np.random.Generator) -> Iterator[tuple[str, Call, int]]:
    made = trie.build(rng.integers(0, VOCAB, (20000, 6)).astype(np.int32))
    states = rng.integers(0, made.num_states, 32).astype(np.int32)
    masks = np.empty((32, -(-VOCAB // 32)), np.int32)
    call = functools.partial(trie.fill_masks, made, states, VOCAB - 1, masks)
    yield f"fill_masks: 32 rows of {VOCAB} tokens", call, masks.nbytes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
