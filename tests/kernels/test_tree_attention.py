# SPDX-License-Identifier: Apache-2.0
"""Every backend of `tree_attention` against dense attention in float64, written out here.

The triton form runs through triton's interpreter in a process of its own, as in test_top_k.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels.tree_attention import tree_attention, vec_layout

Backend = Literal["auto", "torch", "numba", "triton"]

IN_INTERPRETER = os.environ.get("TREE_ATTENTION_TEST_BACKEND") == "triton"
BACKENDS: list[Backend] = ["triton"] if IN_INTERPRETER else ["torch", "numba"]
# Unit-variance inputs; 16-bit results are rounded once, at the end.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
CONTEXTS = [0, 1, 23, 24, 30, 31, 32, 33, 64, 700]
if IN_INTERPRETER:
    TOLERANCE[torch.bfloat16] *= 2  # it truncates where hardware rounds
    CONTEXTS = [0, 1, 31, 32, 100]  # and is slow

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

CHAIN = [-1, 0, 1, 2, 3]
STAR = [-1, 0, 0, 0, 0, 0, 0]
BUSHY = [-1, 0, 0, 1, 1, 2, 3, 6, 0]
ROOT = [-1]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tree(rng: np.random.Generator, num_rows: int) -> list[int]:
    return [-1, *(int(rng.integers(row)) for row in range(1, num_rows))]


@dataclass
class Case:
    """A batch: its arguments, and what a plain reading of the definition gives."""

    arguments: dict[str, Any]
    expected: torch.Tensor  # float64 [num_tokens, num_heads, head_size]; NaN in rows of nobody


def make(
    trees: list[list[int]],
    contexts: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    gap: int = 3,
    spread: float = 1.0,
    sees: Any = None,
    seed: int = 0,
) -> Case:
    """``gap`` rows of other requests lie before each tree. ``sees(parents, row, other)`` replaces the mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [context + len(tree) for context, tree in zip(contexts, trees, strict=True)]
    max_blocks = max(-(-length // block_size) for length in lengths) + 1
    blocks = torch.randperm(max_blocks * len(trees) + 2, generator=generator, dtype=torch.int32)
    table = blocks[: max_blocks * len(trees)].reshape(len(trees), max_blocks)
    # NaN wherever no token is: what the kernel should not read, it had better not read.
    cache = torch.full((len(blocks), kv_heads, block_size, 2 * head_size), torch.nan, dtype=dtype)
    key_cache, value_cache = vec_layout(cache)
    first_row = [gap + sum(len(tree) + gap for tree in trees[:i]) for i in range(len(trees))]
    num_tokens = first_row[-1] + len(trees[-1]) + gap
    query = torch.randn(num_tokens, heads, head_size, generator=generator).mul_(spread).to(dtype)
    expected = torch.full((num_tokens, heads, head_size), torch.nan, dtype=torch.float64)
    for request, (tree, context, length) in enumerate(zip(trees, contexts, lengths, strict=True)):
        keys = torch.randn(length, kv_heads, head_size, generator=generator).mul_(spread).to(dtype)
        values = torch.randn(length, kv_heads, head_size, generator=generator).to(dtype)
        for token in range(length):
            block = table[request, token // block_size]
            key_cache[block, :, token % block_size] = keys[token]
            value_cache[block, :, token % block_size] = values[token]
        for row in range(len(tree)):
            visible = set(range(context))
            if sees is None:
                node = row
                while node >= 0:
                    visible.add(context + node)
                    node = tree[node]
            else:
                visible |= {context + other for other in range(len(tree)) if sees(tree, row, other)}
            index = torch.tensor(sorted(visible))
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = keys[index, kv_head].double() @ query[first_row[request] + row, head].double()
                shares = (scores / head_size**0.5).softmax(0)
                expected[first_row[request] + row, head] = shares @ values[index, kv_head].double()
    return Case(
        {
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "output": torch.full_like(query, torch.nan),
            "block_table": table,
            "first_row": int32(first_row),
            "num_rows": int32([len(tree) for tree in trees]),
            "context_len": int32(contexts),
            "parents": int32([parent for tree in trees for parent in tree]),
            "scale": head_size**-0.5,
        },
        expected,
    )


def error(case: Case, backend: Backend) -> float:
    """Largest deviation; infinite when a row of nobody was written, or one of ours was not."""
    output = case.arguments["output"].fill_(torch.nan)
    tree_attention(**case.arguments, backend=backend)
    if not torch.equal(output.isnan(), case.expected.isnan()):
        return float("inf")
    return float((output.double() - case.expected).nan_to_num().abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 4, "kv_heads": 4},
        {"heads": 9, "kv_heads": 3},
        {"heads": 4, "kv_heads": 1, "head_size": 32},
        {"heads": 8, "kv_heads": 1, "head_size": 96},
        {"heads": 2, "kv_heads": 1, "head_size": 128, "block_size": 128},
    ],
    ids=str,
)
def test_a_batch_of_different_trees(backend: Backend, dtype: torch.dtype, options: dict[str, int]) -> None:
    case = make([BUSHY, CHAIN, ROOT, STAR], [60, 0, 33, 100], dtype=dtype, **options)
    assert error(case, backend) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_around_a_blocks_end(backend: Backend, context: int) -> None:
    assert error(make([BUSHY], [context]), backend) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_tree(backend: Backend) -> None:
    tree = random_tree(np.random.default_rng(0), 129)
    assert error(make([tree, BUSHY], [40, 129], heads=2, kv_heads=1, head_size=32), backend) < 2e-6


@settings(deadline=None, max_examples=4 if IN_INTERPRETER else 40)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.integers(1, 40))) for _ in range(int(rng.integers(1, 5)))]
    contexts = [int(rng.integers(0, 150)) for _ in trees]
    case = make(trees, contexts, head_size=32, gap=int(rng.integers(0, 3)), seed=seed % 1000)
    for backend in BACKENDS:
        assert error(case, backend) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: Backend) -> None:
    """Scores in the hundreds: the softmax is all on one token, and finite."""
    assert error(make([BUSHY], [70], spread=10.0), backend) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_fused_projection(backend: Backend) -> None:
    """vLLM's query is a part of the fused QKV output: rows are further apart than they are long."""
    case = make([BUSHY], [40])
    query = case.arguments["query"]
    fused = torch.full((query.shape[0], 3 * query[0].numel()), torch.nan)
    case.arguments["query"] = fused[:, : query[0].numel()].view(query.shape).copy_(query)
    assert not case.arguments["query"].is_contiguous()
    assert error(case, backend) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sees",
    [
        lambda tree, row, other: other <= row,  # causal: siblings are seen
        lambda tree, row, other: other in (0, row),  # only root and self: the path is forgotten
    ],
    ids=["causal", "no-path"],
)
def test_another_mask_would_be_noticed(backend: Backend, sees: Any) -> None:
    assert error(make([BUSHY], [40], sees=sees), backend) > 0.01


class TestInTheParentProcess:
    def test_against_vllms_writer_and_its_causal_kernel(self) -> None:
        """A chain is causal attention: the cache as vLLM writes it, the result as vLLM computes it."""
        pytest.importorskip("vllm")
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        for dtype in TOLERANCE:
            for block_size in (32, 128):
                context, rows, heads, kv_heads, size = 75, 6, 9, 3, 64
                length = context + rows
                keys, values = torch.randn(2, length, kv_heads, size).to(dtype)
                query = torch.randn(rows, heads, size).to(dtype)
                cache = torch.zeros(8, kv_heads, block_size, 2 * size, dtype=dtype)
                raw = cache.view(8, kv_heads, 2 * block_size, size).chunk(2, dim=2)
                table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
                token = torch.arange(length)
                slots = table[0].long()[token // block_size] * block_size + token % block_size
                ops.cpu_attn_reshape_and_cache(
                    keys, values, *raw, slots, "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
                )
                key_cache, value_cache = vec_layout(cache)
                assert torch.equal(key_cache[5, :, 3], keys[3])
                assert torch.equal(value_cache[5, :, 3], values[3])
                start, seen = int32([0, rows]), int32([length])
                stock, ours = torch.empty_like(query), torch.empty_like(query)
                plan = ops.cpu_attn_get_scheduler_metadata(
                    num_reqs=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, seq_lens=seen, dtype=dtype,
                    query_start_loc=start, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=True,
                    dynamic_causal=None, kv_cache_dtype="auto",
                )  # fmt: skip
                ops.cpu_attention_with_kv_cache(
                    query=query, key_cache=raw[0], value_cache=raw[1], output=stock, query_start_loc=start,
                    seq_lens=seen, scale=0.125, causal=True, alibi_slopes=None, sliding_window=-1,
                    block_table=table, softcap=0, scheduler_metadata=plan, s_aux=None, dynamic_causal=None,
                    k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
                )  # fmt: skip
                tree_attention(
                    query, key_cache, value_cache, ours, block_table=table, scale=0.125,
                    first_row=int32([0]), num_rows=int32([rows]),
                    context_len=int32([context]),
                    parents=int32(list(range(-1, rows - 1))),
                )  # fmt: skip
                assert (stock.float() - ours.float()).abs().max() < TOLERANCE[dtype]

    def test_two_threads_give_the_same(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert error(make([BUSHY, STAR, CHAIN], [400, 0, 90]), "numba") < 2e-6
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"query": torch.zeros(3, 4, 32), "output": torch.zeros(3, 4, 32)}, r"head_size 32"),
            ({"query": torch.zeros(3, 4, 64).bfloat16()}, r"query torch\.bfloat16"),
            ({"query": torch.zeros(3, 4)}, r"\[num_tokens, num_heads, head_size\]"),
            ({"output": torch.zeros(1, 4, 64)}, r"output: shape"),
            ({"backend": "cuda"}, r"backend='cuda'"),
            ({"key_cache": torch.zeros(3, 2, 32, 64)}, r"vec_layout"),
        ],
    )
    def test_what_it_refuses(self, change: dict[str, Any], message: str) -> None:
        case = make([CHAIN], [3])
        arguments = {**case.arguments, "backend": "numba", **change}
        if "key_cache" in change:
            arguments["value_cache"] = change["key_cache"]
        with pytest.raises(ValueError, match=message):
            tree_attention(**arguments)

    def test_the_triton_form_passes_this_file_through_the_interpreter(self) -> None:
        env = os.environ | {"TREE_ATTENTION_TEST_BACKEND": "triton", "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-k", "not InTheParentProcess", __file__]
        run = subprocess.run(
            command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "skipped" not in run.stdout
