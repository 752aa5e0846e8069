# SPDX-License-Identifier: Apache-2.0
"""Bounded whitespace in JSON next to trees: the tokens that it gives without speculation (float32)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {
        "ready": {"type": "boolean"},
        "ratings": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 3},
    },
    "required": ["ready", "ratings"],
}
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</f>",
}
# No string is in any of them, so that all whitespace is between the parts.
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json": json.dumps(SCHEMA)},
    {"json": SCHEMA},
    {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})},
)
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
OPTIONS: dict[str, Any] = {
    "structured_outputs_config": {"backend": "xgrammar"},
    "additional_config": {
        "vllm_ext": {
            "structured_outputs": {"max_whitespace": 2},
            "rules": {"close_by_max_tokens": {}},
        }
    },
}
METHOD = {"method": "hybrid", "num_speculative_tokens": 12, "budget": "fixed"}


@pytest.fixture(scope="module")
def plain(slice_dir: str) -> Iterator[Any]:
    yield from engine(slice_dir, **OPTIONS)


@pytest.fixture(scope="module")
def trees(slice_dir: str) -> Iterator[Any]:
    yield from engine(slice_dir, METHOD, **OPTIONS)


def ask(llm: Any, given: list[SamplingParams]) -> list[Any]:
    messages = [[{"role": "user", "content": own_prompts()[i % 8]}] for i in range(len(given))]
    outputs = llm.chat(messages, given, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def asking(llm: Any, constraint: dict[str, Any], most: Any = None, **values: Any) -> SamplingParams:
    """A request whose model would rather put out whitespace than anything else."""
    tokenizer = llm.get_tokenizer()
    likes = {token: 30.0 for token in range(1024) if not tokenizer.decode([token]).strip()}
    extra = {**({} if most is None else {"max_whitespace": most}), **values.pop("extra", {})}
    return SamplingParams(
        **{"max_tokens": 120, "logit_bias": likes, **values},
        structured_outputs=StructuredOutputsParams(**constraint),
        extra_args=extra or None,
    )


def longest(text: str) -> int:
    """Whitespace characters in a row."""
    return max(map(len, re.findall(r"\s+", text)), default=0)


def check_same(plain: Any, trees: Any, given: list[SamplingParams]) -> list[str]:
    expected, actual = ask(plain, given), ask(trees, given)
    assert_same_outputs([o.token_ids for o in expected], [o.token_ids for o in actual])
    (counters,) = trees.collective_rpc("vllm_ext_counters")
    assert counters["spec_accepted_tokens"] > 0
    assert counters["fallbacks:proposer_error"] == 0
    return [output.text for output in actual]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_runs_end(plain: Any, trees: Any, sampling: dict[str, Any]) -> None:
    """The server's bound, a request's own, and none, in one batch."""
    cases = [(each, most) for each in CONSTRAINTS for most in (None, 1, 4, -1)]
    texts = check_same(plain, trees, [asking(plain, *case, **sampling) for case in cases])
    for (constraint, most), text in zip(cases, texts, strict=True):
        if most == -1:
            assert longest(text) > 40
            continue
        assert longest(text) == (2 if most is None else most), text
        value = json.loads(text.removeprefix("<f>").removesuffix("</f>"))
        assert value.keys() == {"ready", "ratings"}, constraint


def test_answers_end_too(plain: Any, trees: Any) -> None:
    """The rule that closes knows that it is JSON; few tokens are left, and whitespace is cheap."""
    closing = {"close_by_max_tokens": True}
    given = [
        asking(plain, CONSTRAINTS[0], most, max_tokens=32, extra=extra, **sampling)
        for sampling in (GREEDY, SEEDED)
        for most in (2, 5)
        for extra in (closing, {})
    ]
    texts = check_same(plain, trees, given)
    for text, asked in zip(texts, given, strict=True):
        if "close_by_max_tokens" in asked.extra_args:
            assert json.loads(text).keys() == {"ready", "ratings"}
    assert not all(text.endswith("}") for text in texts)


def test_other_requests_are_as_before(plain: Any, trees: Any) -> None:
    """Words with spaces, and no constraint at all."""
    words = asking(plain, {"regex": "( {3,5}a){4}"}, **GREEDY)
    free = SamplingParams(max_tokens=12, **GREEDY)
    assert check_same(plain, trees, [words, free])[0] == ("     a" * 4)


def test_a_request_keeps_its_parameters(plain: Any) -> None:
    given = asking(plain, CONSTRAINTS[0], **GREEDY)
    first, again = (ask(plain, [given])[0].text for _ in range(2))
    assert first == again
    assert given.structured_outputs.json == CONSTRAINTS[0]["json"]
    for most in (0, "2", 1001):
        with pytest.raises(VLLMValidationError, match="vllm_xargs: max_whitespace="):
            ask(plain, [asking(plain, CONSTRAINTS[0], most, **GREEDY)])
