#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which models get trees, chains or nothing: run the zoo of `tests/zoo.py`, and write docs/models.md of what came out.

    python scripts/model_zoo.py [--method token_recycling] [MODEL ...]     # two minutes each; all of both by default
    python scripts/model_zoo.py --table > docs/models.md

A run adds a line of each model and method to docs/benchmarks/models.jsonl, of which the last one counts.
`tests/test_docs.py` fails where the page is another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("", "tests", "tests/small_torchvision", "scripts")]

import model_page  # noqa: E402

RECORD = ROOT / "docs" / "benchmarks" / "models.jsonl"


def main() -> int:
    """Run models, or print the page; 1 if an answer is not plain's, or too little was accepted to tell."""
    parser = argparse.ArgumentParser(description="Run models beside plain vLLM, or write docs/models.md.")
    parser.add_argument("models", nargs="*", help="of tests/zoo.py; none: all")
    parser.add_argument("--method", action="append", help="only this one; may be given several times")
    parser.add_argument("--table", action="store_true", help="print docs/models.md, and run nothing")
    args = parser.parse_args()
    if args.table:
        print("\n".join(model_page.page(RECORD)))
        return 0
    return run(args.models, args.method)


def run(names: list[str], methods: list[str] | None) -> int:
    """Models beside plain vLLM, one after the other."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import zoo
    import zoo_comparison

    from vllm_ext.demo import embedded_model

    if unknown := set(names) - set(zoo_comparison.NAMES):
        raise SystemExit(f"{', '.join(sorted(unknown))}: not in the zoo: {', '.join(zoo_comparison.NAMES)}")
    methods = methods or [*zoo_comparison.METHODS, *zoo_comparison.BY_MODELS]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        models = zoo_comparison.Zoo(str(embedded_model.ensure_model()), Path(folder))
        for name in names or zoo_comparison.NAMES:
            plain = zoo_comparison.plain(models, name)
            common = _common(name, models.checkpoint(name), zoo_comparison.ABOUT[name])
            same = zoo_comparison.num_identical(plain.together, [plain.alone])
            _add({**common, "method": "plain", "requests": len(plain.alone), "identical": same})
            for method in methods:
                outcome = zoo_comparison.compare(models, name, method)
                line = {**common, "method": method, **_line(outcome, plain)}
                judged = outcome.got != "refused" and same == len(plain.alone) and name not in zoo.BFLOAT16
                failures += judged and line["identical"] < line["requests"]
                failures += outcome.got != "refused" and not (outcome.accepted_enough and outcome.preemptions)
                _add(line)
    return 1 if failures else 0


def _common(name: str, folder: str, about: str) -> dict[str, Any]:
    config = json.loads((Path(folder) / "config.json").read_text())
    return {
        "model": name,
        "architecture": config["architectures"][0],
        "about": about,
        "runner": "V1",
        "vllm": metadata.version("vllm").partition("+")[0],
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
    }


def _line(outcome: Any, plain: Any) -> dict[str, Any]:
    import zoo_comparison

    totals = outcome.totals
    return {
        "got": outcome.got,
        "reason": outcome.reason,
        "requests": sum(len(answers) for answers in outcome.rounds),
        "identical": zoo_comparison.num_identical(plain.together, outcome.rounds),
        "preempted": outcome.preemptions,
        **{
            key: totals.get(f"spec_{name}", 0)
            for key, name in (
                ("accepted", "accepted_tokens"),
                ("drafted", "draft_tokens"),
                ("steps", "steps"),
            )
        },
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def _add(line: dict[str, Any]) -> None:
    print(json.dumps(line), file=sys.stderr, flush=True)
    with RECORD.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
