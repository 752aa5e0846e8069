# SPDX-License-Identifier: Apache-2.0
"""Check and time every kernel of the project that has a readable reference: `make kernels`.

    python scripts/kernels [--op tree_attention] [--json kernels.json] [--rounds 15]

Triton kernels run on a GPU where there is one; else in Triton's interpreter, in small sizes, for their results alone.
Numba kernels run on one core. No time is printed for a kernel of which a check has failed, in any size, and the exit
status is then 1. Integers are compared exactly; floats by the largest difference from a float64 reference over the
largest value. Beside a time is its share of what this machine can do at best, measured in the same run: of a copy's
bandwidth where bytes are what takes longer at these rates, of a matrix product's rate where operations are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which the next lines do
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import device_works  # noqa: E402
import host_works  # noqa: E402
import measure  # noqa: E402
import penalty_works  # noqa: E402
import recurrent_works  # noqa: E402
import trie_works  # noqa: E402
import v2_works  # noqa: E402
from work import Work  # noqa: E402

COLUMNS = "| op | form | size | error | limit | us (20% .. 80%) | share |"


def main() -> int:
    """Print the table; 1 if a check failed."""
    parser = argparse.ArgumentParser(description="Check and time every kernel that has a reference.")
    parser.add_argument("--op", action="append", help="only this one; may be given several times")
    parser.add_argument("--json", type=Path, help="also write all to this file")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds on a CPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty comes filled with NaN
    ops = set(args.op) if args.op else None
    started = time.perf_counter()
    machine = measure.machine(DEVICE)
    print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    rates = {device: _rates(device) for device in dict.fromkeys((DEVICE, "cpu"))}
    if DEVICE == "cpu":
        print(
            "no GPU: Triton kernels run in the interpreter, for their results; their times are not measured"
        )
    try:
        on_device = itertools.chain.from_iterable(
            kind.works(DEVICE)
            for kind in (device_works, v2_works, penalty_works, trie_works, recurrent_works)
        )
        works = [work for work in on_device if ops is None or work.op in ops]
        works += host_works.works(ops)
    except RuntimeError as error:
        print(f"numba kernels are not checked, so not timed: {error}")
    if not works:
        parser.error(f"--op {' --op '.join(args.op)}: there is none; leave it out to see their names")
    rows = _run(works, rates, args.rounds)
    failed = sorted({(row["op"], row["form"]) for row in rows if not row["right"]})
    for op, form in failed:
        print(f"FAILED: {op} ({form}): not timed")
    beside = measure.busy()
    print(f"{len(rows)} checks, {len(failed)} kernels failed, {time.perf_counter() - started:.0f} s")
    if beside is not None:
        print(f"CPU times: {beside}")
    if args.json is not None:
        found: dict[str, Any] = {"machine": machine, "rates": rates, "beside": beside, "kernels": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _rates(device: str) -> dict[str, float]:
    rates = {
        "bytes_per_s": measure.copy_bandwidth(device),
        "flop_per_s": measure.matrix_rate(device),
    }
    print(
        f"{device}: a copy moves {rates['bytes_per_s'] / 1e9:.1f} GB/s, a matrix product does "
        f"{rates['flop_per_s'] / 1e9:.0f} GFLOP/s"
    )
    return rates


def _error(work: Work) -> float:
    """NaN where the kernel does not even run."""
    try:
        return work.error()
    except Exception as problem:
        print(f"{work.op} ({work.form}), {work.size}: {type(problem).__name__}: {problem}")
        return float("nan")


def _run(works: list[Work], rates: dict[str, dict[str, float]], rounds: int) -> list[dict[str, Any]]:
    """Check all first: a kernel is timed if it was right in every size."""
    errors = [_error(work) for work in works]
    wrong = {
        (work.op, work.form)
        for work, error in zip(works, errors, strict=True)
        if not error <= work.limit  # NaN is wrong
    }
    print(f"\n{COLUMNS}\n| --- | --- | --- | ---: | ---: | ---: | ---: |")
    rows = []
    for work, error in zip(works, errors, strict=True):
        device = DEVICE if work.form == "triton" else "cpu"
        right = error <= work.limit
        row: dict[str, Any] = {
            "op": work.op,
            "form": work.form,
            "size": work.size,
            "error": error,
            "limit": work.limit,
            "right": right,
        }
        spent, share = "", ""
        if work.call is not None and (work.op, work.form) not in wrong:
            low, middle, high = measure.seconds(work.call, device, rounds)
            row["seconds"] = [low, middle, high]
            spent = f"{1e6 * middle:.1f} ({1e6 * low:.1f} .. {1e6 * high:.1f})"
            parts = {
                "copy": work.num_bytes / rates[device]["bytes_per_s"],
                "matrix": work.flops / rates[device]["flop_per_s"],
            }
            bound = max(parts, key=lambda name: parts[name])
            if parts[bound]:
                row["bound"], row["share"] = bound, parts[bound] / middle
                share = f"{100 * row['share']:.0f}% of {bound}"
        rows.append(row)
        exact = "exact" if work.limit == 0 else f"{work.limit:.0e}"
        shown = "0" if error == 0 else f"{error:.1e}"
        print(
            f"| {work.op} | {work.form} | {work.size} | {shown} | {exact} | {spent if right else 'FAILED'} | {share} |",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
