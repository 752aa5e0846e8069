# SPDX-License-Identifier: Apache-2.0
"""Which tests hold the numba forms to their references, and whether they pass here: integers, so exactly."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
# By op. What a test compares it says itself; these are the ones that compare with a reference.
TESTS = {
    "best_first_tree": ("tests/proposers/test_token_recycling.py::test_trees_equal_the_reference",),
    "copy_tree": ("tests/proposers/test_input_copy.py::test_trees_equal_the_reference",),
    "fuse_trees": ("tests/proposers/test_hybrid.py::test_fusion_equals_the_reference",),
    "kv_move": ("tests/kernels/test_kv_move.py::test_tokens_move_in_all_caches",),
    "ngram_table": (
        "tests/kernels/test_ngram_table.py::test_recorded_rows_equal_the_reference",
        "tests/kernels/test_ngram_table.py::test_recorded_text_equals_the_reference",
        "tests/kernels/test_ngram_table.py::test_trees_equal_the_reference",
    ),
    "suffix_array": (
        "tests/kernels/test_suffix_array.py::test_the_longest_end_is_found_as_by_looking_everywhere",
        "tests/kernels/test_suffix_array.py::test_continuations_end_with_their_document",
        "tests/kernels/test_suffix_array.py::test_trees_equal_the_reference",
        "tests/kernels/test_suffix_array.py::test_merged_runs_are_sorted",
    ),
    "suffix_index": ("tests/proposers/test_suffix_tree.py::test_trees_equal_the_reference",),
    "trie": ("tests/kernels/test_trie.py::test_masks_are_those_of_a_dictionary",),
}


def passed(ops: list[str]) -> dict[str, bool]:
    """By op, whether all its tests passed: in a process of their own.

    Raises:
        RuntimeError: there is no pytest, or it could not run them.
    """
    wanted = {test: op for op in ops for test in TESTS[op]}
    if not wanted:
        return {}
    for package in ("pytest", "hypothesis"):
        if find_spec(package) is None:
            raise RuntimeError(f"no {package} (pip install {package})")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report.name}",
        ]
        run = subprocess.run(
            [*command, *wanted], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        try:
            cases = list(ElementTree.parse(report.name).iter("testcase"))
        except ElementTree.ParseError as error:
            raise RuntimeError(f"pytest wrote no report: {run.stdout}{run.stderr}") from error
    ran = dict.fromkeys(ops, 0)
    failed = set()
    for case in cases:
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for test, op in wanted.items():
            if name == test or name.startswith(f"{test}["):
                ran[op] += 1
                if len(case):  # a failure, an error or a skip
                    failed.add(op)
    return {op: ran[op] >= len(TESTS[op]) and op not in failed for op in ops}
