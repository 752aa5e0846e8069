# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext warm``: a server that begins with what it wrote knows the model, and says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs
from typer.testing import CliRunner
from vllm import SamplingParams

from vllm_ext.cli.main import app

METHOD: dict[str, Any] = {"method": "hybrid", "num_speculative_tokens": 12, "budget": "fixed"}
TEXTS = [f"Describe the {thing}." for thing in ("sea", "moon", "old town", "first day of spring")]


@pytest.mark.engine
def test_a_server_begins_with_what_was_learnt(slice_dir: str, plain_slice_llm: Any, tmp_path: Path) -> None:
    prompts, state = tmp_path / "prompts.jsonl", tmp_path / "state"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about {n} birds."}) + "\n" for n in range(8)))
    command = [
        str(Path(sys.executable).parent / "vllm-ext"),
        "warm",
        "--model",
        slice_dir,
        "--output",
        str(state),
    ]
    command += ["--speculative-config", json.dumps(METHOD), "--prompts", str(prompts), "--minutes", "0.3"]
    command += ["--max-tokens", "24", "--max-num-seqs", "8", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "tokens read alone" in done.stdout
    assert json.dumps({**METHOD, "state_dir": str(state)}) in done.stdout
    (file,) = state.iterdir()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    chats: Any = [[{"role": "user", "content": text}] for text in TEXTS]

    def tokens(llm: Any) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.chat(chats, params, use_tqdm=False)]

    wanted, steps = tokens(plain_slice_llm), []
    for config in (METHOD, {**METHOD, "state_dir": str(state)}):
        for llm in engine(slice_dir, config):
            assert_same_outputs(wanted, tokens(llm))
            (counters,) = llm.collective_rpc("vllm_ext_counters")
            assert counters["state_loads"] == int("state_dir" in config)
            assert counters["state_set_aside"] == 0
            steps.append(counters["spec_steps"])
    cold, warm = steps
    assert warm < 0.9 * cold
    assert [path.name for path in state.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is no JSON"),
        ('{"method": "ngram"}', "allowed: a JSON object whose `method` is one of"),
        ('["hybrid"]', "allowed: a JSON object whose `method` is one of"),
        ('{"method": "hybrid", "state_dir": "x"}', "--output is its state_dir; leave it out"),
    ],
)
def test_what_it_refuses(tmp_path: Path, config: str, message: str) -> None:
    arguments = ["warm", "--model", "none", "--output", str(tmp_path), "--speculative-config", config]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
