# SPDX-License-Identifier: Apache-2.0
"""The trainer of live distillation, in seconds: a draft of 64 tokens, and a stream whose distributions are known."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from vllm_ext.data import answers, model_files, weight_versions
from vllm_ext.data.answers import Answer
from vllm_ext.data.weight_versions import ANSWERS, VERSIONS
from vllm_ext.proposers.online import OnlineOptions
from vllm_ext.training.draft_model import Recipe, load_model, loss_of, multiplies_bfloat16
from vllm_ext.training.online import Learner, Trainer, take, wrong_positions

VOCAB, TOP_K, ANSWER = 64, 3, 24
RECIPE = Recipe(batch_tokens=64, max_length=64)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("draft")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def stream(count: int, step: int = 5) -> list[Answer]:
    """Greedy answers: behind a token comes, with a chance of 0.8, the same one always."""
    logp = np.log(np.array([0.8, 0.1, 0.05], np.float32))
    made = []
    for number in range(count):
        tokens, tops = [number % VOCAB, (7 * number + 1) % VOCAB], []
        for _ in range(ANSWER):
            tops.append((tokens[-1] * step + np.array([1, 2, 3])) % VOCAB)
            tokens.append(int(tops[-1][0]))
        top_ids, top_logp = np.array(tops, np.int32), np.tile(logp, (ANSWER, 1))
        made.append(Answer(np.array(tokens, np.int32), 2, top_ids, top_logp))
    return made


def test_wrong_is_where_the_likeliest_token_was_not_put_out() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [0.0, 1.0, 4.0], [1.0, 0.0, 0.5]])
    assert wrong_positions(logits, torch.tensor([1, 2, 2, 1])).tolist() == [False, True, False, True]


def test_the_loss_is_of_wrong_positions_alone(draft: Path) -> None:
    """By hand: the target's three likeliest and the rest as one, summed where the draft was wrong; nowhere else."""
    model = load_model(draft, "cpu")
    (answer,) = stream(1)
    with torch.no_grad():
        read = torch.from_numpy(answer.tokens[None, :-1]).long()
        logits = model(input_ids=read).logits[0, 1:]
    # Half of the answer is made what the draft says: there it is right.
    own = logits.argmax(1).numpy()
    emitted = np.where(np.arange(ANSWER) % 2, own, answer.tokens[2:])
    wrong = emitted != own
    assert 0 < wrong.sum() < ANSWER
    expected, q = 0.0, logits.softmax(1).double().numpy()
    for place in np.flatnonzero(wrong):
        p, of_q = np.exp(answer.top_logp[place]), q[place, answer.top_ids[place]]
        expected -= float((p * np.log(of_q)).sum() + (1 - p.sum()) * np.log(1 - of_q.sum()))
    expected /= wrong.sum()
    top_ids = torch.from_numpy(answer.top_ids).long()
    found = loss_of(logits[wrong], top_ids[wrong], torch.from_numpy(answer.top_logp[wrong]))
    assert float(found) == pytest.approx(expected, abs=1e-4)
    # What is read stays; what is judged is what was put out: a last token is read by nobody.
    tokens = answer.tokens.copy()
    tokens[-1] = emitted[-1]
    report = Learner(model, 1e-3, RECIPE).learn([Answer(tokens, 2, answer.top_ids, answer.top_logp)], 1)
    judged = np.append(answer.tokens[2:-1], emitted[-1]) != own
    assert (report.tokens, report.wrong, report.steps) == (ANSWER, judged.sum(), 1)
    with torch.no_grad():
        at = torch.from_numpy(judged)
        whole = loss_of(logits[at], top_ids[at], torch.from_numpy(answer.top_logp)[at])
    assert report.loss / report.tokens == pytest.approx(
        float(whole), rel=0.02
    )  # bfloat16 where there is such


def test_nothing_is_learnt_where_nothing_was_wrong(draft: Path) -> None:
    model = load_model(draft, "cpu")
    learner = Learner(model, 1e-2, RECIPE)
    before = {name: parameter.clone() for name, parameter in learner.learning.items()}
    tokens = [3, 8]
    with torch.no_grad():
        for _ in range(ANSWER):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    tops = stream(1)[0]
    right = Answer(np.array(tokens, np.int32), 2, tops.top_ids, tops.top_logp)
    learner.learn([right], 2)
    exact = not multiplies_bfloat16("cpu")  # else the likeliest of two that are near may be the other
    if exact:
        assert all(torch.equal(before[name], parameter) for name, parameter in learner.learning.items())
    everywhere = Learner(load_model(draft, "cpu"), 1e-2, RECIPE, everywhere=True)
    report = everywhere.learn([right], 1)
    assert report.steps == 1
    assert report.wrong == 0 or not exact
    assert any(not torch.equal(before[name], parameter) for name, parameter in everywhere.learning.items())
    learner.learn(stream(1), 1)  # the mutation: it is wrong there, and learns
    assert any(not torch.equal(before[name], parameter) for name, parameter in learner.learning.items())


def test_acceptance_on_a_stream_rises_and_comes_back_after_a_shift(draft: Path) -> None:
    learner = Learner(load_model(draft, "cpu"), 3e-3, RECIPE)
    frozen = learner.model.get_input_embeddings().weight.clone()

    def accepted(given: list[Answer]) -> float:
        report = learner.learn(given, 2)
        return 1 - report.wrong / report.tokens

    first = [accepted(stream(64)[i : i + 8]) for i in range(0, 64, 8)]
    assert first[0] < 0.2
    assert first[-1] > first[0] + 0.4
    second = [accepted(stream(64, step=9)[i : i + 8]) for i in range(0, 64, 8)]
    assert second[0] < first[-1] - 0.3
    assert second[-1] > second[0] + 0.3
    assert torch.equal(frozen, learner.model.get_input_embeddings().weight)


def options(**given: Any) -> dict[str, Any]:
    return OnlineOptions(dir="unused", version_seconds=0.0, learning_rate=3e-3, **given).model_dump()


def test_answers_are_deleted_and_versions_bounded_and_gone_on_from(draft: Path, tmp_path: Path) -> None:
    for part in (ANSWERS, VERSIONS):
        (tmp_path / part).mkdir()
    trainer = Trainer(tmp_path, draft, options(kept_versions=2), 64)
    assert not trainer.turn()
    for number in range(4):
        answers.write(answers.shard_file(tmp_path / ANSWERS, number), stream(8))
    (tmp_path / ANSWERS / "00000009.npz").write_bytes(b"PK\3\4 damaged")
    assert trainer.turn()
    assert not list((tmp_path / ANSWERS).iterdir())
    assert weight_versions.numbers(tmp_path / VERSIONS) == [3, 4]
    file = weight_versions.path(tmp_path / VERSIONS, 4)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = weight_versions.read(file, model_files.fingerprint(draft))
    learning = trainer.learner.learning
    assert found.keys() == learning.keys()
    # The next start goes on from the newest version that is whole.
    weight_versions.path(tmp_path / VERSIONS, 5).write_bytes(file.read_bytes()[:-100])
    again = Trainer(tmp_path, draft, options(), 64).learner.learning
    for name, parameter in again.items():
        torch.testing.assert_close(parameter.detach(), learning[name].detach().to(found[name]).float())


def test_time_between_versions_is_kept(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (ANSWERS, VERSIONS):
        (tmp_path / part).mkdir()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer = Trainer(tmp_path, draft, {**options(), "version_seconds": 30.0}, 64)
    for seconds, expected in ((0.0, [1]), (29.0, [1]), (31.0, [1, 2])):
        now[0] = seconds
        answers.write(answers.shard_file(tmp_path / ANSWERS, 0), stream(2))
        trainer.turn()
        assert weight_versions.numbers(tmp_path / VERSIONS) == expected
    now[0] = 100.0
    trainer.turn()  # nothing new is learnt
    assert weight_versions.numbers(tmp_path / VERSIONS) == [1, 2]


def test_a_shard_is_gone_before_it_is_learnt_from(tmp_path: Path) -> None:
    for number in range(3):
        answers.write(answers.shard_file(tmp_path, number), stream(2))
    left = [len(list(tmp_path.iterdir())) for given in take(tmp_path) if len(given) == 2]
    assert left == [2, 1, 0]


def test_versions_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.arange(6.0).view(2, 3)}
    assert weight_versions.publish(tmp_path, weights, "draft", 3) == 1

    def fail(*_: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:  # it ends before the file has its name
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            weight_versions.publish(tmp_path, weights, "draft", 3)
    assert weight_versions.numbers(tmp_path) == [1]
    assert weight_versions.publish(tmp_path, weights, "draft", 3) == 2  # over what was left of a part
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "00000001.safetensors",
        "00000002.safetensors",
    ]
    file = weight_versions.path(tmp_path, 2)
    assert torch.equal(weight_versions.read(file, "draft")["a"], weights["a"])
    with pytest.raises(ValueError, match=r"of another draft \(draft, and not other\)"):
        weight_versions.read(file, "other")
    for damaged in (b"", b"\xff" * 64, file.read_bytes()[:-8]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read"):
            weight_versions.read(file, "draft")
    with pytest.raises(ValueError, match="cannot be read"):
        weight_versions.read(tmp_path / "away.safetensors", "draft")


def test_the_trainer_ends_when_its_parent_is_killed(draft: Path, tmp_path: Path) -> None:
    for part in (ANSWERS, VERSIONS):
        (tmp_path / part).mkdir()
    given = {
        "folder": str(tmp_path),
        "draft": str(draft),
        "cores": sorted(os.sched_getaffinity(0)),
        "max_length": 64,
        "options": options(),
    }
    start = (
        "import json, os, subprocess, sys, time\n"
        "given = {**json.loads(sys.argv[1]), 'parent': os.getpid()}\n"
        "child = subprocess.Popen([sys.executable, '-m', 'vllm_ext.training.online', json.dumps(given)],\n"
        "    stdout=subprocess.DEVNULL, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", start, json.dumps(given)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    answers.write(answers.shard_file(tmp_path / ANSWERS, 0), stream(2))
    until = time.monotonic() + 120
    while not weight_versions.numbers(tmp_path / VERSIONS):  # it works
        assert time.monotonic() < until
        time.sleep(0.1)
    assert os.sched_getscheduler(child) == os.SCHED_IDLE
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while _runs(child):
        assert time.monotonic() < until
        time.sleep(0.1)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
