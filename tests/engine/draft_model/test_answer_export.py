# SPDX-License-Identifier: Apache-2.0
"""The buffer of answers for training: what is kept, what is let go, and that a full disk hurts no request."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_ext.data import answers
from vllm_ext.engine.draft_model.answer_export import LEAST, MAX_LENGTH, TOP_K, Export
from vllm_ext.proposers.base import VerifiedRows


def rows_of(names: list[str], parts: list[tuple[list[int], list[int], list[int]]]) -> VerifiedRows:
    """A step. Of each request: its rows' parents, the accepted ones, and what it put out."""
    parents = [parent for part, _, _ in parts for parent in part]
    accepted = [row in good for part, good, _ in parts for row in range(len(part))]
    start = np.cumsum([0, *(len(part) for part, _, _ in parts)]).astype(np.int32)
    count = len(parents)
    # Row r's best token is r, its logits fall by one each.
    top_ids = (np.arange(count)[:, None] + np.arange(TOP_K)).astype(np.int32)
    return VerifiedRows(
        names,
        start,
        np.zeros(count, np.int32),
        np.array(parents, np.int32),
        np.array(accepted),
        top_ids,
        np.tile(-np.arange(TOP_K, dtype=np.float32), (count, 1)),
        emitted=[emitted for _, _, emitted in parts],
    )


def answer(export: Export, name: str, length: int) -> None:
    """One request from its start to its end, a token a step; its tokens are 1, 2 and so on."""
    for token in range(1, length + 1):
        export.observe(rows_of([name], [([-1], [0], [token])]), np.zeros(1, np.float32))
        if token == 1:
            export.start(name, np.array([90, 91], np.int32))
    export.finish(name)


def test_the_accepted_path_is_kept(tmp_path: Path) -> None:
    export = Export(tmp_path, 1.0)
    tree = ([-1, 0, 0, 2], [0, 2, 3], [7, 8, 9])  # the second child and its own
    others: tuple[list[int], list[int], list[int]] = ([-1, 0], [0], [])  # a prompt that goes on
    for _ in range(3):
        rows = rows_of(["other", "a"], [others, tree])
        export.observe(rows, np.full(6, 2.0, np.float32))
    export.start("a", np.array([90, 91], np.int32))
    # An end token cuts what was accepted.
    export.observe(rows_of(["a"], [([-1, 0, 1], [0, 1, 2], [5])]), np.zeros(3, np.float32))
    export.finish("a")
    export.finish("never seen")
    answer(export, "short", LEAST - 1)
    export.close()
    (kept,) = answers.load(tmp_path)
    assert kept.tokens.tolist() == [90, 91, *[7, 8, 9] * 3, 5]
    assert kept.num_prompt_tokens == 2
    assert kept.top_ids[:, 0].tolist() == [*[2, 4, 5] * 3, 0]
    assert kept.top_logp[:, 1].tolist() == [-3.0] * 9 + [-1.0]


def test_of_long_ones_the_end_is_kept(tmp_path: Path) -> None:
    export = Export(tmp_path, 1.0)
    answer(export, "long", MAX_LENGTH - 1)
    answer(export, "longer", MAX_LENGTH + 5)
    export.close()
    one, other = answers.load(tmp_path)
    assert one.tokens.tolist() == [91, *range(1, MAX_LENGTH)]
    assert one.num_prompt_tokens == 1
    assert other.tokens.tolist() == list(range(6, MAX_LENGTH + 6))
    assert other.num_prompt_tokens == 0
    assert len(other.top_ids) == MAX_LENGTH


def test_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SHARD", 2)
    for start in range(2):  # the second goes on behind the first
        export = Export(tmp_path, 0.02)
        for number in range(20):
            answer(export, "a", LEAST + 20 * start + number)
        export.close()
        sizes = [file.stat().st_size for file in sorted(tmp_path.glob("*.npz"))]
        assert 0 < sum(sizes) <= 20_000
        kept = [len(one.top_ids) for one in answers.load(tmp_path)]
        assert kept == list(range(LEAST + 20 * start + 20 - len(kept), LEAST + 20 * start + 20))


def test_what_cannot_be_written_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SHARD", 1)
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.vllm_ext"), "warning", lambda *a: said.append(a[0] % a[1:]))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers, "write", full)
    export = Export(tmp_path, 1.0)
    for _ in range(3):
        answer(export, "a", LEAST)
    export.close()
    assert len(said) == 1
    assert "1 answers could not be written" in said[0]
    assert "No space left on device" in said[0]


def test_few_answers_are_handed_over_at_once_and_may_be_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft that learns online: who learns from a shard deletes it, also while the next one is written."""
    said: list[Any] = []
    monkeypatch.setattr(logging.getLogger("vllm.vllm_ext"), "warning", lambda *a: said.append(a))
    export = Export(tmp_path, 1e-3, in_shard=2)
    write = answers.write

    def taken_meanwhile(file: Path, given: Any) -> None:
        write(file, given)
        for other in tmp_path.glob("*.npz"):
            if other != file:
                other.unlink()

    monkeypatch.setattr(answers, "write", taken_meanwhile)
    for number in range(6):
        answer(export, f"r{number}", LEAST + number)
    export.close()
    assert [len(found.top_ids) for found in answers.load(tmp_path)] == [LEAST + 4, LEAST + 5]
    assert not said
