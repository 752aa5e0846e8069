# SPDX-License-Identifier: Apache-2.0
"""The bench's arithmetic, without an engine."""

from __future__ import annotations

import json
from math import inf

import pytest

from vllm_ext.bench.settings import Method
from vllm_ext.bench.stats import Answer, Divergence, Round, first_difference, summarise, union_s


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
    assert entry["wrong"] == [str(wrong)]
    assert entry["e2e_tokens_per_s_rounds"] == [2.0, 3.0]
    assert entry["tokens_per_step_rounds"] == [8 / 3, 2.0]
    assert entry["draft_tokens_per_step_rounds"] == [3.0, 3.0]
    assert entry["category"]["a"] == {
        "prompts": 2,
        "decode_tokens_per_s": 6 / 2.5,
        "decode_tokens_per_s_rounds": [2.0, 4.0],
        "speedup_vs_plain": pytest.approx(2.4),
        "speedup_vs_plain_rounds": [2.0, 4.0],
        "tokens_per_step": 2.0,
        "tokens_per_step_rounds": [2.0, 2.0],
    }
    # The second round has no prompt of this category.
    assert entry["category"]["b"]["speedup_vs_plain_rounds"] == [4.0, None]
    assert entry["category"]["b"]["tokens_per_step_rounds"] == [4.0, None]
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
