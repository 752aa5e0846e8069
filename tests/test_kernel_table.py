# SPDX-License-Identifier: Apache-2.0
"""`make kernels`: what it covers, and that a kernel which is wrong is told and not timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts" / "kernels"
# Modules whose names are not their op's.
MODULES = {"top_k": "top_k_ids", "recycling_grow": "recycling", "recycling_places": "recycling"}


def covered(op: str) -> bool:
    texts = (path.read_text() for path in SCRIPTS.glob("*_works.py"))
    return any(f'"{MODULES.get(op, op)}"' in text for text in texts)


def test_every_triton_kernel_is_in_the_table() -> None:
    for path in sorted((ROOT / "kernels").glob("*.py")):
        if "@triton.jit" in path.read_text():
            op = path.stem.removesuffix("_triton")
            assert covered(op), f"{path.name}: give it a Work in scripts/kernels/device_works.py"


def test_every_numba_kernel_with_a_reference_is_in_the_table() -> None:
    for path in sorted((ROOT / "kernels").glob("*_numba.py")):
        op = path.stem.removesuffix("_numba")
        if (ROOT / "kernels" / f"{op}_ref.py").exists():
            assert covered(op), f"{path.name}: give it a Work in scripts/kernels/host_works.py"


# The command, with a kernel that has one bit wrong.
BROKEN = """
import runpy, sys, torch
sys.path[:0] = ["scripts/kernels", "tests"]
sys.argv = ["scripts/kernels", *sys.argv[1:]]
import os
os.environ["TRITON_INTERPRET"] = "1"
from vllm_ext.kernels import ancestor_bits_triton
right = ancestor_bits_triton.ancestor_bits_triton
def wrong(parents, row_start, out):
    right(parents, row_start, out)
    out[3, 0] ^= 1
ancestor_bits_triton.ancestor_bits_triton = wrong
runpy.run_path("scripts/kernels/__main__.py", run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_a_wrong_kernel_fails_the_command_and_has_no_time(tmp_path: Path) -> None:
    arguments = [
        "--op",
        "ancestor_bits",
        "--op",
        "top_k_ids",
        "--rounds",
        "2",
        "--json",
        str(tmp_path / "out.json"),
    ]
    good = run("scripts/kernels", *arguments)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "0 kernels failed" in good.stdout
    assert "% of copy" in good.stdout  # numba's top_k_ids
    broken = run("-c", BROKEN, *arguments)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert "FAILED: ancestor_bits (triton): not timed" in broken.stdout
    assert "% of copy" in broken.stdout  # the others go on
