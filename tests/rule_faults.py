# SPDX-License-Identifier: Apache-2.0
"""Rules that raise, in an engine: at the start of an answer, in the middle, in a row behind drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import own_prompts

START, MIDDLE, TREE = "start", "middle", "tree"
WHERE = pytest.mark.parametrize("where", [START, pytest.param(MIDDLE, marks=pytest.mark.slow), TREE])


def rule_processor(worker: Any) -> Any:
    """The worker's one processor of rules, on either runner."""
    runner = worker.model_runner
    on_v2 = hasattr(runner, "req_states")
    found = runner.sampler.logits_processors if on_v2 else runner.input_batch.logitsprocs.all
    (processor,) = [each for each in found if hasattr(each, "_rules")]
    return processor


def break_rule(worker: Any, name: str, prompt: list[int], where: str, hook: str) -> None:
    """Let a rule raise for the request with a prompt."""
    processor = rule_processor(worker)
    rule = processor._rules[name]
    right = getattr(rule, hook)

    def outputs() -> list[Any]:
        """What has been put out, as V2's host knows it."""
        return [each.output for each in processor._requests.values() if each.prompt == prompt]

    def is_it(row: Any) -> bool:
        if list(row.prompt) != prompt:
            return False
        if where == START:
            return True
        if where == MIDDLE:
            return len(row.output) >= 2
        if hasattr(worker.model_runner, "req_states"):  # V2's rows have outputs of their own
            return all(len(output) < len(row.output) for output in outputs())
        # A row behind drafts has an output that the walk down its tree has made longer.
        grown = worker.model_runner.rejection_sampler.row_states._grown
        return any(output is row.output for output, _ in grown.values())

    def raising(*arguments: Any) -> Any:
        rows = arguments[-1] if isinstance(arguments[-1], list) else [arguments[-1]]
        if any(map(is_it, rows)):
            raise RuntimeError("out of order " + "!" * 1000)
        return right(*arguments)

    setattr(rule, hook, raising)


def mend_rule(worker: Any, name: str, hook: str) -> None:
    delattr(rule_processor(worker)._rules[name], hook)


def tokens_of(llm: Any, count: int) -> list[list[int]]:
    return [llm.get_tokenizer().encode(text) for text in own_prompts()[:count]]


def generate(llm: Any, given: Sequence[Any], prompts: list[list[int]]) -> list[Any]:
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts],
        [each.clone() for each in given],
        use_tqdm=False,
    )
    return [output.outputs[0] for output in outputs]


def check_that_one_request_ends(
    llm: Any, name: str, params: Callable[[int], Any], free: Any, where: str, prompts: list[list[int]]
) -> None:
    """Of three requests, two of them under the rule, the first one ends with an error and the others are as ever.

    Args:
        llm: the engine.
        name: of the rule.
        params: of a request under it, by the index of its prompt.
        free: of one that is under none.
        where: the rule raises.
        prompts: of the three.
    """
    given = [params(0), params(1), free]
    right = generate(llm, given, prompts)
    # A rule that learns goes on from there.
    llm.collective_rpc(break_rule, args=(name, prompts[0], where, "apply"))
    try:
        broken = generate(llm, given, prompts)
    finally:
        llm.collective_rpc(mend_rule, args=(name, "apply"))
    ended, *others = broken
    assert ended.finish_reason == "error", (name, where, ended)
    assert f"rule '{name}' failed: RuntimeError: out of order" in ended.stop_reason
    assert len(ended.stop_reason) < 300
    num_kept = len(ended.token_ids)
    assert num_kept == {START: 0, MIDDLE: 2}.get(where, num_kept)
    if name != "asap":  # whose law changes from answer to answer
        assert ended.token_ids == right[0].token_ids[:num_kept]
        assert [each.token_ids for each in others] == [each.token_ids for each in right[1:]]
    assert [each.finish_reason for each in others] != ["error", "error"]
    # And nothing is left behind.
    again = generate(llm, given, prompts)
    assert "error" not in [each.finish_reason for each in again]
    if name != "asap":
        assert [each.token_ids for each in again] == [each.token_ids for each in right]


def check_that_drafts_are_lost(
    llm: Any, name: str, params: Callable[[int], Any], free: Any, prompts: list[list[int]]
) -> None:
    """A rule that raises for a draft costs that request its draft."""
    given = [params(0), params(1), free]
    right = generate(llm, given, prompts)
    llm.collective_rpc(break_rule, args=(name, prompts[0], START, "constraint"))
    try:
        broken = generate(llm, given, prompts)
    finally:
        llm.collective_rpc(mend_rule, args=(name, "constraint"))
    assert [each.finish_reason for each in broken] == [each.finish_reason for each in right]
    if name != "asap":
        assert [each.token_ids for each in broken] == [each.token_ids for each in right]
