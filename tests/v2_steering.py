# SPDX-License-Identifier: Apache-2.0
"""Rules that steer on vLLM's V2 runner: their options, and the files that two of them need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import slices
from helpers import own_prompts
from typer.testing import CliRunner

from vllm_ext.config.rules import needs_v1
from vllm_ext.samplers.registry import RULES, load_rule
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule

STEERING = [name for name in RULES if not needs_v1(name) and issubclass(load_rule(name), SteeringRule)]
# What a request under each asks for, where it is more than that.
ASKED: dict[str, dict[str, Any]] = {name: {name: True} for name in STEERING} | {"cad": {"cad_negative": ""}}
# Options that show more than a rule's defaults do.
SHARP: dict[str, dict[str, Any]] = {
    "dola": {"candidates": [0, 1], "norm": True},
    "svdecode": {"strength": 8.0, "alpha": 0.01},
    "caad": {"strength": 4.0, "threshold": 0.1},
    "contrastive": {"alpha": 0.05},
    "cad": {"alpha": 5.0},
    "lol": {"omega": 0.5, "alpha": 0.05},
    "entropy_adaptive": {"threshold": 5.0, "window": 2, "dwell": 1},
}


def options_of(model: str, source: str, folder: Path) -> dict[str, dict[str, Any]]:
    """All of them, by name.

    Args:
        model: the target, two layers of ``source``.
        source: the whole model.
        folder: for the files.
    """
    from vllm_ext.cli.main import app

    answers = ["It is a small town by the sea.", "There are three of them.", "Nobody knows why."]
    examples = [
        json.dumps({"prompt": prompt, "answer": answer})
        for prompt, answer in zip(own_prompts(), answers, strict=False)
    ]
    (folder / "examples.jsonl").write_text("\n".join(examples))
    (folder / "one").mkdir()
    original = slices.write(Path(source), folder / "one", layers=1, vocabulary=1024)
    rules = {name: dict(SHARP.get(name, {})) for name in STEERING}
    for name in STEERING:
        if issubclass(load_rule(name).Options, CompanionOptions):
            rules[name]["model"] = original
    for name, more in (("caad", []), ("svdecode", ["--original", original])):
        rules[name]["file"] = str(folder / name)
        arguments = [name, "build", str(folder / "examples.jsonl"), "--model", model]
        result = CliRunner().invoke(app, [*arguments, "--output", rules[name]["file"], *more])
        assert result.exit_code == 0, result.output
    return rules
