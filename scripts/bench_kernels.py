# SPDX-License-Identifier: Apache-2.0
"""Time `vllm_ext.kernels` on this CPU, one core, after asserting that all backends agree.

    python scripts/bench_kernels.py [--rounds 31] [--cold] [--op top_k_ids]
    python scripts/bench_kernels.py --op tree_attention [--rounds 31]
    python scripts/bench_kernels.py --op linear [--rounds 31]

The third is all products of a step of SmolLM2-135M, beside oneDNN's as vLLM calls it, in milliseconds. The second
compares trees with vLLM's own kernel over as many causal rows, in SmolLM2-135M's shape. The first
prints a markdown table of medians in microseconds per row. torch.topk and numba take turns, so
that what else the machine does hits both alike; compare within a line. The reference is timed
afterwards: it moves so much memory that whoever came after it would find the logits gone from the
caches. With --cold they always are: each call gets other logits, out of more than the caches hold.
"""

import argparse
import functools
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.kernels.tree_attention import TreeRows, tree_attention

K = 8
VOCABS = (32000, 49152, 128256, 151936)
ROWS = (1, 6, 32)
DTYPES = (torch.bfloat16, torch.float32)
POOL = 256 << 20  # bytes of cold logits: several times a last-level cache


def machine() -> str:
    """Name the processor and the versions that matter."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.split(":", 1)[1].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if line.startswith("model name")
    ]
    cpu = models[0] if models else platform.processor()
    return f"{cpu}, 1 core, torch {torch.__version__}, python {platform.python_version()}"


def us(call: Callable[[torch.Tensor], object], pool: Iterator[torch.Tensor], repeats: int) -> float:
    """Microseconds per call."""
    tensors = [next(pool) for _ in range(repeats)]
    start = time.perf_counter()
    for tensor in tensors:
        call(tensor)
    return (time.perf_counter() - start) / repeats * 1e6


def tree_attention_table(rounds: int) -> None:
    """Print microseconds a call of vLLM's CPU attention and ours, which take turns."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from vllm_ext.engine.attention.cpu import LAYOUTS

    current_platform.import_kernels()
    torch.cpu._init_amx()  # asks the system for it, where there is AMX
    heads, kv_heads, head_size, block_size = 9, 3, 64, 128
    print(f"{machine()}; 9 heads, 3 KV heads of 64, median of {rounds} rounds, us per call\n")
    print("| context | rows | dtype | layout | vLLM, causal | numba, tree | numba / vLLM |")
    print("| ---: | ---: | --- | --- | ---: | ---: | ---: |")
    for dtype in DTYPES:
        isa = _get_attn_isa(dtype, block_size, head_size)
        for context in (60, 1900):
            for rows in (4, 8, 16, 32):
                length = context + rows
                num_blocks = -(-length // block_size)
                kv_cache = torch.zeros(num_blocks, kv_heads, block_size, 2 * head_size, dtype=dtype)
                caches = kv_cache.view(num_blocks, kv_heads, 2 * block_size, head_size).chunk(2, dim=2)
                table = torch.randperm(num_blocks, dtype=torch.int32)[None]
                token = torch.arange(length)
                slots = table[0, token // block_size].long() * block_size + token % block_size
                key, value = torch.randn(2, length, kv_heads, head_size).to(dtype)
                query = torch.randn(rows, heads, head_size).to(dtype)
                cache = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
                ops.cpu_attn_reshape_and_cache(key, value, *caches, slots, isa, **cache)
                ends, lengths = torch.tensor([[0, rows], [length, 0]], dtype=torch.int32)
                stock: dict[str, Any] = {
                    "query": query,
                    "key_cache": caches[0],
                    "value_cache": caches[1],
                    "output": torch.empty_like(query),
                    "query_start_loc": ends,
                    "seq_lens": lengths[:1],
                    "scale": 0.125,
                    "causal": True,
                    "alibi_slopes": None,
                    "sliding_window": -1,
                    "block_table": table,
                    "softcap": 0,
                    "s_aux": None,
                    "dynamic_causal": None,
                    **cache,
                }
                stock["scheduler_metadata"] = ops.cpu_attn_get_scheduler_metadata(
                    num_reqs=1,
                    num_heads=heads,
                    num_kv_heads=kv_heads,
                    head_dim=head_size,
                    seq_lens=lengths[:1],
                    dtype=dtype,
                    query_start_loc=ends,
                    causal=True,
                    sliding_window_size=-1,
                    isa=isa,
                    enable_kv_split=True,
                    dynamic_causal=None,
                    kv_cache_dtype="auto",
                )
                tree = TreeRows(
                    block_table=table,
                    first_row=torch.zeros(1, dtype=torch.int32),
                    num_rows=torch.full((1,), rows, dtype=torch.int32),
                    num_past=torch.zeros(1, dtype=torch.int32),
                    context_len=torch.full((1,), context, dtype=torch.int32),
                    parents=(torch.arange(rows, dtype=torch.int32) + 1) // 2 - 1,  # a binary tree
                )
                ours, reference = torch.empty_like(query), torch.empty_like(query)
                views = LAYOUTS[isa](kv_cache)
                tree_attention(query, *views, reference, tree, 0.125, backend="torch")
                tree_attention(query, *views, ours, tree, 0.125)
                torch.testing.assert_close(ours, reference)
                calls: list[Callable[[], object]] = [
                    functools.partial(ops.cpu_attention_with_kv_cache, **stock),
                    functools.partial(tree_attention, query, *views, ours, tree, 0.125),
                ]
                times: list[list[float]] = [[], []]
                for _ in range(rounds):
                    for column, call in zip(times, calls, strict=True):
                        start = time.perf_counter()
                        for _ in range(4):
                            call()
                        column.append((time.perf_counter() - start) / 4 * 1e6)
                a, b = (statistics.median(column) for column in times)
                name = str(dtype).removeprefix("torch.")
                print(
                    f"| {context} | {rows} | {name} | {isa} | {a:.0f} | {b:.0f} | {b / a:.2f} |", flush=True
                )


def linear_table(rounds: int) -> None:
    """Print milliseconds of all products of a step by vLLM's oneDNN and by ours, which take turns."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from vllm_ext.kernels.linear import linear, pack
    from vllm_ext.kernels.linear_numba import FORMS, best_form, linear_numba

    current_platform.import_kernels()
    layer = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # QKV, output, gate and up, down: of 30 layers
    weights = [
        torch.randn(outputs, inputs).mul(0.02).bfloat16() for inputs, outputs in [*layer * 30, (576, 49152)]
    ]
    stock = [ops.create_onednn_mm(weight.t(), 32) for weight in weights]
    packed = [pack(weight) for weight in weights]
    nothing = [torch.zeros(weight.shape[0]) for weight in weights]
    forms = FORMS[FORMS.index(best_form()) :]
    print(f"{machine()}; {sum(w.nbytes for w in weights) / 1e6:.0f} MB, median of {rounds} rounds, ms\n")
    print("| rows | oneDNN | " + " | ".join(forms) + " |")
    print("| ---: |" + " ---: |" * (1 + len(forms)))
    for rows in (1, 2, 4, 6, 8, 10, 12, 13, 16, 24, 32, 64):
        inputs = {width: torch.randn(rows, width).bfloat16() for width in (576, 1536)}
        xs = [inputs[weight.shape[1]] for weight in weights]
        for x, weight, some, bias in zip(xs[:4], weights, packed, nothing, strict=False):
            torch.testing.assert_close(
                linear(x, some, bias), torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2
            )

        def by_onednn(xs: list[torch.Tensor] = xs) -> None:
            for x, handler in zip(xs, stock, strict=True):
                ops.onednn_mm(handler, x, None)

        def by_ours(form: str, xs: list[torch.Tensor] = xs) -> None:
            for x, some, bias in zip(xs, packed, nothing, strict=True):
                linear_numba(x, some, bias, form)

        calls: list[Callable[[], object]] = [by_onednn, *(functools.partial(by_ours, form) for form in forms)]
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for column, call in zip(times, calls, strict=True):
                start = time.perf_counter()
                call()
                column.append((time.perf_counter() - start) * 1e3)
        print(f"| {rows} | " + " | ".join(f"{statistics.median(t):.1f}" for t in times) + " |", flush=True)


def _multiply(function: Any, x: torch.Tensor, bias: torch.Tensor, weight: Any) -> object:
    return function(x, weight, bias)


def linear8_table(rounds: int) -> None:
    """Print milliseconds of products with weights in 16 and in 8 bits, from memory, which take turns."""
    from vllm_ext.kernels.linear import linear, pack
    from vllm_ext.kernels.linear8 import linear8, pack8

    shapes = [(8192, 576), (3072, 576), (576, 1536)]  # a draft's language head, gate and up, down
    print(f"{machine()}; median of {rounds} rounds, ms\n")
    print("| rows | " + " | ".join(f"{o:,} x {i:,}, bfloat16 | 8 bits" for o, i in shapes) + " |")
    print("| ---: |" + " ---: |" * (2 * len(shapes)))
    forms: list[tuple[Any, Any]] = [(linear, pack), (linear8, pack8)]
    pools = [
        [
            itertools.cycle([pack_it(torch.randn(o, i).bfloat16()) for _ in range(POOL // (2 * o * i))])
            for _, pack_it in forms
        ]
        for o, i in shapes
    ]
    for rows in (1, 2, 4, 8, 16):
        cells = []
        for (outputs, inputs), of_shape in zip(shapes, pools, strict=True):
            x, nothing = torch.randn(rows, inputs).bfloat16(), torch.zeros(outputs)
            times: list[list[float]] = [[], []]
            for _ in range(rounds):
                for column, (multiply, _), pool in zip(times, forms, of_shape, strict=True):
                    column.append(us(functools.partial(_multiply, multiply, x, nothing), pool, 4) / 1e3)
            cells += [f"{statistics.median(column):.3f}" for column in times]
        print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time vllm_ext.kernels on one CPU core.")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--cold", action="store_true", help="logits from memory, not from a cache")
    parser.add_argument(
        "--op", choices=("top_k_ids", "tree_attention", "linear", "linear8"), default="top_k_ids"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.op == "tree_attention":
        tree_attention_table(args.rounds)
        return
    if args.op == "linear":
        linear_table(args.rounds)
        return
    if args.op == "linear8":
        linear8_table(args.rounds)
        return

    state = "cold" if args.cold else "warm"
    print(f"{machine()}; k = {K}, {state} logits, median of {args.rounds} rounds, us per row\n")
    print("| vocab | rows | dtype | torch.topk | reference | numba | topk / numba |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for vocab in VOCABS:
        for dtype in DTYPES:
            for rows in ROWS:
                logits = torch.randn(rows, vocab).to(dtype)
                assert torch.equal(top_k_ids(logits, K, "numba"), top_k_ids(logits, K, "torch"))
                copies = 1 + (POOL // logits.nbytes if args.cold else 0)
                pool = itertools.cycle(logits.repeat(copies, 1, 1))
                repeats = max(1, 32 // rows)
                times: list[list[float]] = [[], []]
                for _ in range(args.rounds):
                    times[0].append(us(lambda x: torch.topk(x, K), pool, repeats) / rows)
                    times[1].append(us(lambda x: top_k_ids(x, K, "numba"), pool, repeats) / rows)
                a, b = (statistics.median(column) for column in times)
                slow = us(lambda x: top_k_ids(x, K, "torch"), pool, 3) / rows
                print(
                    f"| {vocab} | {rows} | {str(dtype).removeprefix('torch.')} | {a:.0f} "
                    f"| {slow:.0f} | {b:.1f} | {a / b:.0f}x |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
