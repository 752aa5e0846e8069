# SPDX-License-Identifier: Apache-2.0
"""Structured output next to trees on vLLM's V2 runner: the tokens that it puts out under the same grammar without.

Of drafters on the device and on the host. Mutations that these tests were seen to find are named where they are; more
of them in `structured_output/test_known_trees.py`, which starts no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, v2_engine, v2_engine_ahead
from helpers import assert_same_outputs, preemptions
from v2_requests import counters, generate, prompts, sampling, tokens, watch_parents
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext.engine.structured_output.grammar import Grammar, Grammars
from vllm_ext.engine.structured_output.known_trees import KnownTrees

pytestmark = pytest.mark.v2

SCHEMA = {
    "type": "object",
    "properties": {
        "occupation_since": {"type": "integer", "minimum": 1000, "maximum": 1999},
        "occupation": {"enum": ["engineer", "physician", "professor", "pirate"]},
        "ratings": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
    },
    "required": ["occupation_since", "occupation", "ratings"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}},
    "required": ["a"],
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json": json.dumps(SCHEMA)},
    {"json": json.dumps(NESTED)},
    {"regex": r"(Mon|Tues|Wednes)day(, (Thurs|Fri|Satur|Sun)day){3,6}\."},
    {"choice": ["a rather long answer", "another rather long answer", "no"]},
    {"regex": r"[a-d]{30}"},
)
# As one of those is without spaces, which a model of two layers would rather put out.
RECORD = {
    "regex": r'\{"occupation_since": 1[0-9]{3}, "occupation": "(engineer|physician|professor|pirate)", '
    r'"ratings": \[[0-9](, [0-9]){2}\]\}'
}
LETTERS = {"regex": r"([a-f] [0-9]){24}"}
PROSE = {"regex": r"[ -~\n]{90,}"}  # of which a drafter knows something


@pytest.fixture(params=["v2_trees", "v2_host"])
def v2_either(request: pytest.FixtureRequest) -> Any:
    """Drafters that know the answers' words; of a draft model see `test_drafts_of_a_model`."""
    return request.getfixturevalue(request.param)


def under(constraint: dict[str, Any], **values: Any) -> Any:
    return sampling(
        **{
            "max_tokens": 40,
            "ignore_eos": False,
            **values,
            "structured_outputs": StructuredOutputsParams(**constraint),
        }
    )


def without_spaces(llm: Any) -> dict[int, float]:
    """What makes a model of two layers write JSON to its end: a ``logit_bias``."""
    tokenizer = llm.get_tokenizer()
    return {token: -100.0 for token in range(1024) if not tokenizer.decode([token]).strip()}


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def gained(llm: Any, before: dict[str, int]) -> dict[str, int]:
    return {name: total - before[name] for name, total in counters(llm).items()}


def watch_paths(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Of each structured request in each step from now on, its rows' parents, and the rows of the accepted path."""
    runner, seen = runner_of(llm), list[tuple[list[int], list[int]]]()
    sample = runner.sample

    def watching(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        result = sample(hidden_states, input_batch, grammar_output)
        if input_batch.num_draft_tokens and grammar_output is not None:
            walked, start = runner.rejection_sampler.walked, input_batch.cu_num_logits_np
            for name in grammar_output.structured_output_request_ids:
                place = input_batch.req_ids.index(name)
                rows = runner.speculator.layout.parents[start[place] : start[place + 1]].tolist()
                seen.append((rows, walked.path[place, : int(walked.num_emitted[place])].tolist()))
        return result

    monkeypatch.setattr(runner, "sample", watching)
    return seen


def off_the_first_branch(parents: list[int], path: list[int]) -> bool:
    """Whether a node was accepted that has an earlier sibling."""
    return any(parents[row] in parents[1:row] for row in path[1:])


def masks_of_the_flat_list(self: Any, known: Any, count: int) -> Any:
    """The mutation: the masks that vLLM makes, of a chain, whose last one stands on where the grammar forbids it."""
    grammar, tree = known.grammar, known.tree.prefix(count)
    bitmask, taken = self._grammars.rows(1 + len(tree)), 0
    grammar.fill(bitmask, 0)
    for row, token in enumerate(tree.tokens.tolist(), 1):
        taken += grammar.accept(token)
        grammar.fill(bitmask, row)
    grammar.rollback(taken)
    return bitmask[: 1 + len(tree)].numpy()


@pytest.mark.quick
def test_all_kinds_in_one_batch(v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas, regular expressions and a choice, beside free requests; more than there are places, prompts in chunks.

    Masks of the flat list give other tokens. Found: no mask behind the root.
    """
    dense: dict[str, Any] = {"logit_bias": without_spaces(v2_plain)}
    kinds = [under(constraint, **(dense if "json" in constraint else {})) for constraint in CONSTRAINTS]
    kinds += [sampling(), sampling(temperature=0.8, seed=1)]
    others = ({"repetition_penalty": 1.3}, {"logprobs": 2}, {"min_p": 0.02})
    extras: list[dict[str, Any]] = [dense, {"top_p": 0.9, **dense}, *others]
    kinds += [
        under(constraint, temperature=1.0, seed=seed, **extra)
        for seed, (constraint, extra) in enumerate(zip(CONSTRAINTS, extras, strict=True))
    ]
    texts = prompts(len(kinds), seed=31)
    before = counters(v2_either)
    expected = generate(v2_plain, texts, kinds)
    actual = generate(v2_either, texts, kinds)
    assert_same_outputs(tokens(expected), tokens(actual))
    assert [o.finish_reason for o in expected] == [o.finish_reason for o in actual]
    assert {"stop", "length"} == {o.finish_reason for o in actual}
    new = gained(v2_either, before)
    assert new["spec_accepted_tokens"] > 60
    for reason in ("structured_output_chain", "no_grammar", "proposer_error", "model_chain"):
        assert new[f"fallbacks:{reason}"] == 0, reason
    monkeypatch.setattr(KnownTrees, "_rows", masks_of_the_flat_list)
    assert tokens(generate(v2_either, texts[:5], kinds[:5])) != tokens(expected)[:5]


def test_branches_under_a_grammar(v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes behind an earlier sibling are accepted. Found: trees cut by the scheduler's look at drafts."""
    kinds = [under(PROSE, temperature=0.7, seed=seed, max_tokens=40) for seed in range(4)]
    texts = [text * 2 for text in prompts(4, seed=33)]
    generate(v2_either, texts, sampling(temperature=0.7, max_tokens=30))  # to learn from
    seen = watch_paths(v2_either, monkeypatch)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    assert {len(rows) for rows, _ in seen} <= {1, 7}  # of a prompt's step there are no drafts
    assert any(len({*rows} - {-1}) < sum(parent >= 0 for parent in rows) for rows, _ in seen)
    assert sum(off_the_first_branch(*each) for each in seen) >= 3
    # Trees whose flat list is not legal.
    seen.clear()
    kinds = [under(LETTERS, temperature=1.0, seed=seed, max_tokens=12) for seed in range(2)]
    expected = tokens(generate(v2_plain, texts[:2], kinds))
    assert_same_outputs(expected, tokens(generate(v2_either, texts[:2], kinds)))
    assert {len(rows) for rows, _ in seen} <= {1, 7}


def test_forced_text_is_drafted(v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of properties, whatever a drafter knows; without it far fewer drafts are accepted."""
    kinds = [under(RECORD, max_tokens=28, temperature=1.0, seed=seed) for seed in range(2)]
    texts = prompts(2, seed=35)
    expected = tokens(generate(v2_plain, texts, kinds))

    def accepted() -> int:
        runner_of(v2_either).speculator.forget()
        before = counters(v2_either)
        assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
        return gained(v2_either, before)["spec_accepted_tokens"]

    with_forced = accepted()
    assert with_forced > 0.4 * sum(map(len, expected))
    monkeypatch.setattr(Grammar, "forced_text", lambda self: "")
    monkeypatch.setattr(Grammars, "_only_choices", lambda self, grammar, most: [])
    assert accepted() < 0.7 * with_forced


def test_a_worker_that_is_wrong_costs_drafts_alone(
    v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose text or grammar is not the scheduler's: the root has vLLM's mask, and nothing else is accepted.

    Found: its masks taken without a look at the root's.
    """
    fill = Grammar.fill

    def wrong(self: Any, bitmask: Any, row: int) -> None:
        fill(self, bitmask, row)
        bitmask[row, 3] ^= 64

    kinds = [under(constraint, temperature=1.0, seed=3, max_tokens=16) for constraint in CONSTRAINTS]
    kinds.append(sampling(max_tokens=16))
    texts = prompts(len(kinds), seed=37)
    expected = tokens(generate(v2_plain, texts, kinds))
    seen = watch_paths(v2_either, monkeypatch)
    monkeypatch.setattr(Grammar, "fill", wrong)
    before = counters(v2_either)
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    assert {len(path) for _, path in seen} == {1}
    assert gained(v2_either, before)["fallbacks:no_grammar"] > 20


def test_where_vllm_masks_there_are_chains(
    v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a reasoning parser, which says where a grammar begins."""
    monkeypatch.setattr(runner_of(v2_either).speculator, "known_trees", None)
    scheduler = v2_either.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setitem(vars(scheduler), "_worker_masks", False)
    parents = watch_parents(v2_either, monkeypatch)
    kinds = [under(constraint, temperature=0.9, seed=3) for constraint in CONSTRAINTS]
    texts = prompts(len(kinds), seed=4)
    before = counters(v2_either)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    assert gained(v2_either, before)["fallbacks:structured_output_chain"] > 20
    assert any(rows[2] >= 0 for rows in parents)
    for rows in parents:
        assert all(parent in (-1, row - 1) for row, parent in enumerate(rows))


def test_states_that_take_rows_for_a_chain(v2_plain: Any, v2_either: Any) -> None:
    """A thinking budget and a user's own processor, sampled depth by depth; and penalties, by a kernel of ours."""
    kinds = [
        under(LETTERS, temperature=1.0, seed=5, thinking_token_budget=50),
        under(CONSTRAINTS[2], temperature=1.0, seed=6, extra_args={"no_echo": True}),
        under(RECORD, extra_args={"no_echo": True}),
        under(LETTERS, temperature=1.0, seed=7, bad_words=["a", "3"], presence_penalty=0.4),
    ]
    texts = prompts(4, seed=39)
    before = counters(v2_either)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    assert gained(v2_either, before)["spec_accepted_tokens"] > 20


def test_levels_that_come_and_go(v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts, in which the host hears nothing of a text, then with some, or fewer than there are.

    Found: text of seven tokens at most.
    """
    scheduler = v2_either.llm_engine.engine_core.engine_core.scheduler
    levels = iter([6, 6, *[0] * 13, 3, 6, 2, 0, 6] * 20)
    schedule = scheduler.schedule

    def changing(*args: Any, **kwargs: Any) -> Any:
        level = next(levels)
        monkeypatch.setattr(scheduler, "dynamic_sd_lookup", [level] * 9)
        return schedule(*args, **kwargs)

    kinds = [under(LETTERS, temperature=1.0, seed=seed, max_tokens=80) for seed in range(3)] + [sampling()]
    texts = prompts(4, seed=41)
    expected = tokens(generate(v2_plain, texts, kinds))
    monkeypatch.setattr(scheduler, "schedule", changing)
    before = counters(v2_either)
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    new = gained(v2_either, before)
    assert new["spec_accepted_tokens"] > 15
    assert new["fallbacks:no_grammar"] == 0


def test_an_abort_in_the_middle(v2_plain: Any, v2_either: Any) -> None:
    """Others go on, and nothing is kept of who is gone; a second turn begins with blocks of the first."""
    engine, known = v2_either.llm_engine, runner_of(v2_either).speculator.known_trees
    texts = prompts(3, seed=43)
    generate(
        v2_either, texts[:1], sampling(max_tokens=2)
    )  # in whose first step the last test's ends are told
    kinds = [under(LETTERS, temperature=1.0, seed=seed, max_tokens=70) for seed in range(3)]
    expected = tokens(generate(v2_plain, texts, kinds))
    for name, text, params in zip("abc", texts, kinds, strict=True):
        engine.add_request(name, {"prompt_token_ids": text}, params.clone())
    done: dict[str, list[int]] = {}
    aborted = False
    while engine.has_unfinished_requests():
        if not aborted and len(known._texts) == 3 and all(text.output[5:] for text in known._texts.values()):
            engine.abort_request(["b"])
            aborted = True
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    assert aborted
    assert_same_outputs([expected[0], expected[2]], [done["a"], done["c"]])
    again = [text + answer[:40] for text, answer in zip(texts, expected, strict=True)]
    expected = tokens(generate(v2_plain, again, kinds))
    assert_same_outputs(expected, tokens(generate(v2_either, again, kinds)))
    generate(v2_either, texts[:1], sampling(max_tokens=2))  # likewise
    assert not known._texts
    assert not known._known


@pytest.mark.parametrize(
    ("method", "make"),
    [(V2_METHOD, v2_engine_ahead), (V2_HOST_METHOD, v2_engine_ahead), (V2_METHOD, v2_engine)],
)
def test_preempted_requests_go_on(
    v2_dir: str, v2_plain: Any, method: dict[str, Any], make: Callable[..., Any]
) -> None:
    """Too few blocks for all four; with steps scheduled ahead, too. `test_known_trees.py` has the mutations."""
    llm = make(v2_dir, method, num_gpu_blocks_override=10)
    texts = prompts(5, seed=9)
    long = {"regex": r"([a-f] [0-9]){34}"}
    kinds = [under(long, max_tokens=110, temperature=1.0, seed=seed) for seed in range(3)]
    kinds += [sampling(max_tokens=90)]
    kinds += [under(CONSTRAINTS[3], temperature=1.0, seed=4)]
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        seen = watch_paths(llm, patch)
        expected = tokens(generate(v2_plain, texts, kinds))
        assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    assert preemptions(llm) > 0
    assert np.mean([len(path) for _, path in seen]) > 1.3
    totals = counters(llm)
    assert totals["fallbacks:no_grammar"] < 10  # while it is compiled
    assert totals["fallbacks:proposer_error"] == 0


def test_drafts_of_a_model(v2_dir: str, v2_plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target drafts for itself: its likeliest nodes, not drawn ones; forced text no deeper than it reads."""
    method = {
        "method": "dyspec",
        "model": v2_dir,
        "num_speculative_tokens": 6,
        "max_depth": 4,
        "budget": "fixed",
    }
    llm = v2_engine(v2_dir, method)
    kinds = [under(PROSE, max_tokens=24), under(RECORD, temperature=1.0, seed=2, max_tokens=40)]
    kinds += [under(PROSE, temperature=0.8, seed=3, max_tokens=24), sampling()]
    texts = prompts(4, seed=45)
    seen = watch_paths(llm, monkeypatch)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    assert max(len(path) for _, path in seen) == 5
    assert np.mean([len(path) for _, path in seen]) > 2
    totals = counters(llm)
    assert totals["fallbacks:structured_output_chain"] == totals["fallbacks:proposer_error"] == 0
    unseeded = generate(llm, texts[:2], under(CONSTRAINTS[3], temperature=1.0))
    assert {output.text for output in unseeded} <= {*CONSTRAINTS[3]["choice"]}
