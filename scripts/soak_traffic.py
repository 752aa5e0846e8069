# SPDX-License-Identifier: Apache-2.0
"""The requests of scripts/soak.py: what users send, drawn at random, and how each may end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PASSAGE = "The treaty was signed in Lisbon on 13 December 2007. It came into force two years later, in 2009."


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: str
    body: dict[str, Any]
    status: int = 200  # that it must get
    abort_after: int | None = None  # close the connection behind so many pieces


def _chat(prompt: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 48, "temperature": 0, **more}


def _rules(prompt: str, max_tokens: int = 24, **xargs: Any) -> dict[str, Any]:
    return _chat(prompt, max_tokens=max_tokens, vllm_xargs=xargs)


# By kind: from a source of chance and a prompt to the body.
KINDS: dict[str, Callable[[random.Random, str], dict[str, Any]]] = {
    "greedy": lambda chance, prompt: _chat(prompt),
    "seeded": lambda chance, prompt: _chat(
        prompt, temperature=0.9, top_p=0.9, top_k=40, seed=chance.randrange(1000)
    ),
    "drawn": lambda chance, prompt: _chat(prompt, temperature=1.0, min_p=0.05, n=2),
    "penalties": lambda chance, prompt: _chat(
        prompt,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        bad_words=[" the", "and a"],
    ),
    "options": lambda chance, prompt: _chat(
        prompt, logit_bias={str(chance.randrange(40, 4000)): 3.0}, min_tokens=8, logprobs=True, top_logprobs=3
    ),
    "stop": lambda chance, prompt: _chat(prompt, stop=[".", "\n\n"], include_stop_str_in_output=True),
    "long": lambda chance, prompt: _chat(
        f"{prompt}\n\n" * chance.randrange(2, 12) + "Summarise.", max_tokens=16
    ),
    "schema": lambda chance, prompt: _chat(
        "Describe a person as JSON.",
        temperature=1.0,
        seed=chance.randrange(1000),
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    ),
    "regex": lambda chance, prompt: _chat(
        prompt, structured_outputs={"regex": "(белый|красный|yes|no){1,6}"}
    ),
    "trie": lambda chance, prompt: _rules("Name an animal.", trie="pets"),
    "extract": lambda chance, prompt: _rules(f"{PASSAGE} Where was it signed?", extract=PASSAGE),
    "rpg": lambda chance, prompt: _rules(prompt, rpg=2.0),
    "awrs": lambda chance, prompt: _chat(
        prompt,
        temperature=1.0,
        seed=3,
        max_tokens=12,
        vllm_xargs={"awrs_regex": "(yes|no), because [a-z ]{1,40}"},
    ),
    "asap": lambda chance, prompt: _chat(
        prompt,
        temperature=1.0,
        seed=chance.randrange(9),
        max_tokens=12,
        vllm_xargs={"asap_regex": "[a-z ]{1,60}"},
    ),
    "dola": lambda chance, prompt: _rules(prompt, dola=True),
    "cad": lambda chance, prompt: _rules(f"{PASSAGE} When?", cad_context=PASSAGE),
}
# What is refused, and may hurt nobody.
REFUSED: tuple[dict[str, Any], ...] = (
    {"vllm_xargs": {"trie": "no such set"}},
    {"vllm_xargs": {"extract": "x" * 200_000}},
    {"vllm_xargs": {"awrs_json": "{"}},
    {"vllm_xargs": {"rpg": "many"}},
    {"structured_outputs": {"regex": "("}},
    {"temperature": -1},
    {"max_tokens": -5},
)


def draw(chance: random.Random, prompts: list[str]) -> Ask:
    """The next request: one in twelve is refused, one in six of the others is given up in the middle."""
    prompt = chance.choice(prompts)
    if chance.random() < 1 / 12:
        return Ask("refused", _chat(prompt) | chance.choice(REFUSED), status=400)
    kind = chance.choice(list(KINDS))
    after = chance.randrange(1, 8) if chance.random() < 1 / 6 else None
    return Ask(kind, KINDS[kind](chance, prompt), abort_after=after)
