# SPDX-License-Identifier: Apache-2.0
"""Time `vllm_ext.kernels` on this CPU, one core, after asserting that all backends agree.

    python scripts/bench_kernels.py [--rounds 31] [--cold]

Prints a markdown table of medians in microseconds per row. torch.topk and numba take turns, so
that what else the machine does hits both alike; compare within a line. The reference is timed
afterwards: it moves so much memory that whoever came after it would find the logits gone from the
caches. With --cold they always are: each call gets other logits, out of more than the caches hold.
"""

import argparse
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_ext.kernels.top_k import top_k_ids

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time vllm_ext.kernels on one CPU core.")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--cold", action="store_true", help="logits from memory, not from a cache")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

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
