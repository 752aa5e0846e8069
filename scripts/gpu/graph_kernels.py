# SPDX-License-Identifier: Apache-2.0
"""What kernels take when a captured CUDA graph replays them: one line of JSON each.

`make kernels` checks and times them launched from Python, which takes as long as launching does; a step of an engine
replays graphs. The second-level cache is cleared before each replay, and a graph of one tiny kernel says what replaying
alone takes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "tests"), str(HERE.parent / "kernels")]

import device_works  # noqa: E402
import measure  # noqa: E402
import penalty_works  # noqa: E402
import torch  # noqa: E402
import trie_works  # noqa: E402
import v2_works  # noqa: E402
from tree_cases import Case  # noqa: E402
from triton.testing import do_bench  # noqa: E402

from vllm_ext.kernels.top_k import top_k_ids  # noqa: E402
from vllm_ext.kernels.tree_attention import tree_attention  # noqa: E402
from vllm_ext.kernels.tree_attention_triton import WIDE_ROWS, tree_attention_triton  # noqa: E402

SIZES = [
    (requests, context, rows)
    for requests in (1, 8, 32, 64)
    for context in (512, 2048, 8192)
    for rows in (1, 8, 16, 17)
    if context < 8192 or requests == 32
]
# Of trees that fill a tile of 128 rows, and so two of 64: 32 rows of 4 heads.
LARGE_SIZES = [(requests, context, 32) for requests in (1, 32) for context in (2048, 8192)]


def works() -> Iterator[tuple[str, str, Callable[[], object], int]]:
    """Operation, size, what is timed, bytes that must be moved."""
    one = torch.zeros(1, device="cuda")
    yield "nothing", "one element", functools.partial(one.add_, 1), 0
    for requests, nodes in ((1, 15), (8, 15), (32, 15), (64, 15)):
        for work in v2_works._steps("cuda", requests, nodes, 8, 128256, timed=True):
            if work.call is not None:
                yield work.op, work.size, work.call, work.num_bytes
        moves = v2_works._moves("cuda", layers=32, requests=requests, columns=1 + nodes, timed=True)
        if moves.call is not None:
            yield moves.op, moves.size, moves.call, moves.num_bytes
    for requests in (1, 32):
        for work in penalty_works.of_size("cuda", requests, 15, device_works.VOCAB, 8, timed=True):
            if work.call is not None:
                yield work.op, work.size, work.call, work.num_bytes
        work = trie_works.of_size("cuda", requests, 15, device_works.VOCAB, 1_000_000, timed=True)
        if work.call is not None:
            yield work.op, work.size, work.call, work.num_bytes
    for rows in (1, 16, 128, 512, 1024):
        logits = torch.randn(rows, device_works.VOCAB, device="cuda").to(torch.bfloat16)
        yield "top_k_ids", f"{rows} rows", functools.partial(top_k_ids, logits, 8, "triton"), logits.nbytes
    for requests, context, rows in SIZES + LARGE_SIZES:
        case = device_works._model_case(requests, context, rows)
        output = torch.empty_like(case.query)
        size = f"{requests} x {rows} rows, context {context}"
        num_bytes = 4 * requests * (context + rows) * device_works.KV_HEADS * device_works.HEAD_SIZE
        ours = functools.partial(
            tree_attention, case.query, case.keys, case.values, output, case.trees, case.scale, "triton"
        )
        yield "tree_attention", size, ours, num_bytes
        if rows == 16:
            for stages in (3, 4):
                yield f"tree_attention, {stages} stages", size, in_stages(case, output, stages), num_bytes
        if rows > 16 and requests in (1, 32):
            wide = in_tiles(case, output, WIDE_ROWS)
            yield f"tree_attention, tiles of {WIDE_ROWS} rows", size, wide, num_bytes
        in_two = device_works._with_flash_attention(case, output, context)
        if in_two is not None:
            yield "FlashAttention + attend_nodes", size, in_two, num_bytes


def in_stages(case: Case, output: torch.Tensor, stages: int) -> Callable[[], object]:
    """Tree attention that reads so many steps of keys ahead: two fit every card, more may be faster on large ones."""
    prepared: dict[str, Any] = {}
    call = functools.partial(
        tree_attention_triton,
        case.query,
        case.keys,
        case.values,
        output,
        case.trees,
        case.scale,
        prepared,
    )
    call()
    prepared["constants"]["num_stages"] = stages
    return call


def in_tiles(case: Case, output: torch.Tensor, rows: int) -> Callable[[], object]:
    """Tree attention in tiles of up to so many rows: a tree that fills two of 64 has its keys read twice."""
    return functools.partial(
        tree_attention_triton,
        case.query,
        case.keys,
        case.values,
        output,
        case.trees,
        case.scale,
        {},
        tile=rows,
    )


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="what does not fit is left out")
    end = time.monotonic() + parser.parse_args().seconds
    torch.manual_seed(0)
    ceilings = {"bytes_per_s": measure.copy_bandwidth("cuda"), "flop_per_s": measure.matrix_rate("cuda")}
    print(json.dumps({"op": "ceilings", "size": "", **ceilings}), flush=True)
    for op, size, call, num_bytes in works():
        if time.monotonic() > end:
            print(json.dumps({"op": "left out", "size": f"from {op}, {size} on"}), flush=True)
            return
        try:
            low, middle, high = do_bench(captured(call), warmup=5, rep=30, quantiles=[0.2, 0.5, 0.8])
            eager = do_bench(call, warmup=2, rep=10, quantiles=[0.5]) if "x 16 rows" in size else None
        except Exception as error:
            print(json.dumps({"op": op, "size": size, "error": str(error)[-300:]}), flush=True)
            continue
        times = [round(1e3 * value, 1) for value in (low, middle, high)]
        bare = None if eager is None else round(1e3 * eager, 1)
        print(
            json.dumps({"op": op, "size": size, "us": times, "eager_us": bare, "bytes": num_bytes}),
            flush=True,
        )


if __name__ == "__main__":
    main()
