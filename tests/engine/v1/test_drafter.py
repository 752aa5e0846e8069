# SPDX-License-Identifier: Apache-2.0
"""The V1 adapter against a hand-made runner state: rows, budgets, counters, faults."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.config import speculative
from vllm_ext.engine.composed import parts
from vllm_ext.engine.composed import worker as worker_parts
from vllm_ext.engine.paired_requests import PRIMARY
from vllm_ext.engine.steering.paired_rows import PairedRows
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.engine.v1.drafter import Drafter
from vllm_ext.kernels.learned_arrays import Learned, check_array
from vllm_ext.proposers.base import Proposer, Request, VerifiedRows
from vllm_ext.proposers.budget import GoodputBudget
from vllm_ext.proposers.ppd import PpdOptions
from vllm_ext.proposers.token_recycling import TokenRecycling
from vllm_ext.proposers.tree import DraftTree, SampledDrafts
from vllm_ext.samplers.tree_walk import greedy_walk

VOCAB = 50


class Recorder(Proposer):
    """Keeps what it is given; drafts the same tokens for everyone, cut to the budget."""

    summary: ClassVar[str] = "records"
    paper: ClassVar[str] = "none"
    verified_top_k = 2

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []
        self.rows: list[VerifiedRows] = []
        self.requests: list[Request] = []
        self.draft = DraftTree.chain(np.array([7, 8, 9], np.int32), np.array([0.6, 0.4, 0.2], np.float32))

    @classmethod
    def from_options(cls, options: Any, vocab_size: int) -> Recorder:
        return cls()

    @property
    def memory_bytes(self) -> int:
        return 0

    def start(self, request: Request) -> None:
        self.started.append(request.request_id)

    def observe(self, rows: VerifiedRows) -> None:
        self.rows.append(rows)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.requests = list(requests)
        return [self.draft.prefix(min(r.budget_tokens, r.max_depth)) for r in requests]

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    def state_dict(self) -> dict[str, Learned]:
        return {"started": np.array([len(self.started), len(self.finished)])}

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        check_array("started", arrays["started"], (2,), np.int64, 0, 9)
        self.started = ["before"] * int(arrays["started"][0])

    def warm_up(self) -> None:
        self.started.clear()
        self.finished.clear()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(
        speculative.Settings, "proposer_class", SimpleNamespace(from_options=lambda *_: recorder)
    )
    return recorder


@pytest.fixture
def drafter(recorder: Recorder) -> Drafter:
    return make_drafter()


def make_drafter(rank: int = 0, world_size: int = 1, **options: Any) -> Drafter:
    method = {"method": "token_recycling", "num_speculative_tokens": 3, "budget": "fixed", **options}
    return Drafter(
        SimpleNamespace(
            additional_config={"vllm_ext": {"speculation": method}},
            model_config=SimpleNamespace(
                get_vocab_size=lambda: VOCAB,
                max_model_len=20,
                dtype=torch.float32,
                model="model",
                revision=None,
                tokenizer="/none",
                tokenizer_revision=None,
            ),
            parallel_config=SimpleNamespace(rank=rank, data_parallel_index=0, world_size=world_size),
            scheduler_config=SimpleNamespace(scheduler_cls="the user's"),
            structured_outputs_config=SimpleNamespace(reasoning_parser="", enable_in_reasoning=False),
        )
    )


def params(**values: Any) -> SimpleNamespace:
    default: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 100,
        "extra_args": None,
    }
    default |= {"eos_token_id": 2, "stop_token_ids": [], "structured_outputs": None}
    return SimpleNamespace(**{**default, **values})


class Runner:
    """The part of vLLM's runner the adapter reads, after a step."""

    def __init__(
        self, requests: dict[str, tuple[list[int], list[int], Any]], queries: list[list[int]]
    ) -> None:
        """``requests``: id -> (prompt, output, sampling params); ``queries``: input tokens of the step."""
        width = 20
        self.requests = {
            name: SimpleNamespace(sampling_params=p, num_prompt_tokens=len(prompt), output_token_ids=output)
            for name, (prompt, output, p) in requests.items()
        }
        table = np.zeros((len(requests), width), dtype=np.int32)
        lengths = []
        for slot, (prompt, output, _) in enumerate(requests.values()):
            lengths.append(len(prompt) + len(output))
            table[slot, : lengths[-1]] = prompt + output
        self.input_batch = SimpleNamespace(
            num_reqs=len(requests),
            req_ids=list(requests),
            num_tokens_no_spec=np.array(lengths),
            token_ids_cpu=table,
        )
        self.queries = queries
        ends = np.cumsum([0, *(len(query) for query in queries)])
        # vLLM's buffer is longer than the batch.
        self.query_start_loc = SimpleNamespace(np=np.array([*ends, *[ends[-1]] * 3], dtype=np.int32))
        self.step_started = 0.0
        self.pairs: list[tuple[int, int]] = []


def step(
    drafter: Drafter, runner: Runner, num_drafts: list[int], sampled: list[list[int]]
) -> list[list[int]]:
    """One step that emits ``sampled``, its trees read as the runner reads them."""
    num_rows = sum(num_drafts) + len(num_drafts)
    logits = torch.zeros(num_rows, VOCAB)
    logits[torch.arange(num_rows), torch.arange(num_rows) + 10] = 1.0  # row r ranks token 10 + r first
    lengths = np.array([len(query) for query in runner.queries], dtype=np.int32)
    names = runner.input_batch.req_ids
    trees = StepTrees.from_step(
        names,
        num_drafts,
        {name: query[-n:] for name, query, n in zip(names, runner.queries, num_drafts, strict=True) if n},
        drafter.proposed,
        runner.query_start_loc.np[: len(names) + 1],
        lengths,
        np.zeros_like(lengths),
        np.array(list(itertools.chain(*runner.queries)), dtype=np.int32),
    )
    choice = np.full(num_rows, -2, dtype=np.int32)
    for start, tokens in zip(trees.row_start.tolist(), sampled, strict=False):
        choice[start : start + len(tokens)] = tokens  # right for chains
    trees.accepted, _ = greedy_walk(trees.row_start, trees.tokens, trees.parents, choice)
    drafter.tap(names, trees, logits)
    return drafter.step(runner, trees, 3, sampled)


def test_requests_that_ask_for_fewer_nodes_or_none(drafter: Drafter, recorder: Recorder) -> None:
    """Nothing is drafted for who is switched off, and nothing learnt: not from its text, rows or logits."""
    off, small = params(extra_args={"speculation": False}), params(extra_args={"speculation_max_nodes": 2})
    asked = {"off": off, "small": small, "free": params(extra_args=None)}
    for name, each in asked.items():
        drafter.admit(name, each)
    runner = Runner({name: ([1, 3], [4], each) for name, each in asked.items()}, [[4], [4], [4]])
    assert step(drafter, runner, [0, 0, 0], [[5], [5], [5]]) == [[], [7, 8], [7, 8, 9]]
    assert recorder.started == ["small", "free"]
    (rows,) = recorder.rows
    assert rows.row_start.tolist() == [0, 0, 1, 2]
    assert rows.top_ids[:, 0].tolist() == [11, 12]
    assert drafter.counters.totals()["spec_steps"] == 2
    for name in asked:
        drafter.finish(name)
    assert recorder.finished == ["small", "free"]
    # Alone it costs no look at the logits either.
    drafter.admit("off", off)
    runner = Runner({"off": ([1, 3], [4], off)}, [[4]])
    assert step(drafter, runner, [0], [[5]]) == [[]]
    assert len(recorder.rows) == 1
    # The next of that name is another.
    drafter.finish("off")
    drafter.admit("off", params(extra_args=None))
    assert step(drafter, runner, [0], [[5]]) == [[7, 8, 9]]


def test_rows_of_a_mixed_batch(drafter: Drafter, recorder: Recorder) -> None:
    """A decode with two drafts, one accepted; an unfinished prompt; a finished prompt."""
    runner = Runner(
        {
            "a": ([1, 3], [4, 5, 6], params()),
            "b": ([1, 3, 3, 3, 3, 3, 3], [], params()),
            "c": ([1, 9], [4], params()),
        },
        [[4, 5, 11], [1, 3, 3], [1, 9]],
    )
    drafts = step(drafter, runner, [2, 0, 0], [[5, 6], [], [4]])
    assert drafts == [[7, 8, 9], [], [7, 8, 9]]
    (rows,) = recorder.rows
    assert list(rows.request_ids) == ["a", "b", "c"]
    assert rows.row_start.tolist() == [0, 3, 4, 5]
    assert rows.tokens.tolist() == [4, 5, 11, 3, 9]
    assert rows.accepted.tolist() == [True, True, False, True, True]
    assert rows.top_ids.tolist() == [[10 + row, 0] for row in range(5)]
    assert recorder.started == ["a", "c"]
    assert drafter.counters.totals() == {
        "spec_draft_tokens": 2,
        "spec_accepted_tokens": 1,
        "spec_emitted_tokens": 3,
        "spec_entropy_tokens": 0,
        "spec_typical_tokens": 0,
        "spec_steps": 2,
        "spec_draft_passes": 0,
        "state_loads": 0,
        "state_set_aside": 0,
        "state_saves": 0,
        "state_save_errors": 0,
        "fallbacks:proposer_error": 0,
        "fallbacks:structured_output_chain": 0,
        "fallbacks:no_grammar": 0,
        "fallbacks:model_chain": 0,
        "fallbacks:hidden_states_missing": 0,
    }


def test_a_pair_is_given_its_primarys_drafts(drafter: Drafter, recorder: Recorder) -> None:
    """Its tokens are its primary's: counted once, learnt from once, and nothing is drafted for it."""
    runner = Runner({"a": ([1, 3], [4, 5, 6], params()), "a's": ([3], [4, 5, 6], params())}, [[4, 5], [4, 5]])
    rows = PairedRows()
    rows.admit("a's", SimpleNamespace(extra_args={PRIMARY: "a"}))
    rows.begin({"a": 0, "a's": 1}, [0, 2, 4], [True, True])
    runner.pairs = rows.pairs
    assert step(drafter, runner, [1, 1], [[5, 6], [5, 6]]) == [[7, 8, 9], [7, 8, 9]]
    assert drafter.proposed["a's"] is drafter.proposed["a"]
    assert [request.request_id for request in recorder.requests] == ["a"]
    assert drafter.counters.totals()["spec_emitted_tokens"] == 2
    assert drafter.counters.totals()["spec_steps"] == 1


def test_placeholders_are_nobodys_drafts(drafter: Drafter, recorder: Recorder) -> None:
    """vLLM fills up the step of a prompt that is cached but for one token."""
    drafter.budget = GoodputBudget(3)
    runner = Runner(
        {"new": ([1, 3], [4], params()), "old": ([1], [5, 7], params())}, [[3, -1, -1, -1], [5, 11]]
    )
    drafter.proposed["old"] = recorder.draft
    step(drafter, runner, [3, 1], [[4], [7]])
    (rows,) = recorder.rows
    assert rows.row_start.tolist() == [0, 1, 3]
    assert rows.tokens.tolist() == [3, 5, 11]
    assert rows.parents.tolist() == [-1, -1, 0]
    assert rows.top_ids[:, 0].tolist() == [10, 14, 15]
    counters = drafter.counters.totals()
    assert counters["spec_draft_tokens"] == 1
    assert counters["fallbacks:proposer_error"] == 0


def test_prompt_tokens_are_no_drafts(drafter: Drafter, recorder: Recorder) -> None:
    """Rows of ids behind the vocabulary: they promise nothing of this step, and lower no rate of acceptance."""
    drafter.budget = GoodputBudget(3)
    recorder.draft = DraftTree.chain(
        np.array([7, VOCAB, VOCAB + 1], np.int32), np.array([0.5, 0.4, 0.2], np.float32)
    )
    drafter.proposed["a"] = recorder.draft
    runner = Runner({"a": ([1], [5, 7, 3], params())}, [[5, 7, VOCAB, VOCAB + 1]])
    predicted: list[Any] = []
    drafter.budget.observe = lambda *evidence: predicted.append(evidence)  # type: ignore[method-assign]
    step(drafter, runner, [3], [[7, 3]])
    assert predicted == [(["a"], [0.5], [1])]
    assert drafter.counters.totals()["spec_draft_tokens"] == 1
    assert drafter.counters.totals()["spec_accepted_tokens"] == 1
    assert drafter.counters.totals()["fallbacks:proposer_error"] == 0


@pytest.mark.parametrize(("first", "drafted"), [(7, [7]), (VOCAB, [])])
def test_what_prompt_tokens_were_asked_for_is_judged(
    drafter: Drafter, recorder: Recorder, first: int, drafted: list[int]
) -> None:
    """A budget that gives no rows has its evidence by candidates alone, which there are only after prompt tokens."""
    drafter.budget = GoodputBudget(3)
    drafter.budget.choose = lambda names, *_: [0] * len(names)  # type: ignore[method-assign]
    drafter._prompt_tokens = PpdOptions(model="m")
    recorder.draft = DraftTree.chain(np.array([first, VOCAB + 1], np.int32), np.array([0.5, 0.4], np.float32))
    runner = Runner({"a": ([1], [5], params())}, [[1]])
    assert step(drafter, runner, [0], [[5]]) == [drafted]
    assert drafter.counters.totals()["fallbacks:proposer_error"] == 0


@pytest.mark.parametrize(
    ("prompt", "output", "max_tokens", "budget"),
    [
        (5, 1, 100, 3),  # all the room there is
        (5, 1, 2, 0),  # one more token ends the request
        (5, 1, 4, 2),
        (5, 1, 1, 0),  # already at its end; vLLM is about to say so
        (17, 1, 100, 1),  # two positions left: one draft and the token after it
        (19, 1, 100, 0),  # at max_model_len
        (5, 1, None, 3),
    ],
)
def test_budget_stops_at_max_tokens_and_max_model_len(
    drafter: Drafter, recorder: Recorder, prompt: int, output: int, max_tokens: int | None, budget: int
) -> None:
    runner = Runner({"a": ([3] * prompt, [4] * output, params(max_tokens=max_tokens))}, [[3]])
    (draft,) = step(drafter, runner, [0], [[4]])
    assert min(recorder.requests[0].budget_tokens, recorder.requests[0].max_depth) == budget
    assert len(draft) == budget
    assert recorder.requests[0].tokens.tolist() == [3] * prompt + [4] * output


def test_tokens_after_the_end_are_nobodys(drafter: Drafter, recorder: Recorder) -> None:
    """They count nowhere, the proposer never sees them, and nothing is drafted behind them."""
    runner = Runner(
        {"a": ([1], [5, 2, 6, 6], params()), "b": ([1], [5, 9, 9], params(stop_token_ids=[5]))},
        [[1, 5, 2, 6], [1, 5, 9]],
    )
    assert step(drafter, runner, [3, 2], [[5, 2, 6, 6], [5, 9, 9]]) == [[], []]
    (rows,) = recorder.rows
    assert list(rows.emitted) == [[5, 2], [5]]
    assert rows.accepted.tolist() == [True, True, True, False, True, True, False]
    assert [request.tokens.tolist() for request in recorder.requests] == [[1, 5, 2], [1, 5]]
    assert [request.max_depth for request in recorder.requests] == [0, 0]
    counted = drafter.counters.totals()
    assert counted["spec_emitted_tokens"] == 2 + 1
    assert counted["spec_accepted_tokens"] == 1 + 0


def test_state_follows_the_request_id(drafter: Drafter, recorder: Recorder) -> None:
    """Preempted and resumed in another slot: not started twice. The same id after its end: a new request."""
    a, b = ([1], [4], params()), ([1], [4], params())
    step(drafter, Runner({"a": a, "b": b}, [[1], [1]]), [0, 0], [[4], [4]])
    step(drafter, Runner({"b": b, "a": a}, [[4], [4]]), [0, 0], [[4], [4]])
    assert recorder.started == ["a", "b"]
    drafter.finish("a")
    drafter.finish("never-seen")
    assert recorder.finished == ["a"]
    step(drafter, Runner({"a": a}, [[4]]), [0], [[4]])
    assert recorder.started == ["a", "b", "a"]


def test_a_fault_costs_drafts_not_requests(
    drafter: Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows: VerifiedRows) -> None:
        raise ZeroDivisionError

    runner = Runner({"a": ([1], [4], params())}, [[1]])
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "observe", fail)
        assert step(drafter, runner, [0], [[4]]) == [[]]
    assert drafter.counters.totals()["fallbacks:proposer_error"] == 1
    assert step(drafter, runner, [0], [[4]]) == [[7, 8, 9]]


@pytest.mark.parametrize("where", ["start", "propose"])
def test_a_fault_of_one_request_costs_no_other(
    drafter: Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(given: Any) -> Any:
        if "b" in [request.request_id for request in (given if where == "propose" else [given])]:
            raise ZeroDivisionError
        return works(given)

    works = getattr(recorder, where)
    runner = Runner({name: ([1], [4], params()) for name in "abc"}, [[1], [1], [1]])
    with monkeypatch.context() as patch:
        patch.setattr(recorder, where, fail)
        assert step(drafter, runner, [0, 0, 0], [[4], [4], [4]]) == [[7, 8, 9], [], [7, 8, 9]]
    assert drafter.counters.totals()["fallbacks:proposer_error"] == 1
    assert step(drafter, runner, [0, 0, 0], [[4], [4], [4]]) == [[7, 8, 9]] * 3
    assert sorted(recorder.started) == ["a", "b", "c"]


class FailingGrammars:
    """Of requests "a" and "b", of which the first's grammar fails."""

    def __init__(self) -> None:
        self.given_up: list[str] = []
        self.asked: list[str] = []

    def has(self, request_id: str) -> bool:
        return request_id in ("a", "b")

    def of(self, request_id: str, output: Sequence[int]) -> Any:
        return None if request_id in self.given_up else request_id

    def tree(self, grammar: str, request: Request, tree: DraftTree) -> DraftTree:
        self.asked.append(grammar)
        if grammar == "a":
            raise UnicodeDecodeError("utf-8", b"\xd0", 0, 1, "unexpected end of data")
        return tree.prefix(1)

    def give_up(self, request_id: str) -> None:
        self.given_up.append(request_id)


def test_a_grammars_fault_costs_its_request_the_drafts(drafter: Drafter) -> None:
    """And is not asked again: nobody knows how many tokens it has taken."""
    drafter.constraints.grammars = grammars = FailingGrammars()  # type: ignore[assignment]
    runner = Runner({name: ([1], [4], params()) for name in "abc"}, [[1], [1], [1]])
    for _ in range(2):
        assert step(drafter, runner, [0, 0, 0], [[4], [4], [4]]) == [[], [7], [7, 8, 9]]
    assert grammars.asked == ["a", "b", "b"]
    assert drafter.counters.totals()["fallbacks:proposer_error"] == 1
    assert drafter.counters.totals()["fallbacks:no_grammar"] == 1


BRANCHING = DraftTree(
    np.array([7, 8, 9], np.int32), np.array([-1, -1, 0], np.int32), np.array([0.5, 0.3, 0.2], np.float32)
)


def test_a_fault_of_the_tap_costs_what_was_to_be_learnt(
    drafter: Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(logits: torch.Tensor, k: int) -> torch.Tensor:
        raise ZeroDivisionError

    monkeypatch.setattr("vllm_ext.engine.drafting.logits_tap.top_k_ids", fail)
    runner = Runner({"a": ([1], [4], params())}, [[1]])
    assert step(drafter, runner, [0], [[4]]) == [[7, 8, 9]]
    assert recorder.rows == []
    assert drafter.counters.totals()["fallbacks:proposer_error"] == 1


def test_structured_output_gets_the_best_chain_of_a_tree(drafter: Drafter, recorder: Recorder) -> None:
    recorder.draft = BRANCHING
    runner = Runner(
        {"a": ([1], [4], params(structured_outputs=object())), "b": ([1], [4], params())}, [[1], [1]]
    )
    assert step(drafter, runner, [0, 0], [[4], [4]]) == [[7, 9], [7, 8, 9]]
    assert drafter.counters.totals()["fallbacks:structured_output_chain"] == 1


class OddTokens:
    """Instead of `Grammars`: request "a" has a grammar, which allows odd tokens; "c" has one that never comes."""

    def __init__(self) -> None:
        self.outputs: list[list[int]] = []

    def has(self, request_id: str) -> bool:
        return request_id in ("a", "c")

    def of(self, request_id: str, output: list[int]) -> str | None:
        self.outputs.append(list(output))
        return "odd" if request_id == "a" else None

    def tree(self, grammar: str, request: Request, tree: DraftTree) -> DraftTree:
        assert grammar == "odd"
        return tree.where(tree.tokens % 2 == 1)

    def masks(self, grammars: dict[int, str]) -> dict[int, str]:
        return grammars

    def finish(self, request_id: str) -> None: ...


def test_a_structured_tree_is_what_its_grammar_allows(drafter: Drafter, recorder: Recorder) -> None:
    recorder.draft = BRANCHING
    drafter.constraints.grammars = odd = OddTokens()  # type: ignore[assignment]
    given = params(structured_outputs=object())
    runner = Runner({"a": ([1], [4], given), "b": ([1], [4], params()), "c": ([1], [5], given)}, [[1]] * 3)
    assert step(drafter, runner, [0, 0, 0], [[4], [4], [5]]) == [[7, 9], [7, 8, 9], []]
    assert odd.outputs == [[4], [5]]
    counters = drafter.counters.totals()
    assert (counters["fallbacks:structured_output_chain"], counters["fallbacks:no_grammar"]) == (0, 1)
    assert not any(request.chain for request in recorder.requests)
    # A grammar prunes trees, so that they may not be drawn.
    assert [request.may_draw for request in recorder.requests] == [False, True, False]


def test_masks_are_of_structured_requests_with_drafts(drafter: Drafter) -> None:
    """Not of rows that vLLM has filled up, nor of requests without drafts: the engine core masks those."""
    given = params(structured_outputs=object())
    runner = Runner({"b": ([1], [4], params()), "a": ([1], [4], given)}, [[4, 7], [4, 7, 9]])

    def masks(drafts: list[list[int]]) -> Any:
        tokens = np.array([token for query in drafts for token in (4, *query)], dtype=np.int32)
        starts = np.cumsum([0, *(1 + len(query) for query in drafts)]).astype(np.int32)
        none = np.full(2, -1, np.int32)
        trees = StepTrees(starts, tokens, np.zeros_like(tokens), none, none, [], [])
        return drafter.constraints.masks(runner, trees)

    assert masks([[7], [7, 9]]) is None
    drafter.constraints.grammars = OddTokens()  # type: ignore[assignment]
    assert masks([[7], [7, 9]]) == {1: "odd"}
    assert masks([[7], []]) is None
    assert masks([[], [-1, -1]]) is None


def test_a_model_without_tree_attention_gets_chains(drafter: Drafter, recorder: Recorder) -> None:
    recorder.draft = BRANCHING
    drafter.chain_reason = "sliding window"
    runner = Runner({"a": ([1], [4], params())}, [[1]])
    assert step(drafter, runner, [0], [[4]]) == [[7, 9]]
    assert drafter.counters.totals()["fallbacks:model_chain"] == 1


def test_the_budget_cuts_what_is_scheduled_not_what_is_remembered(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's clock may choose another size; both must know the tree of what is scheduled."""
    drafter.budget = GoodputBudget(3)
    monkeypatch.setattr(drafter.budget, "choose", lambda *_: [1])
    runner = Runner({"a": ([1], [4], params())}, [[1]])
    assert step(drafter, runner, [0], [[4]]) == [[7]]
    assert drafter.proposed["a"].tokens.tolist() == [7, 8, 9]


def test_how_much_of_a_drawn_tree_is_verified_was_chosen_before_it_was_drawn(
    drafter: Drafter, recorder: Recorder
) -> None:
    """By the tree before it: its own tokens may have no say."""
    drafter.budget = budget = GoodputBudget(3)
    budget._step = 100  # warm
    for rows in range(1, 9):
        for _ in range(40):
            budget.cost.record(1.0, rows, 1, 2)
    runner = Runner({"a": ([1], [4], params())}, [[1]])
    likely, unlikely = (
        DraftTree(
            np.array([7, 8, 9], np.int32),
            np.array([-1, 0, 1], np.int32),
            np.array(chances, np.float32),
            SampledDrafts({}),
        )
        for chances in ([0.9, 0.8, 0.7], [1e-5, 1e-6, 1e-7])
    )
    sizes = []
    for tree in (likely, unlikely, likely, likely):
        recorder.draft = tree
        sizes.append(len(step(drafter, runner, [0], [[4]])[0]))
    assert sizes == [0, 3, 0, 3]
    recorder.draft = replace(unlikely, drawn=None)  # any other is cut by its own
    assert step(drafter, runner, [0], [[4]]) == [[]]
    # A request that comes gets what the last choice was on average.
    assert budget.chosen("a") == budget.chosen("new") == 0
    recorder.draft = likely
    assert step(drafter, runner, [0], [[4]]) == [[]]
    assert budget.chosen("a") == budget.chosen("new") == 3


def test_the_budget_learns_from_steps_without_prompts(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter.budget = GoodputBudget(3)
    costs: list[tuple[Any, ...]] = []
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(drafter.budget.cost, "record", lambda *values: costs.append(values[1:]))
    monkeypatch.setattr(drafter.budget, "observe", lambda *values: seen.append(values))
    monkeypatch.setattr(drafter.budget, "choose", lambda names, *_: [2] * len(names))
    step(drafter, Runner({"a": ([1, 3, 3], [4], params())}, [[1, 3, 3]]), [0], [[4]])
    assert costs == []
    step(drafter, Runner({"a": ([1, 3, 3], [4, 7, 9], params())}, [[4, 7, 8]]), [2], [[7, 9]])
    assert costs == [(3, 1, 0)]
    names, predicted, accepted = seen[-1]
    assert (list(names), predicted, accepted) == (["a"], [pytest.approx(1.0)], [1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def loaded(**options: Any) -> Drafter:
    """A drafter that has found what there is."""
    drafter = make_drafter(**options)
    drafter.load_model(torch.nn.Linear(1, 1))
    return drafter


def learn(drafter: Drafter) -> None:
    """A request that is running when the server shuts down."""
    step(drafter, Runner({"a": ([1], [4], params())}, [[1]]), [0], [[4]])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_learnt_is_saved_at_the_end_and_loaded_at_the_start(recorder: Recorder, folder: Path) -> None:
    drafter = loaded(state_dir=str(folder))
    drafter.close()
    assert files(folder) == []  # nothing learnt
    drafter = loaded(state_dir=str(folder))
    learn(drafter)
    drafter.close()
    assert recorder.finished == ["a"]  # its text counts too
    drafter.close()
    assert len(files(folder)) == 1
    assert drafter.counters.totals()["state_saves"] == 1
    assert drafter.counters.totals()["state_loads"] == 0
    drafter = loaded(state_dir=str(folder))
    assert recorder.started == ["before"]
    assert drafter.counters.totals()["state_loads"] == 1
    drafter.close()


def test_without_a_folder_nothing_is_saved(recorder: Recorder, folder: Path) -> None:
    drafter = loaded()
    learn(drafter)
    drafter.close()
    assert not folder.exists()
    assert recorder.finished == []


@pytest.mark.parametrize("bad", ["damaged", "foreign"])
def test_bad_state_is_set_aside_and_the_server_starts(
    recorder: Recorder,
    folder: Path,
    bad: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    drafter = loaded(state_dir=str(folder))
    learn(drafter)
    drafter.close()
    (name,) = files(folder)
    if bad == "damaged":
        (folder / name).write_bytes(b"x" + (folder / name).read_bytes()[1:])
    else:
        monkeypatch.setattr(
            recorder,
            "load_state_dict",
            lambda arrays: check_array("started", arrays["started"], (3,), np.int64, 0, 9),
        )
    drafter = loaded(state_dir=str(folder))
    assert recorder.started == []
    assert drafter.counters.totals()["state_set_aside"] == 1
    assert drafter.counters.totals()["state_loads"] == 0
    assert str(folder / name) in caplog.text
    assert ("cannot be read" if bad == "damaged" else "started is int64[2]; expected int64[3]") in caplog.text
    learn(drafter)
    drafter.close()
    assert [file.partition(".set-aside-")[0] for file in files(folder)] == [name, name]


def test_a_proposer_that_took_over_a_part_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = loaded(state_dir=str(folder))
    learn(drafter)
    drafter.close()

    def half(self: TokenRecycling, arrays: Any) -> None:
        self.calibration.hits[...] = 0
        raise ValueError("the rest is bad")

    monkeypatch.setattr(TokenRecycling, "load_state_dict", half)
    drafter = loaded(state_dir=str(folder))
    assert isinstance(drafter.proposer, TokenRecycling)
    assert (drafter.proposer.calibration.hits == TokenRecycling(VOCAB).calibration.hits).all()
    learn(drafter)
    drafter.close()
    assert drafter.counters.totals()["state_saves"] == 1


def test_a_bad_file_that_cannot_be_renamed_is_not_overwritten(
    recorder: Recorder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = loaded(state_dir=str(folder))
    learn(drafter)
    drafter.close()
    (name,) = files(folder)
    (folder / name).write_bytes(b"precious")

    def fail(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "rename", fail)
    drafter = loaded(state_dir=str(folder))
    learn(drafter)
    drafter.close()
    assert (folder / name).read_bytes() == b"precious"


class Group:
    """vLLM's group of tensor-parallel ranks, as the drafter uses it."""

    def __init__(self, sent: Any = None) -> None:
        self.sent = sent

    def broadcast_object(self, value: Any, src: int) -> Any:
        if value is not None:
            self.sent = value
        return self.sent


def test_all_ranks_take_over_what_rank_0_has_read(
    recorder: Recorder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = loaded(state_dir=str(folder))
    learn(drafter)
    drafter.close()
    group = Group()
    monkeypatch.setattr("vllm_ext.engine.state.keeper.get_tp_group", lambda: group)
    loaded(state_dir=str(folder), world_size=2).close()
    assert group.sent["started"].tolist() == [1, 1]
    before = (folder / files(folder)[0]).stat()
    (folder / files(folder)[0]).rename(folder / "gone")  # it need not be there for the others
    other = loaded(state_dir=str(folder), world_size=2, rank=1)
    assert recorder.started == ["before"]
    learn(other)
    other.close()
    assert files(folder) == ["gone"]
    assert (folder / "gone").stat() == before


@pytest.mark.parametrize("runner", [None, SimpleNamespace(), SimpleNamespace(drafter=None)])
def test_a_worker_that_never_started_shuts_down(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    ended = []
    monkeypatch.setattr(CPUWorker, "shutdown", lambda self: ended.append(self))
    worker = object.__new__(parts.load(worker_parts.path_of(["Speculation", "Rules", "EncodedCache"])))
    if runner is not None:
        worker.model_runner = runner
    worker.shutdown()
    assert ended == [worker]
