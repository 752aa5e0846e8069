# SPDX-License-Identifier: Apache-2.0
"""JSON that ends on vLLM's V2 runner: bounded whitespace, and rule close_by_max_tokens, next to trees and without."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, v2_engine, v2_engine_ahead
from helpers import assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext.samplers.grammar import Grammars

pytestmark = pytest.mark.v2

WORD = {"type": "string", "minLength": 3}
RECORD = {"type": "object", "properties": {"name": WORD, "ship": WORD}, "required": ["name", "ship"]}
BITS = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 3}
CLOSING = {"close_by_max_tokens": True}
OPTIONS: dict[str, Any] = {
    "structured_outputs_config": {"backend": "xgrammar"},
    "additional_config": {"vllm_ext": {"structured_outputs": {}, "rules": {"close_by_max_tokens": {}}}},
}


@pytest.fixture(scope="module")
def plain(v2_dir: str, v2_plain: Any) -> Any:
    return v2_engine(v2_dir, **OPTIONS)


@pytest.fixture(scope="module", params=["device", "host", "ahead"])
def trees(request: pytest.FixtureRequest, v2_dir: str, plain: Any) -> Any:
    if request.param == "ahead":
        return v2_engine_ahead(v2_dir, V2_METHOD, **OPTIONS)
    return v2_engine(v2_dir, V2_METHOD if request.param == "device" else V2_HOST_METHOD, **OPTIONS)


def under(constraint: dict[str, Any], **values: Any) -> Any:
    return sampling(
        **{"ignore_eos": False, **values, "structured_outputs": StructuredOutputsParams(**constraint)}
    )


def test_answers_are_whole(plain: Any, trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, seeded, with penalties. No rule compiles a grammar; requests without the rule are cut."""
    monkeypatch.setattr(Grammars, "_make", None)
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2, "seed": 3},
        {"repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    ]
    kinds = [
        under({"json": RECORD}, max_tokens=40, extra_args=extra, **each)
        for each in samplings
        for extra in (CLOSING, None)
    ]
    kinds += [
        under({"regex": r"\[(1,)+\]"}, max_tokens=9, extra_args=CLOSING),
        under({"choice": ["a rather long answer", "no"]}, max_tokens=4, extra_args=CLOSING),
        sampling(),
    ]
    texts = prompts(len(kinds), seed=20)
    before = counters(trees)["spec_accepted_tokens"]
    expected, actual = generate(plain, texts, kinds), generate(trees, texts, kinds)
    assert_same_outputs(tokens(expected), tokens(actual))
    assert counters(trees)["spec_accepted_tokens"] > before
    for each in actual[:8:2]:
        assert json.loads(each.text).keys() >= {"name", "ship"}
    assert not all(each.text.endswith("}") for each in actual[1:8:2])
    assert re.fullmatch(r"\[(1,)+\]", actual[8].text)
    assert actual[9].text == "no"


def test_what_cannot_fit_ends_alone(plain: Any, trees: Any) -> None:
    kinds = [under({"json": RECORD}, max_tokens=4, extra_args=CLOSING), sampling()]
    for llm in (plain, trees):
        too_few, other = generate(llm, prompts(2, seed=20), kinds)
        assert too_few.finish_reason == "error"
        assert "no ending of this grammar fits in max_tokens=4" in too_few.stop_reason
        assert other.finish_reason == "length"


def test_whitespace_ends(plain: Any, trees: Any) -> None:
    tokenizer = plain.get_tokenizer()
    likes = {token: 30.0 for token in range(1024) if not tokenizer.decode([token]).strip()}
    cases: list[dict[str, Any]] = [
        {"max_whitespace": 2},
        {"max_whitespace": 1},
        {},
        {"max_whitespace": 3, **CLOSING},
    ]
    kinds = [
        under({"json": BITS}, max_tokens=60, logit_bias=likes, extra_args=extra or None) for extra in cases
    ]
    texts = prompts(len(kinds), seed=21)
    expected, actual = generate(plain, texts, kinds), generate(trees, texts, kinds)
    assert_same_outputs(tokens(expected), tokens(actual))
    runs = [max(map(len, re.findall(r"\s+", each.text)), default=0) for each in actual]
    assert runs[:2] == [2, 1]
    assert runs[2] > 40
    assert runs[3] == 3
    assert len(json.loads(actual[3].text)) >= 3
