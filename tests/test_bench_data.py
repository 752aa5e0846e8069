# SPDX-License-Identifier: Apache-2.0
"""The bench's parsing and arithmetic, without an engine."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.bench_data import (
    Answer,
    Divergence,
    Method,
    Round,
    evenly_spaced,
    first_difference,
    load_prompts,
    parse_batch_sizes,
    parse_methods,
    rounds_of,
    summarise,
    union_s,
)
from vllm_ext.bench_worker import DraftTimer


def test_plain_is_added_first_and_has_no_config() -> None:
    plain, ngram = parse_methods("ngram")
    assert (plain.name, plain.label, plain.speculative_config) == ("plain", "plain", None)
    assert ngram.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


def test_plain_stays_where_it_is_put() -> None:
    assert [method.name for method in parse_methods("token_recycling, plain")] == [
        "token_recycling",
        "plain",
    ]


def test_options_in_brackets() -> None:
    text = 'plain, a(num-speculative-tokens=3, path=/x/y, flag = true, ids=[1, 2], text="b,c"),b()'
    _, a, b = parse_methods(text)
    assert a.options == {
        "num_speculative_tokens": 3,
        "path": "/x/y",
        "flag": True,
        "ids": [1, 2],
        "text": "b,c",
    }
    assert a.label == "a(num_speculative_tokens=3, path=/x/y, flag=true, ids=[1, 2], text=b,c)"
    assert (b.label, b.options) == ("b", {"num_speculative_tokens": 5})


def test_json_files(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    one.write_text('{"method": "ngram", "prompt_lookup_max": 3}')
    many.write_text('[{"method": "a"}, {"method": "a", "x": 1}]')
    labels = [method.label for method in parse_methods(f"plain,{one},{many}")]
    assert labels == ["plain", "ngram(prompt_lookup_max=3)", "a", "a(x=1)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram,ngram", "ngram is given more than once"),
        ("plain,plain", "plain is given more than once"),
        ("ngram(5)", "is not a method"),
        ("ngram(a=1", "is not a method"),
        ("a b", "is not a method"),
        ("plain(a=1)", "plain takes no options"),
        ("a(method=b)", "remove 'method'"),
        ("missing.json", "cannot be read"),
    ],
)
def test_methods_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_methods(text)


@pytest.mark.parametrize("content", ["3", '[{"name": "ngram"}]', '{"method": 1}'])
def test_method_files_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"m\.json holds"):
        parse_methods(str(file))


def test_batch_sizes() -> None:
    assert parse_batch_sizes("1, 4") == [1, 4]


@pytest.mark.parametrize("text", ["", "0", "1,1", "1,,2", "a", "-1", "1.5"])
def test_batch_sizes_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--batch-size="):
        parse_batch_sizes(text)


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


def test_union() -> None:
    assert union_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (9.0, 9.0)]) == 4.0
    assert union_s([]) == 0.0


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize(
    ("plain_token", "method_token", "gap", "top_gap", "tolerance", "tie"),
    [
        (1, 2, 0.2, 0.2, 0.25, True),
        (1, 2, 0.0, 0.1, 0.25, True),  # asked again, plain prefers the method's token
        (1, 2, 0.0, 0.4, 0.25, False),  # and by far: then plain's own answer needs explaining
        (1, 2, 0.3, 0.1, 0.25, False),
        (
            1,
            2,
            0.25001,
            0.125,
            0.25,
            True,
        ),  # two steps of a bfloat16 logit of 16 to 32, and the softmax's rounding
        (1, 2, 0.2502, 0.125, 0.25, False),
        (1, 2, 0.00001, 0.00001, 0.0, False),  # float32 gets no such room
        (1, 2, inf, 0.0, 0.25, False),  # not among the top 20
        (1, 2, 0.0, 0.0, 0.0, True),
        (1, 2, 0.001, 0.001, 0.0, False),
        (None, 2, 0.0, 0.0, 0.25, False),
        (1, None, 0.0, 0.0, 0.25, False),
    ],
)
def test_ties(
    plain_token: int | None,
    method_token: int | None,
    gap: float,
    top_gap: float,
    tolerance: float,
    tie: bool,
) -> None:
    divergence = Divergence(0, "f:1", 3, plain_token, method_token, 1, gap, top_gap)
    assert divergence.is_tie(tolerance) is tie
    assert "position 3" in str(divergence)


def answer(prompt: int, category: str, submitted_s: float, times: list[float], tokens: int) -> Answer:
    return Answer(prompt, category, submitted_s, list(range(tokens)), times)


def test_figures_by_hand() -> None:
    plain = Method("plain", {}, "plain")
    ours = Method("x", {"k": 1}, "x(k=1)")
    plain_rounds = [
        # Two requests that overlap: 1..5 and 3..7 are 6 seconds for 4 + 4 tokens.
        Round(
            [
                answer(0, "a", 0.0, [1.0, 2.0, 3.0, 4.0, 5.0], 5),
                answer(1, "b", 2.0, [3.0, 4.0, 5.0, 6.0, 7.0], 5),
            ],
            wall_s=10.0,
            num_draft_tokens=0,
            draft_s=0.0,
        ),
        Round([answer(2, "a", 0.0, [1.0, 2.0, 3.0], 3)], 4.0, 0, 0.0),
    ]
    rounds = [
        Round(
            [answer(0, "a", 0.0, [1.0, 2.0, 3.0], 5), answer(1, "b", 0.0, [3.0, 4.0], 5)],
            wall_s=5.0,
            num_draft_tokens=9,
            draft_s=0.3,
        ),
        Round([answer(2, "a", 0.0, [0.5, 1.0], 3)], 1.0, 3, 0.2),
    ]
    wrong = Divergence(2, "f:3", 1, 1, 2, 1, inf, 1.0)
    tie = Divergence(1, "f:2", 1, 1, 2, 1, 0.1, 0.1)
    entry = summarise(ours, 2, rounds, plain_rounds, [wrong, tie], 0.25)
    assert entry["decode_tokens_per_s_rounds"] == [8 / 3, 4.0]
    assert entry["decode_tokens_per_s"] == pytest.approx((8 / 3 + 4) / 2)
    assert entry["speedup_vs_plain_rounds"] == [pytest.approx(2.0), 4.0]
    assert entry["speedup_vs_plain"] == pytest.approx(3.0)
    assert entry["e2e_tokens_per_s"] == pytest.approx((10 / 5 + 3 / 1) / 2)
    assert entry["e2e_speedup_vs_plain"] == pytest.approx((2 / 1 + 3 / 0.75) / 2)
    assert entry["ttft_ms"] == 1000.0
    assert entry["tokens_per_step"] == 10 / 4
    assert entry["draft_tokens_per_step"] == 12 / 4
    assert entry["draft_time_share"] == pytest.approx(0.5 / 3.5)
    counts = ("identical", "tie_divergences", "wrong_divergences", "prompts")
    assert [entry[key] for key in counts] == [1, 1, 1, 3]
    assert entry["category"]["a"] == {
        "prompts": 2,
        "decode_tokens_per_s": 6 / 2.5,
        "speedup_vs_plain": pytest.approx(2.4),
        "tokens_per_step": 2.0,
    }
    itself = summarise(plain, 2, plain_rounds, plain_rounds, [], 0.25)
    assert (itself["speedup_vs_plain"], itself["tokens_per_step"]) == (1.0, 1.0)
    json.dumps([entry, itself], allow_nan=False)


def test_answers_of_one_token_have_no_decode_figures() -> None:
    method = Method("plain", {}, "plain")
    rounds = [Round([answer(0, "a", 0.0, [1.0], 1)], 2.0, 0, None)]
    entry = summarise(method, 1, rounds, rounds, [], 0.0)
    for key in ("decode_tokens_per_s", "speedup_vs_plain", "tokens_per_step", "draft_time_share"):
        assert entry[key] is None
    assert entry["e2e_tokens_per_s"] == 0.5


class Runner:
    vllm_ext_tap_seconds = 1.0

    def propose_draft_token_ids(self, value: int, *, twice: bool) -> int:
        self.vllm_ext_tap_seconds += 2.0
        return 2 * value if twice else value


def test_draft_timer() -> None:
    timer = DraftTimer()
    timer.model_runner = Runner()
    assert timer.vllm_ext_bench_draft_seconds() == 0.0
    assert timer.model_runner.propose_draft_token_ids(3, twice=True) == 6
    assert timer.vllm_ext_bench_draft_seconds() == pytest.approx(2.0, abs=0.1)
    assert timer.vllm_ext_bench_draft_seconds() == 0.0


def test_draft_timer_without_a_step_to_time() -> None:
    timer = DraftTimer()
    timer.model_runner = object()
    assert timer.vllm_ext_bench_draft_seconds() is None
