# SPDX-License-Identifier: Apache-2.0
"""The prompts of pairs of requests: without a part, with another text instead, and others altogether."""

from __future__ import annotations

import pytest
from helpers import ASKED

from vllm_ext.samplers.cad import CadOptions, CadParams, CadRule
from vllm_ext.samplers.prompt_parts import Prompt, without

PIECES = [
    b"",
    b"Context:",
    b" the",
    b" town",
    b" is",
    b" old",
    b"\n",
    b"Who",
    b"?",
    b"\xc3",
    b"\xa9",
    b" caf",
]


def encode(text: str) -> list[int]:
    """A token a byte, 100 and more."""
    return [100 + byte for byte in text.encode()]


def prompt_of(tokens: list[int]) -> Prompt:
    pieces = [PIECES[token] for token in tokens]
    return Prompt(tokens, pieces, encode, lambda text: [99, *encode(text)] if text.strip() else [])


def text_of(tokens: list[int]) -> bytes:
    return b"".join(PIECES[token] if token < 99 else bytes([token - 100]) for token in tokens)


@pytest.mark.parametrize(
    ("prompt", "context", "rest"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], "the town is old", [0, 1, 6, 7, 8]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], " \nthe town is old  ", [0, 1, 6, 7, 8]),
        ([2, 3, 6, 7, 2, 3, 8], "the town", [6, 7, 8]),  # wherever it is
        ([2, 3, 0, 4, 5, 7], "town is", [2, 0, 5, 7]),  # special tokens stay
        ([7, 2, 3, 8], "e to", [7, 8]),  # all tokens that have a part of it
        ([7, 11, 9, 10, 8], "caf\u00e9", [7, 8]),  # in bytes
    ],
)
def test_the_prompt_without_a_context(prompt: list[int], context: str, rest: list[int]) -> None:
    pair = CadRule.paired_prompt(CadParams(cad_context=context), prompt_of(prompt))
    assert pair.tokens == rest
    assert pair.field == "cad_context"
    kept = [place for place in pair.places if place >= 0]
    assert kept == list(range(len(rest)))
    assert [token for token, place in zip(prompt, pair.places, strict=True) if place >= 0] == rest


@pytest.mark.parametrize(
    ("prompt", "context", "says"),
    [
        ([7, 2, 3, 8], "the village", "cad_context='the village' is not in the prompt"),
        ([2, 3], "the town", "is all of the prompt"),
        ([7, 2, 3, 8], "the village" * 100, r"\.\.\. \(1100 characters\)"),
    ],
)
def test_contexts_that_are_refused(prompt: list[int], context: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CadRule.paired_prompt(CadParams(cad_context=context), prompt_of(prompt))


@pytest.mark.parametrize(
    ("prompt", "context", "negative", "expected"),
    [
        # What the part's first and last token have around it is encoded with what stands there instead.
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], "the town is old", "a b", [0, 1, *encode(" a b"), 6, 7, 8]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], "the town is old\n", "\n a b ", [0, 1, *encode(" a b"), 6, 7, 8]),
        ([7, 2, 3, 8], "e to", "x", [7, *encode(" thxwn"), 8]),
        ([2, 3, 6, 7, 2, 3, 8], "the town", "x", [*encode(" x"), 6, 7, *encode(" x"), 8]),  # wherever it is
        ([2, 3, 2, 3], "town the", "x", [2, *encode(" x"), 3]),
        ([2, 3, 0, 4, 5, 7], "town is", "x", [2, *encode(" x"), 0, 5, 7]),  # special tokens stay, behind it
        ([7, 11, 9, 10, 8], "caf\u00e9", "\u00fc", [7, *encode(" \u00fc"), 8]),
        ([7, 11, 9, 10, 8], "caf", "x", [7, *encode(" x"), 9, 10, 8]),
        ([2, 3], "the town", "x", encode(" x")),  # there may be nothing beside it
        ([2, 3, 6], "the town", " \n", [6]),  # nothing: as without
        ([2, 3, 6], "the town", "", [6]),
    ],
)
def test_another_text_instead_of_a_context(
    prompt: list[int], context: str, negative: str, expected: list[int]
) -> None:
    pair = CadRule.paired_prompt(CadParams(cad_context=context, cad_negative=negative), prompt_of(prompt))
    assert pair.tokens == expected
    if negative.strip():
        assert pair.field == "cad_negative"
        replaced = text_of(prompt).replace(context.strip().encode(), negative.strip().encode())
        assert text_of(pair.tokens) == replaced
    assert len(pair.places) == len(prompt)
    for token, place in zip(prompt, pair.places, strict=True):
        assert place < 0 or pair.tokens[place] == token


def test_a_part_that_begins_within_a_token_of_two_characters() -> None:
    """Whole characters are encoded: tokens that hold half of one each go along."""
    pieces = [b"a\xc3", b"\xa9b\xc3", b"\xa9c"]
    pair = without(Prompt([1, 2, 3], pieces, encode, encode), "b", "field", "x", "other")
    assert pair.tokens == encode("a\u00e9x\u00e9c")
    assert pair.places == [-1, -1, -1]


@pytest.mark.parametrize(
    ("negative", "expected", "places"),
    [
        ("a b", [99, *encode("a b")], [-1, -1, -1, -1]),
        (" a\n", [99, *encode(" a\n")], [-1, -1, -1, -1]),  # word for word
        ("", [8], [-1, -1, -1, 0]),  # the paper's
    ],
)
def test_a_negative_prompt_alone(negative: str, expected: list[int], places: list[int]) -> None:
    params = CadParams(cad_negative=negative)
    assert CadRule.problem(CadOptions(), params, ASKED) is None
    assert CadRule.paired_prompt(params, prompt_of([7, 2, 3, 8])) == (expected, places, "cad_negative")


def test_negative_prompts_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cad_negative='  ' has no tokens; give other text, or ''"):
        CadRule.paired_prompt(CadParams(cad_negative="  "), prompt_of([7, 8]))
    with pytest.raises(ValueError, match="cad_context='village' is not in the prompt"):
        CadRule.paired_prompt(CadParams(cad_context="village", cad_negative="x"), prompt_of([7, 8]))
    problem = CadRule.problem(CadOptions(), CadParams(cad_context=" ", cad_negative="x"), ASKED)
    assert problem is not None
    assert "leave it out; cad_negative alone is a prompt of its own" in problem


@pytest.mark.parametrize("context", [None, "", "  \n"])
def test_cad_without_a_context_is_refused(context: str | None) -> None:
    problem = CadRule.problem(CadOptions(), CadParams(cad_context=context), ASKED)
    assert problem is not None
    assert f"cad_context={context!r} does not go with cad" in problem
