# SPDX-License-Identifier: Apache-2.0
"""A step's kernels compile for a GPU that is not here: Triton's interpreter takes code that its compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"


def test_a_steps_kernels_compile_for_an_h100_and_spill_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", "step", "--arch", "90"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"grow", "walk", "penalise", "block_top_k"} <= set(done.stdout.replace("|", " ").split())
