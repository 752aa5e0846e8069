# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext adadec learn`` without an engine: what is read, what is refused, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_ext.bench import side_by_side
from vllm_ext.cli.main import app
from vllm_ext.data.documents import InputError
from vllm_ext.samplers.adadec import AdadecOptions
from vllm_ext.training import adadec
from vllm_ext.training.adadec import HELD_OUT, Read, learn_from
from vllm_ext.training.adadec_texts import Text, read_texts

COLUMNS = 80


class Letters:
    """A tokenizer with a token a letter; one with ``begin`` puts that before a text."""

    def __init__(self, begin: Sequence[int] = ()) -> None:
        self.begin = list(begin)

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(ids=[*(self.begin if add_special_tokens else []), *text.encode()])


def record(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def lines(file: Path, records: Sequence[Any]) -> Path:
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return file


def counted(texts: Sequence[Text]) -> list[str]:
    return [bytes(text.tokens[text.counts_from :]).decode() for text in texts]


def texts_of(*inputs: Path, tokens: int = 10_000, context: int = 64, **options: Any) -> list[Text]:
    given = {"include": (), "tokenizer": Letters(), "seed": 0, **options}
    return read_texts(inputs, most=tokens, context=context, **given).texts


def test_a_file_is_read_in_windows(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("".join(chr(97 + i % 26) for i in range(150)))
    found = texts_of(file)
    assert sorted(len(text.tokens) for text in found) == [64, 64]  # the last 22 are less than half a window
    assert all(text.counts_from == 1 for text in found)
    assert [text.tokens[0] for text in sorted(found, key=lambda each: each.tokens)] == [97, 109]
    begun = texts_of(file, tokenizer=Letters([0]))  # each window begins as the model's texts do
    assert sorted(len(text.tokens) for text in begun) == [64, 64]
    assert all(text.tokens[0] == 0 and text.counts_from == 1 for text in begun)
    file.write_text("abc")
    assert counted(texts_of(file)) == ["bc"]


def test_each_file_gives_one_window_before_any_gives_two(tmp_path: Path) -> None:
    for letter in "abcd":
        (tmp_path / f"{letter}.py").write_text(letter * 640)
    found = texts_of(tmp_path, tokens=4 * 63 + 10)
    assert sorted({text.tokens[0] for text in found[:4]}) == [97, 98, 99, 100]
    assert [text.count for text in found] == [63, 63, 63, 63, 10]
    assert found == texts_of(tmp_path, tokens=4 * 63 + 10)
    assert found != texts_of(tmp_path, tokens=4 * 63 + 10, seed=1)


def test_of_folders_code_alone(tmp_path: Path) -> None:
    for name in ("a.py", "b.md", "c.rs"):
        (tmp_path / name).write_text(name[0] * 9)
    lines(tmp_path / "d.jsonl", [record("p", "ddddddddd")])
    assert sorted(counted(texts_of(tmp_path))) == ["a" * 8, "c" * 8]
    assert counted(texts_of(tmp_path, include=["*.md"])) == ["b" * 8]
    assert sorted(counted(texts_of(tmp_path, tmp_path / "d.jsonl"))) == ["a" * 8, "c" * 8, "d" * 9]


def test_of_records_the_completion_counts(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl",
        [
            record("def f():", "\n  pass"),
            {"complete_prompt": "def g():", "canonical_solution": "\n  return 1"},
            {"prompt": "x = ", "solution": "2", "test": 3},
            record("", "yes"),
            record("no", ""),
        ],
    )
    found = {bytes(text.tokens): text.counts_from for text in texts_of(file)}
    assert found == {b"def f():\n  pass": 8, b"def g():\n  return 1": 8, b"x = 2": 4, b"yes": 1}


def test_long_prompts_lose_their_beginning(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [record("p" * 99 + "q", "c" * 10)])
    (text,) = texts_of(file)
    assert bytes(text.tokens) == b"p" * 53 + b"q" + b"c" * 10
    lines(file, [record("p" * 99, "c" * 99)])
    (text,) = texts_of(file, tokenizer=Letters([0, 0]))
    assert bytes(text.tokens) == b"\0\0" + b"p" * 31 + b"c" * 31
    assert text.counts_from == 33


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"\xff\xfe nothing")
    (tmp_path / "b.py").write_text("b" * 20)
    found = read_texts([tmp_path], (), Letters(), 100, 64, 0)
    assert (counted(found.texts), found.num_binary) == (["b" * 19], 1)
    found = read_texts([tmp_path / "a.py", tmp_path / "b.py"], (), Letters(), 100, 64, 0)
    assert "a.py: it is left out, as it is not UTF-8 text" in found.skipped[0]
    with pytest.raises(InputError, match=r"the inputs hold no code to read .*a\.py: it is left out"):
        texts_of(tmp_path / "a.py")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for its own process stays out of the tests'."""
    monkeypatch.setattr(side_by_side, "set_environment", lambda verbose: None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def learn(*arguments: object) -> Any:
    runner = CliRunner(env={"COLUMNS": str(COLUMNS)})
    return runner.invoke(app, ["adadec", "learn", *map(str, arguments)])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            '{"prompt": "a"}',
            "a.jsonl:2: there is no field completion, canonical_solution or solution; its fields",
        ),
        (
            '{"completion": "a"}',
            "a.jsonl:2: there is no field prompt or complete_prompt; its fields: completion",
        ),
        ('{"prompt": "a", "completion": [1]}', "a.jsonl:2: field 'completion' holds [1]; allowed: text"),
        ("[1]", "a.jsonl:2: there is no field prompt or complete_prompt; its fields: none, it is no object"),
        ("{", "a.jsonl:2: no JSON"),
    ],
)
def test_records_are_refused_by_line(slice_dir: str, tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record("a", "b")) + "\n" + line)
    done = learn(file, "--model", slice_dir)
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.py"], "INPUT='none.py' does not exist; name files or folders that do"),
        (
            ["a.parquet"],
            "INPUT='a.parquet' is not allowed; allowed: files of code, folders of them, and .jsonl",
        ),
        ([".", "--include", "*.rs"], "--include=['*.rs'] and --exclude=[] leave no file"),
        (["a.py", "--model", "/nowhere"], "model='/nowhere': no folder"),
        (["a.py", "--dtype", "float7"], "with --dtype=float7 and --context=1024: "),
        (["a.py", "--context", "100000"], "and --context=100000: "),
        (["a.py", "--tokens", "10"], "Invalid value for '--tokens'"),
        (["a.py", "--context", "10"], "Invalid value for '--context'"),
    ],
)
def test_arguments_are_refused_before_an_engine_starts(
    slice_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("a = 1\n" * 50)
    monkeypatch.setattr(adadec, "read", lambda *_: pytest.fail("an engine would start"))
    done = learn("--model", slice_dir, *arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output


def test_v2_is_refused(slice_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import EngineArgs

    monkeypatch.setattr(
        EngineArgs, "create_engine_config", lambda _: SimpleNamespace(use_v2_model_runner=True)
    )
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    (tmp_path / "a.py").write_text("a = 1\n" * 50)
    done = learn(tmp_path, "--model", slice_dir)
    assert done.exit_code == 2
    assert "VLLM_USE_V2_MODEL_RUNNER=1 is not allowed; allowed: unset or 0" in done.output


def said(count: int, seed: int = 0, weight: float = -2.0) -> list[Read]:
    """Of 20 texts, what a model might have said."""
    draw = np.random.default_rng(seed)
    entropy = draw.exponential(1.0, (20, count)).astype(np.float32)
    first = draw.random((20, count)) < 1.0 / (1.0 + np.exp(-(weight * entropy + 2.4)))
    return [Read(*text) for text in zip(entropy, first, strict=True)]


def test_one_text_of_five_is_held_out() -> None:
    texts = said(500)
    expected = learn_from(texts)
    assert (expected.num_tokens, expected.num_held_out) == (10_000, 2_000)
    assert expected.threshold == pytest.approx(1.2, abs=0.15)
    for number in range(HELD_OUT - 1, 20, HELD_OUT):
        texts[number] = Read(texts[number].entropy, ~texts[number].first[::-1].copy())
    with pytest.raises(ValueError, match="tokens held out right"):
        learn_from(texts)  # they have no part in what is learnt, and are what it is judged by
    with pytest.raises(ValueError, match="of the tokens held out 0 have rank 1"):
        learn_from(said(500)[:4])


@pytest.fixture
def answered(slice_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with what a model might have said, on a file of ours."""
    (tmp_path / "a.py").write_text("a = 1\n" * 500)

    def run(made: list[Read], *arguments: str) -> Any:
        monkeypatch.setattr(adadec, "read", lambda *_: made)
        return learn(tmp_path / "a.py", "--model", slice_dir, *arguments)

    return run


def test_what_is_printed(answered: Any) -> None:
    expected = learn_from(said(500))
    done = answered(said(500))
    assert done.exit_code == 0, done.output
    *shown, serve, ask = done.stdout.splitlines()
    assert max(map(len, shown)) <= COLUMNS
    assert f"threshold: {expected.threshold} nats" in shown
    assert any(
        line.startswith("10,000 tokens of ") and f"{expected.rank_1:.1%} have rank 1" in line
        for line in shown
    )
    assert "on 2,000 tokens held out" in done.stdout
    assert f"{expected.learnt.balanced:.1%}" in done.stdout
    assert f"{expected.default.balanced:.1%}" in done.stdout
    head, given, _ = serve.split("'")
    assert head == "serve with: --additional-config "
    options = json.loads(given)["vllm_ext"]["rules"]["adadec"]
    assert AdadecOptions(**options).threshold == expected.threshold
    assert ask == 'ask with: "vllm_xargs": {"adadec": true}'


def test_the_same_as_json(answered: Any) -> None:
    expected = learn_from(said(500))
    done = answered(said(500), "--json")
    report = json.loads(done.stdout)
    assert (report["tokens"], report["held_out"]["tokens"]) == (10_000, 2_000)
    assert report["threshold"] == report["held_out"]["learnt"]["threshold"] == expected.threshold
    assert report["held_out"]["default"] == {
        "threshold": 1.0,
        "accuracy": expected.default.accuracy,
        "balanced_accuracy": expected.default.balanced,
        "pauses": expected.default.pauses,
    }
    assert report["additional_config"] == {
        "vllm_ext": {"rules": {"adadec": {"threshold": expected.threshold}}}
    }


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_without_a_threshold_none_is_printed(answered: Any, as_json: list[str]) -> None:
    sure = [Read(text.entropy, np.ones_like(text.first)) for text in said(50)]
    for made, says in (
        (sure, "of the tokens to learn from 800 have rank 1 and 0 have not; 50 of each are needed"),
        (said(500, weight=0.0), "entropy"),
        (said(3), "50 of each are needed"),
    ):
        done = answered(made, *as_json)
        assert done.exit_code == 2
        assert says in done.stderr
        assert done.stdout == ""
