# SPDX-License-Identifier: Apache-2.0
"""Patterns that strict lets through, beside Python's ``re``: all short strings that xgrammar takes are matched."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("xgrammar")

import xgrammar

from vllm_ext.samplers.strict_pattern import pattern_problem

LONGEST = 7
BYTES = [bytes([byte]) for byte in range(256)]
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*BYTES, b""], xgrammar.VocabType.RAW, stop_token_ids=[256]), cache_enabled=False
)


def matcher_of(pattern: str) -> Any:
    """Of xgrammar's, behind the quote that begins a string."""
    compiled = COMPILER.compile_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    matcher = xgrammar.GrammarMatcher(compiled)
    assert matcher.accept_string('"')
    return matcher


def takes(pattern: str, text: str | bytes) -> bool:
    matcher = matcher_of(pattern)
    return bool(matcher.accept_string(text) and matcher.accept_string('"') and matcher.accept_token(256))


def too_much(pattern: str, alphabet: str = "ab") -> str | None:
    """A string that xgrammar takes and the pattern does not match."""
    matcher, wanted = matcher_of(pattern), re.compile(pattern)

    def search(text: str) -> str | None:
        if matcher.accept_string('"'):
            matcher.rollback(1)
            if not wanted.search(text):
                return text
        for character in alphabet if len(text) < LONGEST else "":
            if matcher.accept_string(character):
                found = search(text + character)
                matcher.rollback(1)
                if found is not None:
                    return found
        return None

    return search("")


counts = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{1,}", "{2,}", "{0}", "{3}"])
atoms = st.sampled_from(["a", "b", "[ab]", r"\w", "a", "b"])


def sequences(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.tuples(inner, counts).map("".join)
    return st.lists(items, min_size=1, max_size=3).map("".join)


def groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    choices = st.lists(sequences(inner), min_size=1, max_size=3).map("|".join)
    return st.tuples(st.sampled_from(["(", "(?:"]), choices, st.just(")")).map("".join)


patterns = sequences(st.recursive(atoms, groups, max_leaves=6)).map("^({})$".format)


@settings(deadline=None, max_examples=400)
@given(patterns)
def test_what_passes_is_read_no_wider(pattern: str) -> None:
    if pattern_problem(pattern) is None:
        assert too_much(pattern) is None


# Without the refusal: what xgrammar takes of each of these.
ASTRAY = {
    "^(ab+)?$": "b",
    "^(a{2,})?$": "a",
    "^(b{2,3})?a$": "ba",
    "^(?:a|a{1,3})$": "aaaa",
    "^(?:a|a(|b*[ab]{2}))$": "aaaaa",
    "^b+(?:b{1,}a{0,2}){2,}a$": None,
    "^a|0{0,150}/b$": None,
    "a$b": "ab",
    "x(a|^b)": "xb",
    "^(?=a)b": "b",
    r"^\S$": "\u00a0",
    r"^\W$": "\u00e9",
    "^[^a]{1,200}$": '"',
    "^.{0,200}$": "\\",
    '^"$': '"',
    r"^\\d$": r"\d",
    "^\u00e9[^a]$": '\u00e9"',
}


@pytest.mark.parametrize(("pattern", "taken"), ASTRAY.items())
def test_what_xgrammar_reads_wider_is_refused(pattern: str, taken: str | None) -> None:
    assert pattern_problem(pattern)
    if taken is not None:  # xgrammar is still so; a refusal that is needed no more fails here
        assert takes(pattern, taken)
        assert any(sign in taken for sign in '"\\') or not re.search(pattern, taken)


def test_bytes_that_are_no_utf_8_are_taken_for_a_character() -> None:
    no_character = b"\xe0\x87\xac"
    assert takes("^[^a]$", no_character)
    assert len(no_character.decode(errors="replace")) == 3
    assert pattern_problem("^[^a]$")
    assert pattern_problem("^.{1,3}$")
    assert pattern_problem("^[^a]+.*[^b]{2,}$") is None


@pytest.mark.parametrize(("least", "most"), [(1, 128), (1, 129), (130, 255), (200, None)])
def test_counts_above_128(least: int, most: int | None) -> None:
    pattern = f"^[a-z0-9_-]{{{least},{'' if most is None else most}}}$"
    assert pattern_problem(pattern) is None
    for length in {0, 1, least - 1, least, least + 1, (most or 300) - 1, most or 300, (most or 300) + 1}:
        assert takes(pattern, "a" * length) == (re.search(pattern, "a" * length) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^$",
        "^.*$",
        "^pkg:",
        "^[A-Fa-f\\d]{24}$",
        "^[a-f0-9]{8}-[a-f0-9]{4}-[1-5][a-f0-9]{3}-[89ab][a-f0-9]{3}-[a-f0-9]{12}$",
        "^[0-9]{5}(-[0-9]{4})?$",
        "^in$|^out$",
        "^(nunjucks|jinja2|python|command)$",
        r"^[\w\.:-]+$",
        r"^PUBMED:\{d}",
        "^/?([^/]+/)*[^/]+/?$",
    ],
)
def test_common_patterns_pass(pattern: str) -> None:
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a{", "counts nothing"),
        ("a)", "not opened"),
        ("(a", "not closed"),
        ("a**", "behind another"),
        ("a{2}{3}", "behind another"),
        ("[a", "read alike"),
        ("[[a]]", "read alike"),
        ("(?i)a", "does not have"),
        (r"\bword", "does not have"),
        (r"[^\s]+", "does not have"),
        ("[z-a]", "ends before it begins"),
        ("*a", "Python cannot read"),
        ("(a{100}){600}", "gives up"),
        ("a\n", "printable ASCII"),
    ],
)
def test_refusals_say_why(pattern: str, says: str) -> None:
    assert says in str(pattern_problem(pattern))
