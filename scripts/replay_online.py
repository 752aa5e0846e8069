#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Live distillation without an engine: a draft learns from kept answers in their order, with several settings.

    python scripts/replay_online.py DRAFT ANSWERS --skip 24 --learning-rate 1e-4 --passes 3 --positions all --json FILE

ANSWERS is a folder as `export_dir` and `scripts/bench_online.py --mode off --keep` write them. Of each window it says
on how many tokens the likeliest one of the draft was put out, when they were first read; with a learning rate of 0 the
draft stays as it is. A call adds a run to the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_ext.data.answers import load
from vllm_ext.training.draft_model import Recipe, load_model
from vllm_ext.training.online import Learner


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--skip", type=int, default=0, help="answers at the beginning that are left out")
    parser.add_argument("--window", type=int, default=8, help="answers")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--positions", choices=("wrong", "all"), default="all")
    given = parser.parse_args()
    recipe = Recipe(batch_tokens=given.batch_tokens, max_length=1024)
    learner = Learner(load_model(given.draft, "cpu"), given.learning_rate, recipe, given.positions == "all")
    answers = load(given.answers)[given.skip :]
    windows = []
    for start in range(0, len(answers), given.window):
        report = learner.learn(answers[start : start + given.window], given.passes)
        windows.append({"tokens": report.tokens, "right": report.tokens - report.wrong})
        print(json.dumps(windows[-1]), flush=True)
    settings = {
        name: getattr(given, name) for name in ("learning_rate", "passes", "batch_tokens", "positions")
    }
    runs = json.loads(given.json.read_text()) if given.json.exists() else []
    given.json.write_text(json.dumps([*runs, {**settings, "windows": windows}], indent=1))


if __name__ == "__main__":
    main()
