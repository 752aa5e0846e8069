# SPDX-License-Identifier: Apache-2.0
"""Structured output next to trees: the tokens that plain vLLM puts out under the same grammar (float32)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "occupation": {"enum": ["engineer", "physician", "professor", "pirate"]},
        "ratings": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
        "occupation_since": {"type": "integer"},
    },
    "required": ["name", "occupation", "ratings", "occupation_since"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= sentence+
sentence ::= subject " " verb " " object ".\\n"
subject ::= "The " animal
object ::= "the " animal | "the " animal " and the " animal
animal ::= "cat" | "dog" | "horse" | "elephant"
verb ::= "sees" | "follows" | "remembers"
"""
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": json.dumps(SCHEMA)},
    "json_object": {"json_object": True},
    "regex": {"regex": r"(Monday|Tuesday|Wednesday)(, (Thursday|Friday|Saturday|Sunday)){3,6}\."},
    # Found: alternatives begin with the same half of a character.
    "script": {"regex": r"(белый|зелёный|красный)( (белый|зелёный|красный)){7}"},
    "choice": {"choice": ["a rather long answer", "another rather long answer", "no"]},
    "grammar": {"grammar": GRAMMAR},
}
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
SAMPLING: tuple[dict[str, Any], ...] = (
    GREEDY,
    SEEDED,
    {**GREEDY, "repetition_penalty": 1.2},
    {**SEEDED, "top_p": 0.9, "n": 2},
    {**GREEDY, "logprobs": 2},
)


def params(constraint: dict[str, Any] | None, sampling: dict[str, Any]) -> SamplingParams:
    structured = None if constraint is None else StructuredOutputsParams(**constraint)
    return SamplingParams(max_tokens=48, structured_outputs=structured, **sampling)


def ask(llm: Any, given: list[SamplingParams]) -> list[Any]:
    messages = [[{"role": "user", "content": own_prompts()[i % 8]}] for i in range(len(given))]
    outputs = llm.chat(messages, [each.clone() for each in given], use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def counters(llm: Any) -> dict[str, int]:
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result


def forget_masks(worker: Any) -> None:
    """The mutation: rows behind drafts are not masked."""
    worker.model_runner.drafter.constraints.masks = lambda *args: None


def remember_masks(worker: Any) -> None:
    del worker.model_runner.drafter.constraints.masks


def check_same(plain: Any, llm: Any, given: list[SamplingParams]) -> None:
    before = counters(llm)
    expected, actual = ask(plain, given), ask(llm, given)
    assert_same_outputs([o.token_ids for o in expected], [o.token_ids for o in actual])
    assert [o.text for o in expected] == [o.text for o in actual]
    alone = ask(llm, given[:1])
    assert_same_outputs([expected[0].token_ids], [alone[0].token_ids])
    assert counters(llm)["fallbacks:proposer_error"] == before["fallbacks:proposer_error"]


# The others are in one batch below.
ALONE = {"json", "script"}


@pytest.mark.parametrize(
    "name", [name if name in ALONE else pytest.param(name, marks=pytest.mark.slow) for name in CONSTRAINTS]
)
def test_same_as_plain(plain_llm: Any, tested_llm: Any, name: str) -> None:
    """One constraint under all kinds of sampling, beside a free request; then a request alone."""
    given = [params(CONSTRAINTS[name], sampling) for sampling in SAMPLING] + [params(None, GREEDY)]
    check_same(plain_llm, tested_llm, given)


def test_all_constraints_in_one_batch(plain_llm: Any, hybrid_llm: Any) -> None:
    given = [params(constraint, GREEDY) for constraint in (None, *CONSTRAINTS.values())]
    check_same(plain_llm, hybrid_llm, given)


def num_forced(tokenizer: Any, tokens: list[int]) -> int:
    """How many of an answer's tokens the schema alone demands, but for its first.

    Under a mask a model may spell a name with other tokens than the tokenizer does; those nobody can foresee.
    """
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer))
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(SCHEMA)))
    found = 0
    for token in tokens:
        demanded = tokenizer.encode(matcher.find_jump_forward_string(), add_special_tokens=False)
        found += demanded[:1] == [token]
        if token == tokenizer.eos_token_id:
            break
        assert matcher.accept_token(token)
    return found - 1  # "{", of the step that has no draft


def test_drafts_are_legal_and_accepted(plain_llm: Any, tested_llm: Any, drafts_by_model: bool) -> None:
    given = [params(CONSTRAINTS["json"], GREEDY)] * 4
    expected = ask(plain_llm, given)
    before = counters(tested_llm)
    assert_same_outputs([o.token_ids for o in expected], [o.token_ids for o in ask(tested_llm, given)])
    new = {key: value - before[key] for key, value in counters(tested_llm).items()}
    for output in expected:
        assert output.finish_reason != "stop" or set(json.loads(output.text)) == {
            "name",
            "occupation",
            "ratings",
            "occupation_since",
        }
    assert (new["fallbacks:structured_output_chain"] > 0) == drafts_by_model
    if drafts_by_model:
        return  # the core masks its chains
    # Names of properties are forced, whatever a drafter knows. A step may end inside one.
    forced = sum(num_forced(plain_llm.get_tokenizer(), list(output.token_ids)) for output in expected)
    assert forced > 0.1 * new["spec_emitted_tokens"]
    assert new["spec_accepted_tokens"] >= 0.9 * forced
    tested_llm.collective_rpc(forget_masks)
    try:
        assert [o.token_ids for o in expected] != [o.token_ids for o in ask(tested_llm, given)]
    finally:
        tested_llm.collective_rpc(remember_masks)
