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
from vllm_ext.proposers.rasd import Rasd, RasdOptions, common_nodes, cut, pruned, room_beside
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


def pruned_ref(of: set[Path], q: dict[int, float], k: int | None, eps: float | None) -> set[Path]:
    """What passes the card's predicate."""
    if k is None:
        return of
    likeliest = sorted(q, key=lambda token: (-q[token], token))[:k]
    return {path for path in of if path[0] in likeliest or (eps is not None and q.get(path[0], 0.0) >= eps)}


def cut_ref(of: dict[Path, float], q: dict[int, float], beside: set[Path], most: int) -> set[Path]:
    """By the card's rank, as long as there is room; what is in both trees needs none."""
    kept: set[Path] = set()
    for path in sorted(of, key=lambda path: -of[path] * q.get(path[0], min(q.values()))):
        if path in beside or len(kept - beside) < most:
            kept.add(path)
    return kept


def by_token(q: Sparse) -> dict[int, float]:
    return dict(zip(q.ids.tolist(), q.q.tolist(), strict=True))


@given(trees(), distributions(), st.sampled_from([None, 1, 2, 4]), st.sampled_from([None, 0.1, 0.2]))
@settings(deadline=None)
def test_pruning_drops_what_is_not_plausible(
    of: DraftTree, q: Sparse, k: int | None, eps: float | None
) -> None:
    kept = pruned(of, q, k, eps)
    kept.validate()
    assert set(paths(kept)) == pruned_ref(set(paths(of)), by_token(q), k, eps)
    assert {path: paths(of)[path] for path in paths(kept)} == paths(kept)


@given(trees(), distributions(), trees(), st.integers(0, 12))
@settings(deadline=None)
def test_the_cut_equals_the_reference(of: DraftTree, q: Sparse, beside: DraftTree, most: int) -> None:
    kept = cut(of, q, beside, most)
    kept.validate()
    assert set(paths(kept)) == cut_ref(paths(of), by_token(q), set(paths(beside)), most)


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
    kept = paths(fused(unknown, first_k=None).propose([asked])[0])
    assert set(paths(unknown)) <= set(kept)


@given(trees(), trees(), st.integers(1, 16), st.sampled_from([0.25, 0.5, 1.0]))
@settings(deadline=None, max_examples=50)
def test_the_union_of_both_within_their_budgets(
    one: DraftTree, two: DraftTree, budget: int, share: float
) -> None:
    asked = request("a", budget_tokens=budget)
    own = draft()
    alone = own.propose([asked])[0]
    q = by_token(own.first["a"])
    made = fused(one, two, retrieval_share=share, first_k=3).propose([asked])[0]
    made.validate()
    assert made.drawn is None
    found = paths(DraftTree.merge([one.prefix(2 * budget), two.prefix(2 * budget)], 99))
    plausible = {path: found[path] for path in found if path in pruned_ref(set(found), q, 3, None)}
    likeliest = set(list(paths(alone))[: budget - int(share * budget)])
    kept = cut_ref(plausible, q, likeliest, int(share * budget))
    parts = set(paths(made))
    assert kept <= parts
    assert parts - kept <= set(paths(alone))
    assert likeliest <= parts  # not displaced
    assert len(parts) == min(budget, len(kept | set(paths(alone))))


@given(trees(), st.lists(st.integers(0, 4), min_size=1, max_size=8))
@settings(deadline=None, max_examples=50)
def test_accepted_is_the_longer_of_both(of: DraftTree, text: list[int]) -> None:
    """Beside the draft's likeliest nodes and what is left of retrieval, whatever the text: so is what is expected."""
    asked = request("a", budget_tokens=16)
    own = draft()
    alone = own.propose([asked])[0].prefix(8)
    q = own.first["a"]
    kept = cut(pruned(of, q, 32, None), q, alone, 8)
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


def test_it_is_asked_where_passes_pay_beside_what_was_retrieved() -> None:
    """Retrieval that is right leaves passes nothing to bring; where it is wrong, or says nothing, they do."""
    least = {"r": 0.3}

    def asked(retrieved: DraftTree, emitted: list[int], steps: int) -> bool:
        made = fused(retrieved)
        made.least_first = least
        for _ in range(steps):
            made.propose([request("r")])
            made.observe(verified(emitted))
        made.propose([request("r")])
        return "r" in made.draft.first

    chain = tree([1, 2], [-1, 0], [0.9, 0.8])
    assert not asked(chain, [1, 2, 3], 30)
    assert asked(DraftTree.empty(), [1, 2, 3], 0)
    assert asked(chain, [4, 5, 6], 30)
    # Behind the first a pass is worth as much less as the text goes on as retrieval says.
    made = fused(tree([1], [-1], [0.5]))
    made.least_reach = 0.1
    made.propose([request("r")])
    others = made._others([request("r")], [[DraftTree.empty()], [tree([1], [-1], [0.5])]])
    worth = made.gain.given_to("r") * (1.0 - float(others["r"].probabilities[0]))
    assert made.draft.least_reach == pytest.approx(0.1 / worth)


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
