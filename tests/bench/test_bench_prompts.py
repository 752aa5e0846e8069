# SPDX-License-Identifier: Apache-2.0
"""The bench's prompt files, and which prompts a round has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.data.prompts import evenly_spaced, load_prompts, rounds_of, turns_of


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines: list[dict[str, Any]] = [
        {"messages": chat},
        {"turns": ["first", "second"], "category": "qa"},
        {"question": "q", "answer": "a"},
        {"prompt": "p"},
    ]
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    prompts = load_prompts([file, file])
    assert [prompt.messages[-1]["content"] for prompt in prompts[:4]] == ["u", "first", "q", "p"]
    assert prompts[0].messages == chat
    assert [prompt.category for prompt in prompts[:4]] == ["mine", "qa", "mine", "mine"]
    assert prompts[2].source == f"{file}:5"
    assert len(prompts) == 8


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"text"',
        '{"text": "x"}',
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"turns": []}',
        '{"turns": [1]}',
        '{"messages": ["x"]}',
        '{"messages": []}',
    ],
)
def test_prompts_refused_with_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: "):
        load_prompts([file])


def test_so_many_of_each_category(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": f"{'ab'[i % 3 > 0]}{i}", "category": "ab"[i % 3 > 0]} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, lines)))

    def texts(given: str) -> list[str]:
        return [prompt.messages[0]["content"] for prompt in load_prompts([tmp_path / given])]

    assert texts("mine.jsonl:2") == ["a0", "b1", "a6", "b7"]  # evenly spaced, in the file's order
    assert len(texts("mine.jsonl:5")) == 4 + 5
    assert texts("mine.jsonl:99") == texts("mine.jsonl")
    with pytest.raises(ValueError, match="at least 1"):
        texts("mine.jsonl:0")
    (tmp_path / "own:1").write_text(json.dumps(lines[0]))
    assert texts("own:1") == ["a0"]


def test_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        load_prompts([tmp_path / "empty.jsonl"])
    with pytest.raises(ValueError, match="cannot be read"):
        load_prompts([tmp_path / "missing.jsonl"])


def test_evenly_spaced() -> None:
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(3), 3) == evenly_spaced(range(3), None) == [0, 1, 2]
    assert evenly_spaced(range(3), 9) == [0, 1, 2]


def test_rounds() -> None:
    assert rounds_of(5, 2, "fresh") == [[0, 2, 4], [1, 3]]
    assert rounds_of(2, 3, "repeat") == [[0, 1]] * 3
    with pytest.raises(ValueError, match="--rounds=3"):
        rounds_of(2, 3, "fresh")
    with pytest.raises(ValueError, match="--workload='again'"):
        rounds_of(2, 1, "again")


def test_turns() -> None:
    assert turns_of([0, 3, 6], 1) == [[0, 3, 6]]
    assert turns_of(list(range(11)), 1) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    assert turns_of(list(range(16)), 2) == [list(range(8)), list(range(8, 16))]
    assert turns_of([], 1) == [[]]
