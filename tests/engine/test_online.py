# SPDX-License-Identifier: Apache-2.0
"""A draft that learns while it is served: answers stay plain's through changes of its weights and the trainer's death.

The target is two layers of the model, the draft the first of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts, seen
from vllm import SamplingParams

from vllm_ext.data import weight_versions
from vllm_ext.data.weight_versions import ANSWERS, LOG, VERSIONS
from vllm_ext.engine.draft_model import online
from vllm_ext.training.draft_model import from_layers

pytestmark = pytest.mark.engine

PATIENCE = 180.0  # seconds: the trainer runs where nobody else wants to


@pytest.fixture(scope="module")
def draft(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    from_layers(Path(slice_dir), [0], "cpu").save_pretrained(folder)
    for file in Path(slice_dir).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("online")


@pytest.fixture(scope="module")
def learning(slice_dir: str, draft: Path, folder: Path) -> Iterator[Any]:
    given = {
        "dir": str(folder),
        "update_interval": 4,
        "learning_rate": 1e-3,
        "version_seconds": 0.0,
        "passes": 1,
    }
    method = {
        "method": "dyspec",
        "model": str(draft),
        "num_speculative_tokens": 8,
        "max_depth": 4,
        "budget": "fixed",
    }
    yield from engine(slice_dir, {**method, "online": given})


def state(worker: Any) -> tuple[int, int | None]:
    """The version that the draft has, and the trainer's process."""
    of_draft = worker.model_runner.drafter.passes.online
    return of_draft.version, None if of_draft._trainer is None else of_draft._trainer.pid


def watch(worker: Any) -> None:
    """Count rounds of drafting, and those in which the draft's weights became others."""
    drafts = worker.model_runner.drafter.model_drafts
    worker.seen = {"rounds": 0, "changed": 0}
    inner = drafts.propose

    def propose(*args: Any) -> Any:
        before = [place.into[0].clone() for place in drafts.passes.online._weights.places]
        proposed = inner(*args)
        now = [place.into[0] for place in drafts.passes.online._weights.places]
        worker.seen["rounds"] += 1
        worker.seen["changed"] += any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
        return proposed

    drafts.propose = propose


def ask(llm: Any, inputs: Any, params: Any, expected: Any, done: Callable[[], bool]) -> None:
    """Ask again and again until it is done, and compare each time."""
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until
        assert_same_outputs(expected, generate(llm, inputs, params))


@pytest.mark.slow  # its process has what time is left: two minutes where both cores are busy
def test_answers_stay_plains(plain_slice_llm: Any, learning: Any, folder: Path) -> None:
    inputs = long_and_short_prompts(plain_slice_llm, 6)
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=48, ignore_eos=True)
    params = [greedy, greedy, greedy, seeded, seeded, seeded]
    # One by one: plain vLLM stops at a seeded request whose prompt comes in chunks.
    expected = [generate(plain_slice_llm, [i], [p])[0] for i, p in zip(inputs, params, strict=True)]

    def accepted() -> int:
        (totals,) = learning.collective_rpc("vllm_ext_counters")
        assert totals["fallbacks:proposer_error"] == 0
        return int(totals["spec_accepted_tokens"])

    learning.collective_rpc(watch)
    assert_same_outputs(expected, generate(learning, inputs, params))
    first = accepted()
    ask(learning, inputs, params, expected, lambda: learning.collective_rpc(state)[0][0] >= 2)
    before = accepted()
    assert_same_outputs(expected, generate(learning, inputs, params))
    assert accepted() - before > first  # it has learnt these answers
    (rounds,) = learning.collective_rpc(seen)
    assert rounds["rounds"] > 50
    assert rounds["changed"] == 0
    own = folder / "0"
    assert len(weight_versions.numbers(own / VERSIONS)) <= 2
    for name in (ANSWERS, VERSIONS):
        assert stat.S_IMODE((own / name).stat().st_mode) == 0o700
        for file in (own / name).iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # A version that is damaged is left out, and those after it are taken.
    now = learning.collective_rpc(state)[0][0]
    damaged = weight_versions.path(own / VERSIONS, now + 1000)
    damaged.write_bytes(b"\0" * 100)
    ask(learning, inputs, params, expected, lambda: learning.collective_rpc(state)[0][0] > now + 1000)
    # The trainer is killed.
    pid = learning.collective_rpc(state)[0][1]
    assert pid is not None, (own / LOG).read_text()
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    os.kill(pid, signal.SIGKILL)
    ask(learning, inputs, params, expected, lambda: learning.collective_rpc(state)[0][1] is None)
    assert_same_outputs(expected, generate(learning, inputs, params))


def test_refusals(slice_dir: str, draft: Path, tmp_path: Path) -> None:
    from vllm import EngineArgs

    method = {"method": "dyspec", "model": str(draft), "online": {"dir": str(tmp_path)}}

    def refused(says: str, given: dict[str, Any], **options: Any) -> None:
        with pytest.raises(ValueError, match=says):
            EngineArgs(slice_dir, speculative_config=given, **options).create_engine_config()

    refused(r"online does not work with tensor_parallel_size=2; allowed: 1", method, tensor_parallel_size=2)
    refused(r"online=.*model='self' has the target's weights", {**method, "model": "self"})
    refused(r"online=.*export_dir='e' keeps the same answers", {**method, "export_dir": "e"})
    refused(
        r"unknown option online=.*methods with a draft model learn so", {**method, "method": "suffix_tree"}
    )
    refused(
        r"online\.learning_rate=0 is not allowed; allowed: number, above 0",
        method | {"online": {"dir": "d", "learning_rate": 0}},
    )
    refused(r"online\.dir is missing", {**method, "online": {}})


def test_a_quantised_draft_is_refused(draft: Path, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from vllm_ext.proposers.draft_model import DraftModelOptions
    from vllm_ext.proposers.online import OnlineOptions

    options = DraftModelOptions(model=str(draft), online=OnlineOptions(dir=str(tmp_path)))
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    online.check(config, options, SimpleNamespace(quantization=None))
    with pytest.raises(ValueError, match=r"whose weights are quantised \(awq\)"):
        online.check(config, options, SimpleNamespace(quantization="awq"))
    (draft / "model.safetensors").rename(tmp_path / "away")
    try:
        with pytest.raises(ValueError, match="has no safetensors files"):
            online.check(config, options, SimpleNamespace(quantization=None))
    finally:
        (tmp_path / "away").rename(draft / "model.safetensors")
