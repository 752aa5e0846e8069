# SPDX-License-Identifier: Apache-2.0
"""A proposer beside an engine whose texts are on the device: what it is told of requests, steps and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_ext.config import speculative
from vllm_ext.engine.v2.speculators.host_drafter import HostDrafts, Verified
from vllm_ext.proposers.base import Proposer, Request, VerifiedRows, no_top
from vllm_ext.proposers.tree import DraftTree

VOCAB, MAX_MODEL_LEN, NODES, END = 50, 20, 4, 2
# A root's two children, and a child of the first.
TREE = DraftTree(
    np.array([7, 8, 9], np.int32), np.array([-1, -1, 0], np.int32), np.array([0.6, 0.4, 0.2], np.float32)
)


class Recorder(Proposer):
    """Keeps what it is told; drafts the same tree for everyone."""

    summary: ClassVar[str] = "records"
    paper: ClassVar[str] = "none"

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.texts: list[dict[str, list[int]]] = []
        self.requests: list[Request] = []
        self.rows: list[VerifiedRows] = []
        self.tree = TREE

    @classmethod
    def from_options(cls, options: Any, vocab_size: int) -> Recorder:
        return cls()

    @property
    def memory_bytes(self) -> int:
        return 0

    def start(self, request: Request) -> None:
        self.events.append(("start", request.request_id))

    def observe(self, rows: VerifiedRows) -> None:
        self.rows.append(rows)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.requests = list(requests)
        self.texts.append({request.request_id: request.tokens.tolist() for request in requests})
        return [self.tree for _ in requests]

    def finish(self, request_id: str) -> None:
        self.events.append(("finish", request_id))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    recorder = Recorder()
    monkeypatch.setattr(
        speculative.Settings, "proposer_class", SimpleNamespace(from_options=lambda *_: recorder)
    )
    return Drafts(recorder)


class Drafts:
    """With its proposer, and the faults that it has counted."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.faults = recorder, list[str]()
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=MAX_MODEL_LEN),
            parallel_config=SimpleNamespace(rank=0, world_size=1),
        )
        settings = speculative.parse({"method": "suffix_tree", "num_speculative_tokens": NODES})
        self.host = HostDrafts(vllm_config, settings, self.faults.append)
        self.host.load()
        self.host.serve()

    def admit(self, name: str, text: list[int], num_prompt: int | None = None, **values: Any) -> None:
        chain, most_depth = values.pop("chain", False), values.pop("most_depth", NODES)
        self.host.admit(new_request(name, text, num_prompt, **values), chain, most_depth)

    def step(
        self, sampled: dict[str, list[int]], level: int = NODES, **rows: Any
    ) -> tuple[list[DraftTree], list[int]]:
        """A step of roots alone, unless ``rows`` says otherwise."""
        number = len(sampled)
        default: dict[str, Any] = {
            "row_start": np.arange(number + 1, dtype=np.int32),
            "tokens": np.arange(number, dtype=np.int32),
            "parents": np.full(number, -1, np.int32),
            "drafted": np.zeros(number, np.bool_),
            "accepted": np.ones(number, np.bool_),
        }
        default |= rows
        top = no_top(len(default["tokens"]))
        verified = Verified(**default, top_ids=top[0], top_logits=top[1], sampled=list(sampled.values()))
        trees, last = self.host.step(list(sampled), verified, level)
        return trees, last.tolist()


def new_request(name: str, text: list[int], num_prompt: int | None, **values: Any) -> Any:
    params: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None}
    params |= {
        "max_tokens": 100,
        "eos_token_id": END,
        "stop_token_ids": [],
        "structured_outputs": None,
        "extra_args": None,
    }
    return SimpleNamespace(
        req_id=name,
        prefill_token_ids=text,
        prompt_token_ids=text[:num_prompt],
        sampling_params=SimpleNamespace(**{**params, **values}),
    )


def sizes(trees: list[DraftTree]) -> list[int]:
    return [len(tree) for tree in trees]


def test_texts_follow_the_steps(drafts: Drafts) -> None:
    """Found: tokens given to another request of the batch."""
    drafts.admit("a", [3, 4])
    drafts.admit("b", [5, 6, 7])
    trees, last = drafts.step({"a": [], "b": [11]})  # a's prompt is computed in parts
    assert sizes(trees) == [0, 3]
    assert last == [4, 11]
    assert drafts.recorder.events == [("start", "b")]
    drafts.step({"a": [12], "b": [13, 14]})
    assert drafts.recorder.texts[-1] == {"a": [3, 4, 12], "b": [5, 6, 7, 11, 13, 14]}
    drafts.step({"b": [15], "a": [16]})  # in another order
    assert drafts.recorder.texts[-1] == {"a": [3, 4, 12, 16], "b": [5, 6, 7, 11, 13, 14, 15]}
    assert drafts.recorder.events == [("start", "b"), ("start", "a")]
    request = next(request for request in drafts.recorder.requests if request.request_id == "b")
    assert (request.num_prompt_tokens, request.budget_tokens, request.chain) == (3, NODES, False)
    assert not drafts.faults


def test_a_preempted_request_comes_back_with_all_it_had(drafts: Drafts) -> None:
    drafts.admit("a", [3, 4])
    drafts.step({"a": [5]})
    drafts.admit("a", [3, 4, 5], num_prompt=2)
    drafts.step({"a": []})
    drafts.step({"a": [6]})
    assert drafts.recorder.events == [("start", "a")]  # not again
    assert drafts.recorder.texts[-1] == {"a": [3, 4, 5, 6]}
    assert drafts.recorder.requests[0].num_prompt_tokens == 2
    # With another text: what the proposer knows of it is of no use.
    drafts.admit("a", [3, 9, 5])
    drafts.step({"a": [6]})
    assert drafts.recorder.events == [("start", "a"), ("finish", "a"), ("start", "a")]


def test_the_proposer_hears_of_ends_once_and_in_order(drafts: Drafts) -> None:
    for name in ("c", "a", "b", "waiting"):
        drafts.admit(name, [3])
    drafts.step({"b": [4], "a": [4], "c": [4]})
    drafts.recorder.events.clear()
    drafts.host.finish({"c", "b", "waiting", "unknown"})
    drafts.host.finish({"b"})
    assert drafts.recorder.events == [("finish", "b"), ("finish", "c")]  # of those it knew
    drafts.step({"a": [5], "b": [6]})  # what was scheduled before
    assert drafts.recorder.texts[-1] == {"a": [3, 4, 5]}
    assert not drafts.faults


@pytest.mark.parametrize(
    ("values", "sampled", "kept"),
    [
        ({}, [5, END, 6], [5, END]),
        ({"stop_token_ids": [6]}, [5, 6, 7], [5, 6]),
        ({"max_tokens": 2}, [5, 6, 7], [5, 6]),
        ({"eos_token_id": None}, [END] * 17 + [7, 8], [END] * 17),  # the context has room for so many
    ],
    ids=["end", "stop", "max_tokens", "context"],
)
def test_what_follows_an_end_is_told_to_nobody(
    drafts: Drafts, values: dict[str, Any], sampled: list[int], kept: list[int]
) -> None:
    drafts.admit("a", [3, 4, 5], **values)
    trees, _ = drafts.step({"a": sampled})
    assert drafts.recorder.rows[-1].emitted == [kept]
    assert drafts.recorder.requests[0].max_depth == drafts.recorder.requests[0].budget_tokens == 0
    assert sizes(trees) == [0]
    drafts.step({"a": [9]})  # steps scheduled ahead
    assert drafts.recorder.rows[-1].emitted == [[]]
    assert len(drafts.recorder.rows[-1].tokens) == 0
    assert drafts.recorder.texts[-1] == {}
    assert not drafts.faults


@pytest.mark.parametrize(
    ("values", "depth", "nodes"),
    [({}, NODES, NODES), ({"max_tokens": 3}, 1, NODES), ({"most_depth": 2}, 2, NODES)],
    ids=["room", "max_tokens", "penalties"],
)
def test_depths_end_where_the_request_does(
    drafts: Drafts, values: dict[str, Any], depth: int, nodes: int
) -> None:
    drafts.admit("a", [3], **values)
    trees, _ = drafts.step({"a": [4]})
    (request,) = drafts.recorder.requests
    assert (request.max_depth, request.budget_tokens) == (depth, nodes)
    assert trees[0].depths().max() == min(depth, 2)  # also where the proposer does not listen


def test_nodes_take_places_of_the_context(drafts: Drafts) -> None:
    drafts.admit("a", [3] * 16)
    drafts.step({"a": [4]})
    (request,) = drafts.recorder.requests
    assert (request.budget_tokens, request.max_depth) == (3, 2)


def test_without_room_for_drafts_texts_are_kept_up(drafts: Drafts) -> None:
    """Level 0: nothing is drafted, and the first step behind it knows what came meanwhile."""
    drafts.admit("a", [3])
    assert sizes(drafts.step({"a": [4]}, level=0)[0]) == [0]
    assert drafts.recorder.events == [("start", "a")]
    assert sizes(drafts.step({"a": [5]}, level=0)[0]) == [0]
    assert len(drafts.recorder.rows) == 2
    assert sizes(drafts.step({"a": [6]}, level=2)[0]) == [2]
    assert drafts.recorder.texts[-1] == {"a": [3, 4, 5, 6]}


def test_rows_are_those_that_count(drafts: Drafts) -> None:
    """Of a root, two nodes and padding three; of a structured request none; of a prompt that is filled up its root."""
    drafts.admit("a", [3])
    drafts.admit("b", [3], structured_outputs=object())
    drafts.admit("c", [3])
    drafts.step(
        {"a": [8, END, 4], "b": [9], "c": []},
        row_start=np.array([0, 4, 6, 8], np.int32),
        tokens=np.array([3, 8, 2, 3, 3, 9, 3, 0], np.int32),
        parents=np.array([-1, 0, 1, -1, -1, 0, -1, 0], np.int32),
        drafted=np.array([0, 1, 1, 0, 0, 1, 0, 0], np.bool_),
        accepted=np.array([1, 1, 1, 0, 1, 0, 1, 0], np.bool_),
    )
    (rows,) = drafts.recorder.rows
    assert rows.row_start.tolist() == [0, 3, 3, 4]
    assert rows.tokens.tolist() == [3, 8, 2, 3]
    assert rows.parents.tolist() == [-1, 0, 1, -1]
    assert rows.accepted.tolist() == [True, True, False, True]  # what follows the end token is not
    assert rows.emitted == [[8, END], [9], []]


def test_chains_where_trees_cannot_be_verified(drafts: Drafts) -> None:
    drafts.admit("a", [3], chain=True)
    (tree,), _ = drafts.step({"a": [4]})
    assert tree.is_chain
    assert tree.tokens.tolist() == [7, 9]


@pytest.mark.parametrize("where", ["observe", "start", "propose"])
def test_a_fault_costs_the_drafts_of_a_step(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    drafts.admit("a", [3])
    with monkeypatch.context() as patch:
        patch.setattr(drafts.recorder, where, lambda *_: 1 / 0)
        trees, last = drafts.step({"a": [4]})
    assert (sizes(trees), last) == ([0], [4])
    assert drafts.faults == ["fallbacks:proposer_error"]
    trees, _ = drafts.step({"a": [5]})
    assert sizes(trees) == [3]
    assert drafts.recorder.texts[-1] == {"a": [3, 4, 5]}
    assert drafts.recorder.events == [("start", "a")]
    monkeypatch.setattr(drafts.recorder, "finish", lambda *_: 1 / 0)
    drafts.host.finish(["a"])
    assert len(drafts.faults) == 2


@pytest.mark.parametrize("where", ["start", "propose"])
def test_a_fault_of_one_request_costs_no_other(
    drafts: Drafts, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(given: Any) -> Any:
        if "b" in [request.request_id for request in (given if where == "propose" else [given])]:
            raise ZeroDivisionError
        return works(given)

    works = getattr(drafts.recorder, where)
    for name in "abc":
        drafts.admit(name, [3])
    with monkeypatch.context() as patch:
        patch.setattr(drafts.recorder, where, fail)
        trees, _ = drafts.step({"a": [4], "b": [4], "c": [4]})
    assert sizes(trees) == [3, 0, 3]
    assert drafts.faults == ["fallbacks:proposer_error"]
    trees, _ = drafts.step({"a": [4], "b": [4], "c": [4]})
    assert sizes(trees) == [3, 3, 3]


@pytest.mark.parametrize(
    ("tokens", "parents"), [([7, VOCAB], [-1, 0]), ([7, -1], [-1, 0]), ([7, 8], [-1, 1]), ([7, 8], [-2, 0])]
)
def test_a_wrong_tree_does_not_reach_the_device(
    drafts: Drafts, tokens: list[int], parents: list[int]
) -> None:
    chances = np.array([0.5, 0.4], np.float32)
    drafts.recorder.tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), chances)
    drafts.admit("a", [3])
    trees, _ = drafts.step({"a": [4]})
    assert sizes(trees) == [0]
    assert drafts.faults == ["fallbacks:proposer_error"]


def test_a_proposer_that_knows_nothing_takes_over(drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts.admit("a", [3])
    drafts.step({"a": [4]})
    drafts.host.finish(["a"])
    other = Recorder()
    monkeypatch.setattr(
        speculative.Settings, "proposer_class", SimpleNamespace(from_options=lambda *_: other)
    )
    drafts.host.forget()
    drafts.admit("a", [3])
    assert sizes(drafts.step({"a": [4]})[0]) == [3]
    assert other.events == [("start", "a")]


def test_requests_that_were_made_up_are_not_heard_of(drafts: Drafts) -> None:
    recorder = drafts.recorder
    drafts = Drafts(recorder)
    drafts.host._serves = False
    drafts.admit("warm-up", [3])
    trees, last = drafts.step({"warm-up": [4]})
    assert (sizes(trees), last) == ([0], [4])
    drafts.host.serve()
    drafts.host.finish({"warm-up"})
    assert not recorder.events
    assert not recorder.rows
