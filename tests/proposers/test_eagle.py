# SPDX-License-Identifier: Apache-2.0
"""Method `eagle_tree` against a small draft: whose trees are drawn, who gets none, and what a hybrid makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from toy_draft import VOCAB, Draft, request

from vllm_ext.proposers.dyspec import DynamicTreeProposer
from vllm_ext.proposers.eagle import Eagle, EagleOptions
from vllm_ext.proposers.hybrid import Hybrid, HybridOptions, draft_of
from vllm_ext.proposers.tree import DraftTree


def make(**options: Any) -> Eagle:
    proposer = Eagle(EagleOptions(model="m", **options))
    proposer.draft = Draft()
    return proposer


def test_trees_of_a_mixed_batch() -> None:
    proposer = make(max_depth=4)
    proposer.blind = {"unread"}
    requests = [
        request("greedy"),
        request("unread"),
        request("drawn", 1.0),
        request("seeded", 1.0, seed=3),
        request("chain", chain=True),
    ]
    trees = proposer.propose(requests)
    assert [tree.drawn is not None for tree in trees] == [False, False, True, False, False]
    assert [len(tree) > 0 for tree in trees] == [True, False, True, True, True]
    assert trees[0].tokens.tolist() == trees[3].tokens.tolist()
    assert not trees[0].is_chain
    assert trees[4].is_chain
    assert proposer.passes == 3  # as deep as they are, less the roots'


def hybrid(
    monkeypatch: pytest.MonkeyPatch, others: DraftTree, method: str = "eagle_tree"
) -> tuple[Hybrid, Draft]:
    """One of a drafter that says the same always, and of the head."""
    options = HybridOptions(
        drafters=["suffix_tree", {"method": method, "model": "m", "max_depth": 4}],
        num_speculative_tokens=8,
    )
    made = Hybrid.from_options(options, VOCAB)
    first, head = made.drafters
    monkeypatch.setattr(type(first), "propose", lambda _, requests: [others for _ in requests])
    assert isinstance(head, DynamicTreeProposer)
    draft = head.draft = Draft()
    return made, draft


@pytest.mark.parametrize("method", ["eagle_tree", "clover_tree", "dyspec"])
def test_a_hybrid_asks_below_what_its_others_say(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    order = np.argsort(-Draft().model.rows[0])
    unlikely = int(order[-1])  # the draft gives it next to nothing
    others = DraftTree.chain(np.array([unlikely], np.int32), np.array([0.95], np.float32))
    made, draft = hybrid(monkeypatch, others, method)
    asked = request("a", 1.0, budget_tokens=8)
    made.start(asked)
    tree = made.propose([asked])[0]
    assert unlikely in draft.nodes_of["a"]
    below = tree.tokens[tree.parents == tree.tokens.tolist().index(unlikely)].tolist()
    assert int(np.argmax(draft.model.rows[unlikely])) in below
    assert tree.drawn is None  # fused trees are never drawn


def test_no_request_has_anothers_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was proposed for a request that is gone, or gets none now, is nobody's."""
    made, draft = hybrid(monkeypatch, DraftTree.empty())
    for name in ("a", "b"):
        made.start(request(name))
    made.propose([request("a"), request("b")])
    made.finish("a")
    assert [len(tree) for tree in made.propose([request("b", budget_tokens=0)])] == [0]
    alone = made.propose([request("b")])[0]
    assert len(alone) == 8
    assert set(draft.nodes_of) == {"b"}


def test_a_hybrid_does_not_ask_where_others_are_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    sure = DraftTree.chain(np.array([3], np.int32), np.array([0.999], np.float32))
    made, _ = hybrid(monkeypatch, sure)
    made.calibration.estimates[...] = 0.99
    asked = request("a")
    made.start(asked)
    read: list[set[str]] = []
    made.read = read.append
    made.least_first = {"a": 0.2, "b": 0.0}
    tree = made.propose([asked])[0]
    assert tree.tokens.tolist() == [3]
    made.least_first = {"a": 0.0}
    assert len(made.propose([asked])[0]) > 1
    assert read == [set(), {"a"}]  # what was committed is taken in both


def test_options() -> None:
    with pytest.raises(ValidationError, match="model"):
        EagleOptions.model_validate({})
    head: dict[str, Any] = {"method": "eagle_tree", "model": "m"}
    lists: list[list[dict[str, Any] | str]] = [["suffix_tree", head], [head]]
    for drafters in lists:
        assert draft_of(HybridOptions(drafters=drafters)) == EagleOptions(model="m")
    with pytest.raises(ValidationError, match="eagle_tree and medusa_tree both draft with passes of a model"):
        HybridOptions(drafters=[head, {"method": "medusa_tree", "model": "h"}])
