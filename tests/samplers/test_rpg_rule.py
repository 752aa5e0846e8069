# SPDX-License-Identifier: Apache-2.0
"""Rule rpg: what counts as a copy, beside brute force; which tokens it touches, and how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import ASKED
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_ext.samplers.base import Row, open_code
from vllm_ext.samplers.rpg import NEWLINE, RpgOptions, RpgParams, RpgRule, classes, repeated

END = 7
PIECES = (b"elif", b" elif", b"x", b" else", b" 1", b"\n    ", b"return", b"", b"if", b" if")


class Bytes:
    """Then each byte as a token, so that a test may write any output."""

    pieces = (*PIECES, *(bytes([value]) for value in range(128)))
    size = len(pieces)

    def encode(self, text: str) -> list[int]:
        return [len(PIECES) + value for value in text.encode()]


BYTES = Bytes()
ARM = "elif x == {}:\n    return '{}'\n"


def row(text: str, gamma: float = 2.0, count: int = 2) -> Row:
    return Row([1], BYTES.encode(text), END, RpgParams(rpg=gamma, rpg_count=count), ASKED)


def penalties(text: str, **given: Any) -> dict[bytes, float]:
    """What was taken from which tokens."""
    rule = RpgRule.from_options(RpgOptions(), BYTES)
    before = torch.randn(1, BYTES.size)
    after = before.clone()
    rule.apply(after, [row(text, **given)])
    taken = (before - after)[0]
    return {BYTES.pieces[i]: float(taken[i]) for i in taken.nonzero().flatten().tolist()}


def test_classes() -> None:
    code = 'def f(a_1, *b):  # note\n\n    return a_1 + "x\\"y" + 0x1F // 2\nfor'
    assert list(classes(code)) == [
        *("def", "word", "(", "word", ",", "*", "word", ")", ":", NEWLINE),
        *("return", "word", "+", "string", "+", "number", NEWLINE, "for"),
    ]
    assert list(classes('"""a\n"b"\n""" /* c\n */ \'d\'')) == ["string", "string"]


def slowly_repeated(sequence: Sequence[str], least: int) -> tuple[Sequence[str], int]:
    """As `repeated`, by trying all."""
    best: tuple[int, int, int] = (0, 0, 0)
    length = len(sequence)
    for period in range(1, length + 1):
        start = length - period
        while start > 0 and sequence[start - 1] == sequence[start - 1 + period]:
            start -= 1
        block = sequence[length - period :]
        if NEWLINE in block:
            starts = [i for i in range(start, length) if i == 0 or sequence[i - 1] == NEWLINE]
            if not starts:
                continue
            start = starts[0]
        copies, rest = divmod(length - start, period)
        if not rest and copies >= least and {"word", "number", "string"} & set(block):
            best = max(best, (copies * period, -period, copies))
    return (sequence[length + best[1] :], best[2]) if best[2] else ((), 0)


@given(st.lists(st.sampled_from(["word", "if", NEWLINE]), max_size=24), st.integers(2, 3))
@settings(deadline=None, max_examples=300)
@example(["word", NEWLINE] * 6, 2)
@example(["if", "word", "word", NEWLINE, "word", "word", NEWLINE], 2)
@example([")", ")", ")"], 2)
def test_copies_beside_brute_force(sequence: list[str], least: int) -> None:
    assert repeated(sequence, least) == slowly_repeated(sequence, least)


def test_nothing_that_repeats_nothing_changes() -> None:
    for text in ("", "x = 1\n", "def f(a):\n    return a\n", ARM.format(1, "a")):
        assert penalties(text) == {}


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_a_chain_is_damped_the_more_the_longer_it_is(copies: int) -> None:
    """Whatever its arms say. Other keywords are as they were."""
    chain = "".join(ARM.format(i * 7, "abc"[: i % 3]) for i in range(copies))
    taken = penalties("if x:\n    y\n" + chain)
    assert set(taken) == {b"elif", b" elif"}
    assert list(taken.values()) == pytest.approx([2.0 * math.log(1 + copies)] * 2, abs=1e-5)
    assert penalties(chain, count=copies + 1) == {}


def test_only_where_another_copy_would_begin() -> None:
    chain = ARM.format(1, 2) * 3
    for cut in range(1, len(ARM.format(1, 2))):
        assert penalties(chain[:-cut]) == {}, chain[:-cut]
    assert penalties(chain + "el") == {}


def test_the_same_letters_in_other_classes_are_no_copy() -> None:
    assert penalties("f(a, b)\nf(c, d)\n") != {}
    assert penalties("f(a, b)\nf('c', d)\n") == {}


def test_behind_a_word_only_a_space_opens_another() -> None:
    """One line's blocks have no line to begin behind."""
    taken = penalties("1 x 1 x")
    assert b" 1" in taken
    assert b"1" not in taken
    assert b"1" in penalties("1, 1,")


def test_masks_stay_and_windows_are_windows() -> None:
    rule = RpgRule.from_options(RpgOptions(window=60), BYTES)
    logits = torch.full((2, BYTES.size), -torch.inf)
    logits[:, 2] = 1.0
    rule.apply(logits, [row(ARM.format(1, 2) * 3), row("x = 1\n")])
    assert torch.isfinite(logits).sum() == 2
    seen = torch.zeros(1, BYTES.size)
    rule.apply(seen, [row(ARM.format(1, 2) * 9)])
    # Two whole copies are in the last 60 characters.
    assert seen[0, 0].item() == pytest.approx(-2.0 * math.log(3), abs=1e-5)


def test_code_in_fences() -> None:
    chain = ARM.format(1, 2) * 3
    assert open_code("a ``` b ```") is None
    assert penalties("Here it is:\n```python\n" + chain) != {}
    assert penalties("```python\n" + chain + "```\n" + chain) == {}


@pytest.mark.parametrize(
    "given", [{"rpg": 0.0}, {"rpg": -1.0}, {"rpg": 1.0, "rpg_count": 1}, {"rpg_count": 2}]
)
def test_params_that_make_no_sense(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RpgParams(**given)
    assert RpgRule.problem(RpgOptions(), RpgParams(rpg=1.0), ASKED) is None
