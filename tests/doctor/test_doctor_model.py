# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a model by its config alone: what engines have given those of the zoo, and why nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import zoo
from typer.testing import CliRunner
from zoo_comparison import NODES

from vllm_ext.cli.main import app
from vllm_ext.doctor import model as doctor

RECORD = Path(__file__).parents[2] / "docs" / "benchmarks" / "models.jsonl"
QUICK = {"llama", "gpt_oss", "llama4", "deepseek_v2", "falcon"}


def recorded() -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    return {line["model"]: line for line in lines if line["method"] == "token_recycling"}


def write(folder: Path, name: str, architecture: str, **options: Any) -> str:
    """A config of transformers' class of that name."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in zoo.MODELS]
)
def test_it_says_what_the_engine_gave(tmp_path: Path, name: str) -> None:
    """And `tests/engine/test_zoo.py` compares them with each other."""
    if name not in recorded():
        pytest.skip(f"no engine has run it: python scripts/model_zoo.py {name}")
    found = doctor.answer(
        zoo.write_config(name, tmp_path), NODES, zoo.OPTIONS.get(name, {}).get("dtype", "float32")
    )
    line = recorded()[name]
    assert (found.got, found.architecture) == (line["got"], line["architecture"]), found.reason
    assert (found.reason is None) == (found.got == "trees")
    assert found.early_exits == (name in ("llama", "llama_int8", "llama_int4", "mistral", "qwen2", "qwen3"))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"] == []


@pytest.mark.parametrize(
    ("name", "architecture", "options", "got", "reason"),
    [
        (
            "Mistral",
            "MistralForCausalLM",
            {"sliding_window": 8},
            "chains",
            "window of 8 tokens is smaller than a tree of 13",
        ),
        ("Llama", "LlamaForCausalLM", {"head_dim": 48}, "cannot", "not of 48"),
        ("Mamba", "MambaForCausalLM", {}, "refused", "MambaMixer has a recurrent state"),
        (
            "Mamba2",
            "Mamba2ForCausalLM",
            {"num_heads": 16, "head_dim": 8, "state_size": 16, "n_groups": 1},
            "refused",
            "(160, 16, 8) elements, where a CPU takes multiples of 16",
        ),
        ("Bert", "BertModel", {}, "refused", "pooling"),
    ],
)
def test_why_not(
    tmp_path: Path, name: str, architecture: str, options: dict[str, Any], got: str, reason: str
) -> None:
    usual = zoo.SIZES if name in ("Mistral", "Llama") else {"hidden_size": 64, "num_hidden_layers": 2}
    found = doctor.answer(write(tmp_path, name, architecture, **{**usual, **options}), NODES, "float32")
    assert (found.got or "cannot") == got, found.reason
    assert reason in str(found.reason)


def test_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    """Of 70 billion parameters."""
    folder = write(
        tmp_path,
        "Llama",
        "LlamaForCausalLM",
        hidden_size=8192,
        num_hidden_layers=80,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    found = doctor.answer(folder)
    assert (found.got, found.layers) == ("trees", "80 of CPU_ATTN with FullAttentionSpec, head size 128")


def test_what_cannot_be_built_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: Any) -> Any:
        raise NotImplementedError("reads a weight")

    monkeypatch.setattr(doctor, "_build", build)
    found = doctor.answer(zoo.write_config("llama", tmp_path))
    assert found.got is None
    (line,) = [line for line in doctor.checks(found) if line.what == "drafts"]
    assert line.status == "warn"
    assert "NotImplementedError: reads a weight" in line.found
    assert "ready" in line.way_out


def test_the_command(tmp_path: Path) -> None:
    folder = zoo.write_config("llama", tmp_path / "llama")
    shown = CliRunner().invoke(app, ["doctor", "--model", folder])
    assert (shown.exit_code, shown.output.splitlines()[0]) == (0, "LlamaForCausalLM: trees")
    report = json.loads(CliRunner().invoke(app, ["doctor", "--model", folder, "--json"]).output)
    assert report["ok"]
    assert (report["model"]["got"], report["model"]["reason"]) == ("trees", None)
    assert "weights" in next(check for check in report["checks"] if check["what"] == "not told")["found"]
    refused = write(tmp_path / "mamba", "Mamba", "MambaForCausalLM", hidden_size=64)
    shown = CliRunner().invoke(app, ["doctor", "--model", refused])
    assert (shown.exit_code, shown.output.splitlines()[0]) == (1, "MambaForCausalLM: refused")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/nowhere"], "--model '/nowhere'"),
        (["--model", "."], "config.json"),
        (["--model", "{llama}", "--dtype", "int3"], "--dtype 'int3' is not allowed; allowed: auto, bfloat16"),
        (["--model", "{llama}", "--nodes", "100000"], "num_speculative_tokens"),
    ],
)
def test_errors_say_what_is_allowed(tmp_path: Path, arguments: list[str], says: str) -> None:
    folder = zoo.write_config("llama", tmp_path)
    shown = CliRunner().invoke(app, ["doctor", *(each.format(llama=folder) for each in arguments)])
    assert shown.exit_code == 2, shown.output
    assert says in shown.output
    assert "llowed" in shown.output
