# SPDX-License-Identifier: Apache-2.0
"""Compile the attention kernels for GPUs that need not be there: registers, what spills from them, shared memory.

    python scripts/compile_kernels.py [--arch 80] [--arch 90]

Triton brings the assembler. Arguments are as in a launch over vLLM's cache: pointers, strides and sizes of multiples of
16. Prints a markdown table for the tiles that `plan` chooses; exits with 1 if a kernel spills, or needs more shared
memory than a consumer card has.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_ext.kernels.ancestor_bits import WORDS
from vllm_ext.kernels.tree_attention import TreeRows
from vllm_ext.kernels.tree_attention_triton import LEAST_KEYS, MOST_SPLITS, _add_up, _attend, plan

SHARED = 99 << 10  # bytes of a block on compute capability 8.6 and 8.9
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
INTEGERS = {"block_table", "first_row", "num_rows", "num_past", "row_start", "context_len", "ancestors"}
FLOATS = {"context_lse", "parts", "logs"}
ELEMENTS = {"query", "keys", "values", "output", "context_output"}
ONE = {"key_dim": 1, "value_dim": 1}
UNEVEN = {"splits", "lse_head"}  # no multiples of 16


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], arch: int, warps: int) -> dict[str, int]:
    """Registers and bytes of stack of a thread, bytes of shared memory of a block."""
    types, attributes = {}, {}
    fixed = constants | {name: one for name, one in ONE.items() if name in kernel.arg_names}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            types[name] = "constexpr"
            continue
        pointer = "i32" if name in INTEGERS else "fp32" if name in FLOATS else dtype
        is_pointer = name in INTEGERS | FLOATS | ELEMENTS
        types[name] = f"*{pointer}" if is_pointer else "fp32" if name == "scale" else "i32"
        if name not in UNEVEN and name != "scale":
            attributes[place,] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(
            fn=kernel,
            signature=types,
            constexprs={(kernel.arg_names.index(name),): value for name, value in fixed.items()},
            attrs=attributes,
        ),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": 2},
    )
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        Path(binary.name).write_bytes(made.asm["cubin"])
        usage = subprocess.run([dump, "-res-usage", binary.name], capture_output=True, text=True, check=True)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage.stdout)}
    return {"registers": numbers["REG"], "stack": numbers["STACK"], "shared": int(made.metadata.shared)}


def main() -> int:
    """Print the table; 1 if something does not fit."""
    parser = argparse.ArgumentParser(description="Registers and shared memory of the attention kernels.")
    parser.add_argument("--arch", type=int, action="append", help="compute capability times 10")
    architectures = parser.parse_args().arch or [80, 90]
    print(f"triton {triton.__version__}\n")
    print("| arch | kernel | dtype | head | rows | keys | warps | registers | spilled bytes | shared bytes |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    too_much = 0
    for arch in architectures:
        for dtype, name in TYPES.items():
            for head in (64, 128, 256):
                # By the rows of a tree: each size of a tile.
                launches = {
                    launch.rows: launch
                    for rows in (1, 8, 16, 64)
                    for launch in [_launch(rows, head, dtype == torch.float32)]
                }
                for launch in launches.values():
                    constants = {"GROUP": 4, "HEAD": head, "ROWS": launch.rows}
                    step = {"KEYS": launch.keys, "LEAST": LEAST_KEYS, "WORDS": WORDS, "WIDE": name == "fp32"}
                    kinds = [
                        (_attend, constants | step | {"SPLIT": split, "CONTEXT": context}, label)
                        for split, context, label in (
                            (True, True, "tree_attention, shares"),
                            (False, True, "tree_attention"),
                            (False, False, "attend_nodes"),
                        )
                    ]
                    kinds.append((_add_up, constants | {"SPLITS": MOST_SPLITS}, "adding up"))
                    for kernel, values, label in kinds:
                        warps = 4 if kernel is _add_up else launch.warps
                        found = compiled(kernel, name, values, arch, warps)
                        too_much += found["stack"] > 0 or found["shared"] > SHARED
                        keys = "" if kernel is _add_up else launch.keys
                        print(
                            f"| {arch} | {label} | {name} | {head} | {launch.rows} | {keys} | {warps} "
                            f"| {found['registers']} | {found['stack']} | {found['shared']} |",
                            flush=True,
                        )
    return 1 if too_much else 0


def _launch(rows: int, head: int, wide: bool) -> Any:
    zero = torch.zeros(1, dtype=torch.int32)
    trees = TreeRows(zero[None], zero, zero, zero, zero, torch.zeros(rows, dtype=torch.int32), rows)
    return plan(trees, 32, 8, head, 16, wide, 132)


if __name__ == "__main__":
    sys.exit(main())
