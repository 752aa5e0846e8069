# SPDX-License-Identifier: Apache-2.0
"""Rules that steer at start-up and where requests come in, and the commands that make what two of them go by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import slices
import torch
from typer.testing import CliRunner
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_ext.cli.main import app
from vllm_ext.config import rules
from vllm_ext.engine.composed import scheduler, worker
from vllm_ext.samplers import artifact_file

SELF = {"model": "self", "self_layers": 1}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def engine_config(model: str, given: dict[str, Any], **options: Any) -> Any:
    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=256,
        additional_config={"vllm_ext": {"rules": given}},
        **options,
    ).create_engine_config()


def asking(**extra_args: Any) -> SamplingParams:
    return SamplingParams(temperature=0, extra_args=extra_args or None)


def names(settings: rules.RuleSettings, params: SamplingParams) -> list[str]:
    return [each.name for each in settings.of_request(params)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 1}, "does not work with max_num_seqs=1: it must be 2 at least"),
        ({"scheduler_cls": "a.B"}, "do not work with scheduler_cls='a.B'"),
        ({"async_scheduling": True}, "do not work with async_scheduling=True"),
    ],
)
def test_options_that_do_not_go_with_pairs(slice_dir: str, options: dict[str, Any], says: str) -> None:
    for rule in ("cad", "adadec"):
        with pytest.raises(ValueError, match=says):
            engine_config(slice_dir, {rule: {}}, **options)


def test_switches_and_defaults() -> None:
    settings = rules.parse({"dola": {"always": True}, "momentum": {}, "contrastive": SELF})
    assert names(settings, asking()) == ["dola"]
    assert names(settings, asking(dola=False)) == []
    assert names(settings, asking(momentum=True)) == ["dola", "momentum"]
    assert names(settings, asking(dola=False, contrastive_beta=2.0)) == ["contrastive"]
    assert names(settings, asking(contrastive_beta=2.0, contrastive=False)) == ["dola"]
    assert settings.steers
    assert not settings.reports
    assert settings.reads_companion(asking(contrastive=True))
    assert not settings.reads_companion(asking())
    with pytest.raises(ValueError, match="contrastive_alpha=0 is not allowed"):
        settings.validate(asking(contrastive_alpha=0))
    with pytest.raises(ValueError, match="this server has no rule 'anchored'; start it with"):
        settings.validate(asking(anchored=True))
    settings.validate(asking(anchored=False))


def test_alone_and_reports() -> None:
    settings = rules.parse({"anchored": {**SELF, "always": True}, "dola": {}, "awrs": {}})
    assert settings.reports
    assert settings.report_of(asking()) == "anchored_kl"
    assert settings.report_of(asking(anchored=False, awrs_regex="a")) == "awrs_log_weight"
    assert settings.report_of(asking(anchored=False)) is None
    with pytest.raises(ValueError, match="rule 'anchored' does not go with 'dola' in one request"):
        settings.validate(asking(dola=True))
    with pytest.raises(ValueError, match=r"anchored does not go with top_k, top_p or min_p.*anchored=false"):
        settings.validate(SamplingParams(temperature=1.0, top_p=0.5))


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ({"contrastive": {}}, {}, "rule 'contrastive': model is missing, and required"),
        (
            {"contrastive": SELF, "anchored": {"model": "self"}},
            {},
            r"rules 'contrastive' and 'anchored' have different companion models.*Give both the same",
        ),
        ({"dola": {"candidates": [2]}}, {}, r"rule 'dola': candidates=\[2\] is not allowed; allowed: 'low'"),
        ({"lol": {**SELF, "layer": 2}}, {}, "rule 'lol': layer=2 is not allowed; allowed: 0 to 1"),
        (
            {"lol": {**SELF, "amateur_layer": 1}},
            {},
            "rule 'lol': amateur_layer=1 is not allowed; allowed: 0 to 0",
        ),
        ({"contrastive": {"model": "/none"}}, {}, r"\[\"rules\"\].model='/none' cannot be used beside"),
        ({"contrastive": {**SELF, "self_layers": 3}}, {}, "self_layers=3 is not allowed; allowed: 1 to 2"),
        ({"svdecode": {"file": "/none"}}, {}, "rule 'svdecode': file='/none' cannot be read"),
        ({"contrastive": SELF}, {"scheduler_cls": "my.Scheduler"}, "do not work with scheduler_cls="),
        ({"contrastive": SELF}, {"async_scheduling": True}, "do not work with async_scheduling=True"),
        ({"dola": {}}, {"worker_cls": "my.Worker"}, "do not work with worker_cls="),
        ({"dola": {}}, {"pipeline_parallel_size": 2}, "do not work with pipeline_parallel_size=2"),
    ],
)
def test_what_ends_start_up(
    slice_dir: str, given: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        engine_config(slice_dir, given, **options)


def test_classes_that_they_bring(slice_dir: str) -> None:
    config = engine_config(slice_dir, {"dola": {}})
    assert config.parallel_config.worker_cls == worker.path_of(["Rules"])
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(["FaultyRequests"], ahead=False)
    config = engine_config(slice_dir, {"contrastive": SELF})
    reads = ["CompanionBlocks", "FaultyRequests"]
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(reads, ahead=False)
    assert not config.scheduler_config.async_scheduling


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("examples") / "examples.jsonl"
    lines = [{"prompt": "Where is it?", "truth": "By the sea."}, {"question": "Who?", "truth": "The cook."}]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture(scope="module")
def one_layer(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return slices.write(Path(model_dir), tmp_path_factory.mktemp("one"), layers=1, heads=8, kv_heads=2)


def test_files_belong_to_the_model_they_were_made_with(
    slice_dir: str, one_layer: str, examples: Path, tmp_path: Path
) -> None:
    made = run(
        "caad", "build", examples, "--model", slice_dir, "--output", tmp_path / "a", "--field", "truth"
    )
    assert made.exit_code == 0, made.output
    arrays, header = artifact_file.read("file", str(tmp_path / "a"), "caad")
    assert f"{header.made_of} contexts of 2 answers" in made.output
    assert arrays["contexts"].shape[0] == header.made_of
    torch.testing.assert_close(arrays["contexts"].norm(dim=1), torch.ones(header.made_of))
    assert arrays["ids"].shape == arrays["gains"].shape == (header.made_of, 256)
    assert bool((arrays["gains"] >= 0).all())
    engine_config(slice_dir, {"caad": {"file": str(tmp_path / "a")}})
    with pytest.raises(ValueError, match=r"rule 'caad': file=.* was made for .*make it again with"):
        engine_config(one_layer, {"caad": {"file": str(tmp_path / "a")}})
    made = run(
        "svdecode", "build", examples, "--model", slice_dir, "--original", one_layer, "--output", tmp_path / "b",
        "--field", "truth",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    arrays, _ = artifact_file.read("file", str(tmp_path / "b"), "svdecode")
    assert float(arrays["delta"].sum().abs()) < 1e-4
    assert bool(arrays["mu"].isfinite())
    engine_config(slice_dir, {"svdecode": {"file": str(tmp_path / "b")}})
    with pytest.raises(ValueError, match="is a file of rule svdecode, not of caad"):
        engine_config(slice_dir, {"caad": {"file": str(tmp_path / "b")}})


def test_examples_without_answers_are_named(slice_dir: str, examples: Path, tmp_path: Path) -> None:
    done = run("caad", "build", examples, "--model", slice_dir, "--output", tmp_path / "a")
    assert done.exit_code == 2
    assert "examples.jsonl:1: it has no text in 'answer'" in done.output.replace("\n", "")
    assert not (tmp_path / "a").exists()
