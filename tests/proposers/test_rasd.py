# SPDX-License-Identifier: Apache-2.0
"""Method `rasd`: what is pruned of what was retrieved, what is fused with the draft's tree, and who keeps how much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted import Scripted, paths, tree, trees, verified
from toy_draft import VOCAB, Draft, request

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.draft_model import DraftModelOptions
from vllm_ext.proposers.dyspec import DySpec
from vllm_ext.proposers.eagle import EagleOptions
from vllm_ext.proposers.hybrid import HybridOptions, draft_of, reads_nodes
from vllm_ext.proposers.rasd import Rasd, RasdOptions, common_nodes, pruned, room_beside
from vllm_ext.proposers.tree import DraftTree

Path = tuple[int, ...]


def draft() -> DySpec:
    made = DySpec(DraftModelOptions(model="m", num_speculative_tokens=16, max_depth=4))
    made.draft, made.draws = Draft(), False
    return made


def fused(*retrieved: DraftTree, **options: Any) -> Rasd:
    return Rasd([draft(), *map(Scripted, retrieved)], **options)


@st.composite
def distributions(draw: st.DrawFn) -> Sparse:
    """Over some of the tokens of `trees`, and one more; eighths, so that equal ones are common."""
    ids = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
    return Sparse(np.array(ids, np.int32), np.array([draw(st.integers(1, 8)) / 40 for _ in ids]))


def pruned_ref(of: dict[Path, float], q: dict[int, float], k: int, eps: float | None, most: int) -> set[Path]:
    """By the card: drop what fails the predicate, rank the rest, cut."""
    likeliest = sorted(q, key=lambda token: (-q[token], token))[:k]
    plausible = {token for token in q if token in likeliest or (eps is not None and q[token] >= eps)}
    left = [path for path in of if path[0] in plausible]
    return set(sorted(left, key=lambda path: -of[path] * q[path[0]])[:most])


@given(trees(), distributions(), st.integers(1, 4), st.sampled_from([None, 0.1, 0.2]), st.integers(0, 12))
@settings(deadline=None)
def test_pruning_equals_the_reference(of: DraftTree, q: Sparse, k: int, eps: float | None, most: int) -> None:
    kept = pruned(of, q, k, eps, most)
    kept.validate()
    by_token = dict(zip(q.ids.tolist(), q.q.tolist(), strict=True))
    assert set(paths(kept)) == pruned_ref(paths(of), by_token, k, eps, most)
    if most >= len(of):  # exactly what fails the predicate is gone
        likeliest = sorted(by_token, key=lambda token: (-by_token[token], token))[:k]
        for path in paths(of):
            passes = path[0] in likeliest or (eps is not None and by_token.get(path[0], 0.0) >= eps)
            assert (path in paths(kept)) == passes


@given(trees(), trees(), st.integers(0, 20))
@settings(deadline=None)
def test_the_draft_has_what_retrieval_leaves(own: DraftTree, other: DraftTree, more: int) -> None:
    """The union of path sets; as many of the draft's best nodes as fit beside all of the other tree."""
    place = list(paths(own))
    wanted = [place.index(path) if path in place else len(own) for path in paths(other)]
    assert common_nodes(own, other).tolist() == wanted
    num_nodes = len(other) + more
    room = room_beside(own, other, num_nodes)
    sizes = [len({*place[:n], *paths(other)}) for n in range(len(own) + 1)]
    assert sizes[room] <= num_nodes
    assert room == len(own) or sizes[room + 1] > num_nodes


def test_nothing_retrieved_leaves_the_drafts_tree() -> None:
    asked = request("a")
    alone = draft().propose([asked])[0]
    for of in ([DraftTree.empty()], [DraftTree.empty()] * 3, []):
        assert set(paths(fused(*of).propose([asked])[0])) == set(paths(alone))
    # Nor does what is pruned: a token that the draft does not know of.
    unknown = tree([VOCAB, VOCAB + 1], [-1, 0], [0.9, 0.8])
    assert set(paths(fused(unknown).propose([asked])[0])) == set(paths(alone))


@given(trees(), trees(), st.integers(1, 16), st.sampled_from([0.25, 0.5, 1.0]))
@settings(deadline=None, max_examples=50)
def test_the_union_of_both_within_their_budgets(
    one: DraftTree, two: DraftTree, budget: int, share: float
) -> None:
    asked = request("a", budget_tokens=budget)
    own = draft()
    alone = own.propose([asked])[0]
    q = dict(zip(own.first["a"].ids.tolist(), own.first["a"].q.tolist(), strict=True))
    made = fused(one, two, retrieval_share=share, first_k=3).propose([asked])[0]
    made.validate()
    assert made.drawn is None
    union = paths(DraftTree.merge([one.prefix(budget), two.prefix(budget)], 99))
    kept = pruned_ref(union, q, 3, None, int(share * budget))
    parts = set(paths(made))
    assert kept <= parts
    assert parts - kept <= set(paths(alone))
    # The likeliest nodes of the draft are not displaced.
    assert set(list(paths(alone))[: budget - int(share * budget)]) <= parts
    assert len(parts) == min(budget, len(kept | set(paths(alone))))


@given(trees(), st.lists(st.integers(0, 4), min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_accepted_is_the_longer_of_both(of: DraftTree, text: list[int]) -> None:
    """Beside the draft's likeliest nodes and what is left of retrieval, whatever the text: so is what is expected."""
    asked = request("a", budget_tokens=16)
    own = draft()
    alone = own.propose([asked])[0].prefix(8)
    kept = pruned(of, own.first["a"], 10, None, 8)
    made = fused(of).propose([asked])[0]
    assert len(made.path(text)) >= max(len(alone.path(text)), len(kept.path(text)))


def test_requests_that_the_draft_is_not_asked_about() -> None:
    """Reading them costs more than a token, heads know nothing of them, or they get no drafts."""
    made = fused(tree([VOCAB, 3], [-1, 0], [0.9, 0.8]))
    read: list[set[str]] = []
    made.read = read.append
    made.least_first = {"dear": 1.5}
    made.draft.blind = {"blind"}
    requests = [request(name) for name in ("a", "dear", "blind")] + [request("none", budget_tokens=0)]
    a, dear, blind, none = made.propose(requests)
    assert read == [{"a", "blind"}]
    assert VOCAB not in a.tokens
    assert dear.tokens.tolist() == blind.tokens.tolist() == [VOCAB, 3]
    assert len(none) == 0
    made.propose([request("dear")])  # what the draft has said of others is nobody's
    assert not made.draft.first


def test_what_is_retrieved_is_not_longer_than_asked() -> None:
    class Asked(Scripted):
        depths: list[int]

        def propose(self, requests: Any) -> list[DraftTree]:
            self.depths = [each.max_depth for each in requests]
            return super().propose(requests)

    one = Asked(DraftTree.empty())
    Rasd([draft(), one], max_continuation=3).propose([request("a"), request("b", max_depth=2)])
    assert one.depths == [3, 2]


def test_it_learns_as_its_parts_do() -> None:
    made = fused(tree([1, 2], [-1, 0], [0.9, 0.8]))
    before = made.calibration.trials.sum()
    made.propose([request("r")])
    made.observe(verified([1, 2, 3]))
    assert made.calibration.trials.sum() != before
    again = fused(DraftTree.empty())
    again.load_state_dict(made.state_dict())
    assert (again.calibration.hits == made.calibration.hits).all()


def test_options() -> None:
    made = Rasd.from_options(RasdOptions(model="m", retrieval=["suffix_tree", "input_copy"]), VOCAB)
    assert [type(each).__name__ for each in made.drafters] == ["DySpec", "SuffixDecoding", "InputCopy"]
    assert not made.draft.draws
    head = RasdOptions(model="m", draft="eagle_tree", max_depth=5)
    assert draft_of(head) == EagleOptions(model="m", max_depth=5)
    assert reads_nodes(head)
    with_store = RasdOptions(model="m", datastore="/s", retrieval=[], max_continuation=6)
    assert with_store.drafters[1:] == [{"method": "rest", "datastore": "/s", "max_continuation": 6}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model"),
        ({"model": "m", "retrieval": []}, r"nothing is retrieved.*or give a datastore"),
        ({"model": "m", "retrieval": ["input_copy", "input_copy"]}, "name each once"),
        ({"model": "m", "draft": "medusa_tree"}, "'dyspec', 'eagle_tree' or 'clover_tree'"),
        ({"model": "m", "first_k": 33}, "less than or equal to 32"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RasdOptions.model_validate(options)


def test_it_is_no_drafter_of_a_hybrid() -> None:
    with pytest.raises(ValidationError, match=r"'rasd' cannot be one of its own drafters, or of another's"):
        HybridOptions(drafters=["suffix_tree", {"method": "rasd", "model": "m"}])
