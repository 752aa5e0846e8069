# SPDX-License-Identifier: Apache-2.0
"""Rule close_by_max_tokens on a toy vocabulary: whatever a model would say, its answer is whole within its tokens."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ASKED

from vllm_ext.samplers.base import Row, text_of
from vllm_ext.samplers.close_by_max_tokens import CloseByMaxTokens, CloseOptions, CloseParams
from vllm_ext.samplers.grammar import Grammars
from vllm_ext.samplers.json_place import Place
from vllm_ext.samplers.shortest_ending import Endings

CHARACTERS = [*'{}[]":,.-+\\/_ \n', *"0123456789", *"abcdefghijklmnopqrstuvwxyzABCDEF"]
PAIRS = ['":', '",', '"}', "}}", "],", '{"', '["', '""', "true", "false", "null", "name", "abc", "  ", "10"]


class Toy:
    """Characters, and some pieces of JSON; the end."""

    pieces = (b"", *(each.encode() for each in [*CHARACTERS, *PAIRS]))
    size = len(pieces)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(each.encode()) for each in text]


END, TOY = 0, Toy()
NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "a": {"type": "object", "properties": {"b": {"type": "integer", "minimum": 5}}, "required": ["b"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        "code": {"type": "string", "pattern": "^[A-F0-9]{4}-[a-z]+$"},
        "kind": {"enum": ["one", "other", "null"]},
    },
    "required": ["name", "list", "kind"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[Any, str, Any, int]] = {
    # Kind, source, what a whole answer passes, tokens of the shortest one.
    "any object": ("json", '{"type": "object"}', json.loads, 2),
    "nested": ("json", json.dumps(NESTED), json.loads, 29),
    "list of numbers": (
        "json",
        '{"type": "array", "items": {"type": "number"}, "minItems": 3}',
        json.loads,
        7,
    ),
    "regex": ("regex", "(abc)+-[0-9]{3}", re.compile("(abc)+-[0-9]{3}").fullmatch, 5),
    "words": ("regex", "[a-z]{4,}( [a-z]{2,})+", re.compile("[a-z]{4,}( [a-z]{2,})+").fullmatch, 7),
    "a long way": ("regex", "name|[b-d]{40}", re.compile("name|[b-d]{40}").fullmatch, 1),
    "choice": ("regex", "name of it|true", re.compile("name of it|true").fullmatch, 1),
    "grammar": (
        "grammar",
        'root ::= "(" root ")" | "ab"',
        lambda text: text.count("(") == text.count(")"),
        2,
    ),
}
GRAMMARS["grammar"] = (
    "grammar",
    'root ::= "[" root "]" | "ab"',
    lambda text: text.count("[") == text.count("]") and "ab" in text,
    2,
)
# The same as a server with `max_whitespace` has it.
GRAMMARS["bounded"] = (
    "structural_tag",
    '{"type": "structural_tag", "format": {"type": "json_schema", "max_whitespace_cnt": 2, "json_schema": '
    f"{json.dumps(NESTED)}}}}}",
    json.loads,
    29,
)
grammars = Grammars(TOY)


def rule(**options: Any) -> CloseByMaxTokens:
    return CloseByMaxTokens.from_options(CloseOptions(**options), TOY)


def row(output: list[int], kind: Any, source: str, max_tokens: int, **asked: Any) -> Row:
    given = replace(ASKED, structured=True, grammar=(kind, source), max_tokens=max_tokens, **asked)
    return Row([1], output, END, CloseParams(), given)


def answer(
    closing: CloseByMaxTokens | None, name: str, max_tokens: int, seed: int, temperature: float
) -> list[int]:
    """As an engine would have it: the grammar's mask, the rule, a token of what is left."""
    kind, source, _, _ = GRAMMARS[name]
    draw = np.random.default_rng(seed)
    output: list[int] = []
    kept: dict[int, Any] = {}
    while len(output) < max_tokens and END not in output:
        logits = torch.from_numpy(draw.normal(0, 3, TOY.size)).float()
        behind = grammars.behind(kind, source, END, output)
        assert behind is not None
        allowed = torch.from_numpy(behind.allowed().astype(np.int64))
        masked = torch.full_like(logits, -torch.inf)
        masked[allowed] = logits[allowed]
        if closing is not None:
            here = replace(row(output, kind, source, max_tokens, temperature=temperature), kept=kept)
            closing.apply(masked[None], [here])
            assert not closing.waiting
        if temperature:
            p = (masked / temperature).softmax(0).double().numpy()
            output.append(int(draw.choice(TOY.size, p=p / p.sum())))
        else:
            output.append(int(masked.argmax()))
    return output


def whole(name: str, output: list[int]) -> bool:
    text = text_of(TOY, [token for token in output if token != END]).decode()
    try:
        return bool(GRAMMARS[name][2](text) is not False and GRAMMARS[name][2](text) is not None)
    except json.JSONDecodeError:
        return False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_an_answer_is_whole_in_the_tokens_it_has(name: str, temperature: float) -> None:
    closing, shortest = rule(), GRAMMARS[name][3]
    cut = 0
    for seed, max_tokens in enumerate(
        [shortest, shortest, shortest + 1, shortest + 3, shortest + 9, shortest + 30] * 3
    ):
        output = answer(closing, name, max_tokens, seed, temperature)
        assert whole(name, output), text_of(TOY, output)
        cut += not whole(name, answer(None, name, max_tokens, seed, temperature))
    # Without the rule some are not.
    assert cut > 0


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    kind, source, _, shortest = GRAMMARS[name]
    logits = torch.zeros(1, TOY.size)
    if shortest > 1:
        with pytest.raises(
            ValueError,
            match=rf"no ending of .* fits in max_tokens={shortest - 1}: the shortest .* {shortest} ",
        ):
            rule().apply(logits, [row([], kind, source, shortest - 1)])
    rule().apply(logits, [row([], kind, source, shortest)])


@pytest.mark.parametrize(("name", "begun", "left"), [("grammar", "[", 60), ("regex", "abc", 257)])
def test_far_from_the_limit_nothing_is_tried(name: str, begun: str, left: int) -> None:
    """Where a grammar counts, one token may open more than its text is long."""
    kind, source, _, _ = GRAMMARS[name]
    output = TOY.encode(begun)
    logits = torch.randn(1, TOY.size)
    before = logits.clone()
    rule().apply(logits, [row(output, kind, source, len(output) + left)])
    assert torch.equal(logits, before)


def test_who_is_not_structured_is_no_concern() -> None:
    logits = torch.randn(1, TOY.size)
    before = logits.clone()
    rule().apply(logits, [Row([1], [], END, CloseParams(), replace(ASKED, max_tokens=1))])
    assert torch.equal(logits, before)
    for structured, said in ((True, "knows endings of json"), (False, "is for structured output")):
        asked = replace(ASKED, structured=structured)
        explicit = CloseParams(close_by_max_tokens=True)
        assert said in str(CloseByMaxTokens.problem(CloseOptions(), explicit, asked))
    # A server whose rule is always there takes requests that it is not for.
    assert CloseByMaxTokens.problem(CloseOptions(), CloseParams(), ASKED) is None


def test_rows_are_functions_of_their_texts() -> None:
    """Whatever was asked before, in whatever order."""
    kind, source, _, _ = GRAMMARS["nested"]
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (1, TOY.size))).float()
    text = TOY.encode('{"name":"ab",')
    alone, after = logits.clone(), logits.clone()
    rule().apply(alone, [row(text, kind, source, 40)])
    busy = rule()
    for end in (3, 9, len(text) - 1):
        busy.apply(logits.clone(), [row(text[:end], kind, source, 40)])
    busy.apply(after, [row(text, kind, source, 40)])
    assert torch.equal(alone, after)


@pytest.mark.parametrize(
    ("begun", "ending"),
    [
        ("", '{"name":"aa","list":[true,true],"kind":"one"}'),
        ('{"name":"abc', '","list":[true,true],"kind":"one"}'),
        ('{"name":"ab","a":{', '"b":5},"list":[true,true],"kind":"one"}'),
        ('{"name":"ab","list":[false', ',true],"kind":"one"}'),
    ],
)
def test_the_shortest_ending_of_json(begun: str, ending: str) -> None:
    behind = grammars.behind("json", json.dumps(NESTED), END, TOY.encode(begun))
    assert behind is not None
    found = Endings(TOY).shortest(behind, Place().behind(begun.encode()))
    assert found is not None
    assert text_of(TOY, found).decode() == ending
    # In the fewest tokens that are it, and the grammar is where it was.
    assert len(found) == len(Endings(TOY).spelled(ending.encode()) or ())
    assert (
        text_of(TOY, Endings(TOY).shortest(behind, Place().behind(begun.encode())) or []).decode() == ending
    )


def test_places_in_json() -> None:
    def place(text: str) -> Place:
        return Place().behind(text.encode())

    assert place('{"a": [1, ') == place('{"b": 0, "a": [2, ')
    assert place('{"a": [1, ') != place('{"a": [1, 2, ')
    assert place('{"a": "x') != place('{"a": "x"')
    assert place('{"a": "x", "') != place('{"a": "')
    assert place('{"a": "\\"').in_string
    assert not place('{"a": "\\\\"').in_string
    assert place('{"a": {"b": 1}}') != place('{"a":')
    for cut in range(12):
        assert place('{"a": [1, 2]}'[:cut]).behind('{"a": [1, 2]}'[cut:].encode()) == place('{"a": [1, 2]}')
