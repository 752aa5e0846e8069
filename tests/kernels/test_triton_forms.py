# SPDX-License-Identifier: Apache-2.0
"""Triton's forms in files of this folder, through Triton's interpreter: all in one process of its own.

Those files ask `interpreter` whether they are in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import IN_INTERPRETER

FOLDER = Path(__file__).parent
FILES = [
    file
    for file in sorted(FOLDER.glob("test_*.py"))
    if file != Path(__file__) and "from interpreter import" in file.read_text()
]
ALL_RUN = {"test_top_k.py", "test_tree_attention.py"}  # whatever they skip anywhere


@pytest.mark.skipif(IN_INTERPRETER, reason="the parent process starts the other")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_they_pass_their_files_through_the_interpreter(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rsp", "-p", "no:cacheprovider", "-m", which]
    command += ["--durations=25", "-k", "not InTheParentProcess", *map(str, FILES)]
    run = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = set(re.findall(r"^PASSED \S*?(test_\w+\.py)::", run.stdout, re.MULTILINE))
    skipped = set(re.findall(r"^SKIPPED .*?(test_\w+\.py):", run.stdout, re.MULTILINE))
    assert not ALL_RUN & skipped
    if which != "slow":
        assert len(FILES) == 14
        assert passed == {file.name for file in FILES}
