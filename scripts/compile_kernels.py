# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for GPUs that need not be there: registers, what spills from them, shared memory.

    python scripts/compile_kernels.py [--arch 80] [--arch 90] [--only attention|step]

Triton brings the assembler. Attention's arguments are as in a launch over vLLM's cache: pointers, strides and sizes of
multiples of 16, for the tiles that `plan` chooses. The other kernels of a step on the V2 runner are compiled for any
sizes. Prints a markdown table for each; exits with 1 if a kernel spills more than a few
bytes, or needs more shared memory than a consumer card has.
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
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_ext.kernels import (
    block_mass_triton,
    device_trees_triton,
    drawn_rows_triton,
    kept_blocks_triton,
    path_move_triton,
    path_penalties_triton,
    recurrent_trees_triton,
    recycling_grow_triton,
    recycling_triton,
    top_k_triton,
    tree_conv_triton,
)
from vllm_ext.kernels.ancestor_bits import WORDS
from vllm_ext.kernels.tree_attention import TreeRows
from vllm_ext.kernels.tree_attention_triton import ADDED_ROWS, LEAST_KEYS, MOST_SPLITS, _add_up, _attend, plan

SHARED = 99 << 10  # bytes of a block on compute capability 8.6 and 8.9
SPILLED = 16  # bytes of a thread that cost nothing: a few forms spill so many at most
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
INTEGERS = {
    "block_table",
    "first_row",
    "num_rows",
    "num_past",
    "row_start",
    "context_len",
    "ancestors",
    "depths",
}
FLOATS = {"context_lse", "parts", "logs", "sinks"}
ELEMENTS = {"query", "keys", "values", "output", "context_output"}
ONE = {"key_dim": 1, "value_dim": 1}
UNEVEN = {"splits", "lse_head", "most_seen"}  # no multiples of 16
SCALARS = {"scale", "soft_cap"}

# Of a step's other kernels: pointers to 32-bit integers where nothing else is said.
LONG = {
    "slots",
    "positions",
    "emitted",
    "pair_keys",
    "row_marks",
    "text_marks",
    "marked_rows",
    "marked_pair_keys",
    "trials",
    "hits",
    "best",
    "totals",
    "sampled",
    "addresses",
}
SIZES = {
    "text_stride",
    "vocab",
    "pairs",
    "texts",
    "most",
    "nodes",
    "width",
    "count",
    "num_shares",
    "num_groups",
    "num_bases",
    "num_depths",
    "num_requests",
    "stride",
    "columns",
    "block_size",
    "heads",
    "block_stride",
    "head_stride",
    "token_stride",
    "dim_stride",
    "row_stride",
    "best_stride",
    "k",
    "logits_row",
    "bits_row",
    "prompt_row",
    "counts_row",
    "words_row",
    "starts_row",
    "text_row",
    "tree_rows",
    "rows_of_q",
    "support",
}
SINGLE = {"estimates", "shares", "repetition", "frequency", "presence"}
TREE = {"ROWS": 16, "WORDS": WORDS, "WORDS_UP": triton.next_power_of_2(WORDS)}
GROWN = TREE | {"LONGEST": 4, "RANKS": 16, "template": None}


def _sizes(kernel: Any, last: str) -> dict[str, str]:
    """A kernel's arguments behind its last pointer, but for constants."""
    behind = kernel.arg_names[kernel.arg_names.index(last) + 1 :]
    return {name: "i32" for name in behind if name.islower()}


NO_CHOICE = dict.fromkeys(("slots", "gone"))
STEP: list[tuple[Any, str, dict[str, Any], dict[str, str]]] = [
    (recycling_triton._mark, "trees", {"TREES": True, "LONGEST": 4, "ROWS": 16}, {"number": "i64"}),
    (recycling_triton._mark, "chains", {"TREES": False, "LONGEST": 4, "ROWS": 1}, {"number": "i64"}),
    (
        recycling_triton._learn,
        "",
        {"COUNT": 256, "WIDTH": 8, "SHARES": 16, "GROUPS": 1024},
        {"logits": "*bf16"},
    ),
    (recycling_triton._prompts, "read", {"WRITE": False, "LONGEST": 4, "BLOCK": 256}, {"number": "i64"}),
    (recycling_triton._prompts, "write", {"WRITE": True, "LONGEST": 4, "BLOCK": 256}, {"number": "i64"}),
    (recycling_grow_triton._grow, "by estimates", GROWN, {"tokens": "*i64"}),
    (device_trees_triton._walk, "", {"ROWS": 16, "invalid": None}, {}),
    (device_trees_triton._lay_out, "", TREE, {}),
    *(
        (
            kept_blocks_triton._keep,
            form,
            {"COLUMNS": 64, **constants},
            _sizes(kept_blocks_triton._keep, "kept_lens"),
        )
        for form, constants in (
            ("prompts", NO_CHOICE),
            ("decoding", {"request": None, "behind": None} | NO_CHOICE),
            ("decoding, choices", {"request": None, "behind": None}),
        )
    ),
    *(
        (
            kernel,
            form,
            {"TOKENS": block_mass_triton.TOKENS, "HEAD": 128, **constants},
            {"query": "*bf16", "keys": "*bf16", "lse": "*fp32", "mass": "*fp32"}
            | _sizes(kernel, last)
            | {"scale": "fp32"},
        )
        for kernel, last in ((block_mass_triton._sum, "lse"), (block_mass_triton._add, "mass"))
        for form, constants in (("prompts", {"whole_of": None, "bits_of": None}), ("trees", {}))
    ),
    (kept_blocks_triton._end, "", {"ROWS": 16}, _sizes(kept_blocks_triton._end, "positions")),
    (path_move_triton._move, "", {"ELEMENT": tl.int16, "HEADS": 8, "WIDTH": 256}, {}),
    (
        top_k_triton._block_top_k,
        "bf16",
        {"INF": 0x7F80, "MAX": 0x7FFF, "SHORT": True, "BLOCK": 4096},
        {"logits": "*i16"},
    ),
    (
        path_penalties_triton._penalise,
        "",
        {"BLOCK": path_penalties_triton.BLOCK},
        {"logits": "*fp32", "slots": "*i32"},
    ),
    (path_penalties_triton._forbid, "", {}, {"logits": "*fp32", "slots": "*i32"}),
    (
        drawn_rows_triton._choose,
        "",
        {"ROWS": 16, "SUPPORT": 32, "BLOCK": 4096},
        {"logits": "*fp32", "q": "*fp32", "seeds": "*i64", "chosen": "*i64"},
    ),
    *(
        (
            recurrent_trees_triton._verify,
            f"{'delta net' if delta else 'Mamba-2'}, {rows} rows",
            {"DELTA": delta, "ROWS": rows, "VALUES": recurrent_trees_triton.VALUES, "KEYS": 128},
            dict.fromkeys(("q", "k", "v", "out"), "*bf16")
            | dict.fromkeys(("decay", "beta", "state"), "*fp32")
            | _sizes(recurrent_trees_triton._verify, "out"),
        )
        for delta in (False, True)
        for rows in (1, 16, 32, 64)
    ),
    (
        tree_conv_triton._convolve,
        "",
        {"BIAS": True, "SILU": True, "WIDTH": 4, "COLUMNS": 4, "CHANNELS": tree_conv_triton.CHANNELS},
        dict.fromkeys(("x", "state", "weight", "bias", "out"), "*bf16")
        | _sizes(tree_conv_triton._convolve, "out"),
    ),
]


WIDE = {
    block_mass_triton._sum,
    block_mass_triton._add,
    recycling_triton._learn,
    recycling_triton._prompts,
    kept_blocks_triton._keep,
    path_move_triton._move,
    top_k_triton._block_top_k,
    path_penalties_triton._penalise,
    drawn_rows_triton._choose,
    tree_conv_triton._convolve,
}  # of four warps


def compiled(
    kernel: Any, dtype: str, constants: dict[str, Any], arch: int, warps: int, stages: int = 2
) -> dict[str, int]:
    """Registers and bytes of stack of a thread, bytes of shared memory of a block."""
    types, attributes = {}, {}
    fixed = constants | {name: one for name, one in ONE.items() if name in kernel.arg_names}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            types[name] = "constexpr"
            continue
        pointer = "i32" if name in INTEGERS else "fp32" if name in FLOATS else dtype
        is_pointer = name in INTEGERS | FLOATS | ELEMENTS
        types[name] = f"*{pointer}" if is_pointer else "fp32" if name in SCALARS else "i32"
        if name not in UNEVEN and name not in SCALARS:
            attributes[place,] = [["tt.divisibility", 16]]
    return _built(kernel, types, fixed, attributes, arch, warps, stages)


def step_kernel(kernel: Any, constants: dict[str, Any], types: dict[str, str], arch: int) -> dict[str, int]:
    """The same of a kernel of the table."""
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name)
        or ("i32" if name in SIZES else "*fp32" if name in SINGLE else "*i64" if name in LONG else "*i32")
        for name in kernel.arg_names
    }
    warps = 4 if kernel in WIDE else 1
    if kernel is recurrent_trees_triton._verify:
        warps = recurrent_trees_triton.warps(constants["ROWS"])
    return _built(kernel, signature, constants, {}, arch, warps)


def _built(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[tuple[int], list[list[Any]]],
    arch: int,
    warps: int,
    stages: int = 2,
) -> dict[str, int]:
    made = triton.compile(
        ASTSource(
            fn=kernel,
            signature=types,
            constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
            attrs=attributes,
        ),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        Path(binary.name).write_bytes(made.asm["cubin"])
        usage = subprocess.run([dump, "-res-usage", binary.name], capture_output=True, text=True, check=True)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage.stdout)}
    return {"registers": numbers["REG"], "stack": numbers["STACK"], "shared": int(made.metadata.shared)}


def main() -> int:
    """Print the tables; 1 if something does not fit."""
    parser = argparse.ArgumentParser(description="Registers and shared memory of the kernels.")
    parser.add_argument("--arch", type=int, action="append", help="compute capability times 10")
    parser.add_argument("--only", choices=("attention", "step"), help="one of the two tables")
    parser.add_argument("--stages", type=int, default=2, help="of attention: steps of keys read ahead")
    parser.add_argument("--tile", type=int, help="of attention: most rows of a tile; the suite times 128 too")
    arguments = parser.parse_args()
    architectures = arguments.arch or [80, 90]
    print(f"triton {triton.__version__}\n")
    too_much = 0
    if arguments.only != "attention":
        too_much += _step(architectures)
    if arguments.only != "step":
        too_much += _attention(architectures, arguments.stages, arguments.tile)
    return 1 if too_much else 0


def _step(architectures: list[int]) -> int:
    print("| arch | kernel | form | registers | spilled bytes | shared bytes |")
    print("| ---: | --- | --- | ---: | ---: | ---: |")
    too_much = 0
    for arch in architectures:
        for kernel, form, constants, types in STEP:
            found = step_kernel(kernel, constants, types, arch)
            too_much += found["stack"] > SPILLED or found["shared"] > SHARED
            name = kernel.__name__.lstrip("_")
            print(
                f"| {arch} | {name} | {form} | {found['registers']} | {found['stack']} | {found['shared']} |",
                flush=True,
            )
    print()
    return too_much


def _attention(architectures: list[int], stages: int, tile: int | None) -> int:
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
                    for launch in [_launch(rows, head, dtype == torch.float32, tile)]
                }
                for launch in launches.values():
                    constants = {"GROUP": 4, "HEAD": head, "ROWS": launch.rows}
                    step = {
                        "KEYS": launch.keys,
                        "LEAST": LEAST_KEYS,
                        "WORDS": WORDS,
                        "BLOCK": 16,
                        "WIDE": name == "fp32",
                    }
                    kinds = [
                        (
                            _attend,
                            constants
                            | step
                            | {"SPLIT": split, "CONTEXT": context}
                            | {flag: flag in scored for flag in ("WINDOW", "CHUNK", "CAP", "SINKS")},
                            label,
                        )
                        for split, context, scored, label in (
                            (True, True, (), "tree_attention, shares"),
                            (True, True, ("WINDOW", "CAP", "SINKS"), "of windows, caps and sinks, shares"),
                            (True, True, ("CHUNK",), "of chunks, shares"),
                            (False, True, (), "tree_attention"),
                            (False, False, (), "attend_nodes"),
                        )
                    ]
                    kinds.append(
                        (_add_up, constants | {"ADDED": ADDED_ROWS, "SPLITS": MOST_SPLITS}, "adding up")
                    )
                    for kernel, values, label in kinds:
                        warps = 4 if kernel is _add_up else launch.warps
                        found = compiled(kernel, name, values, arch, warps, stages)
                        too_much += found["stack"] > SPILLED or found["shared"] > SHARED
                        keys = "" if kernel is _add_up else launch.keys
                        print(
                            f"| {arch} | {label} | {name} | {head} | {launch.rows} | {keys} | {warps} "
                            f"| {found['registers']} | {found['stack']} | {found['shared']} |",
                            flush=True,
                        )
    return too_much


def _launch(rows: int, head: int, wide: bool, tile: int | None) -> Any:
    zero = torch.zeros(1, dtype=torch.int32)
    trees = TreeRows(zero[None], zero, zero, zero, zero, torch.zeros(rows, dtype=torch.int32), rows)
    return plan(trees, 32, 8, head, 16, wide, 132, tile)


if __name__ == "__main__":
    sys.exit(main())
