# SPDX-License-Identifier: Apache-2.0
"""Print docs/vllm-versions.md's table: our hooks, by module, in several vLLMs that are unpacked and not imported.

    pip download --no-deps vllm==0.33.0 -d /tmp/wheel && python -m zipfile -e /tmp/wheel/*.whl /tmp/vllm-0.33.0
    python scripts/seam_table.py SITE_PACKAGES /tmp/vllm-0.33.0

Exits with 1 if one lacks a hook.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

from vllm_ext.compat.hooks_v2 import TABLES
from vllm_ext.compat.source_scan import Files


def main() -> int:
    """Print the table; 1 if something is missing."""
    parser = argparse.ArgumentParser(description="Our hooks in unpacked vLLMs, as a markdown table.")
    parser.add_argument("folders", nargs="+", type=Path, help="each has a folder vllm")
    unpacked = [Files(folder) for folder in parser.parse_args().folders]
    print(f"| table | module | symbols | {' | '.join(files.version() for files in unpacked)} |")
    print("| --- " * (3 + len(unpacked)) + "|")
    missing = 0
    for table, hooks in TABLES.items():
        for module, group in groupby(sorted(hooks, key=lambda hook: hook.module), lambda hook: hook.module):
            found = list(group)
            cells = []
            for files in unpacked:
                wrong = [f"`{hook.name}`: {files.problem(hook)}" for hook in found if files.problem(hook)]
                missing += len(wrong)
                cells.append("; ".join(wrong) or f"all {len(found)}" if len(found) > 1 or wrong else "there")
            names = ", ".join(f"`{hook.name}`" for hook in found)
            print(f"| {table} | `{module.removeprefix('vllm.')}` | {names} | {' | '.join(cells)} |")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
