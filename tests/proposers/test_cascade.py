# SPDX-License-Identifier: Apache-2.0
"""Draft cascades: trees are what they are without, in fewer passes, and what is read ahead takes nobody's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import toy_draft
from pydantic import ValidationError

from vllm_ext.proposers.base import Request
from vllm_ext.proposers.cascade import CONTEXT, Cascade
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer, Rows, places_per_node
from vllm_ext.proposers.registry import load_method
from vllm_ext.proposers.tree import DraftTree, Int32

VOCAB = 24
ROOM = 40
GREEDY: dict[str, Any] = {}
SEEDED, DRAWN = {"temperature": 0.8, "seed": 3}, {"temperature": 0.8}
METHODS: dict[str, dict[str, Any]] = {
    "specdec_pp": {"stop_threshold": 0.9999},
    "static_tree": {"branching": [1] * 6},
    "rsd_c": {"branching": [2, 2, 1, 1]},
    "dyspec": {},
    "rsd_s": {"width": 2},
}
# How many times fewer passes there are, at least.
LEAST_SPARED = {"specdec_pp": 1.5, "static_tree": 1.5, "rsd_c": 1.0, "dyspec": 1.1, "rsd_s": 1.1}


def after(path: Sequence[int]) -> tuple[Int32, Any]:
    """What the draft says after a text: it looks at the last two tokens, and is mostly sure."""
    logits = 3.0 * np.random.default_rng([7, *path[-2:]]).standard_normal(VOCAB)
    log_q = logits - np.log(np.exp(logits).sum())
    ids = np.argsort(-log_q)[:8].astype(np.int32)
    return ids, log_q[ids].astype(np.float32)


class Reader:
    """A `DraftModel` that reads nodes in passes, parents perhaps in the same one, and knows each one's text."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}  # before the first place
        self.paths: dict[str, list[list[int]]] = {}  # by place
        self.passes = 0

    def begin(self, request: Request, num_read: int) -> None:
        self.texts[request.request_id] = request.tokens[:num_read].tolist()
        self.paths[request.request_id] = []

    def read(self, names: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        self.passes += 1
        assert [name for i, name in enumerate(names) if name not in names[:i]] == sorted(set(names))
        assert list(names) == sorted(names)  # a request's stand together
        found = []
        for name, parent, token in zip(names, parents, tokens, strict=True):
            paths = self.paths[name]
            assert -1 <= parent < len(paths)
            paths.append([*(paths[parent] if parent >= 0 else self.texts[name]), token])
            assert len(paths) <= ROOM
            found.append(after(paths[-1]))
        return Rows(np.stack([ids for ids, _ in found]), np.stack([log_q for _, log_q in found]))

    def roots(self, request_ids: Sequence[str]) -> Rows:
        found = [after(self.texts[name]) for name in request_ids]
        return Rows(np.stack([ids for ids, _ in found]), np.stack([log_q for _, log_q in found]))

    nodes = read


class Ahead(Reader):
    """The same with a cascade; of some requests the last tokens are read with the tree."""

    def __init__(self, most_guesses: int = 4, most_asked: int = 24) -> None:
        super().__init__()
        self.cascade = Cascade(VOCAB, most_guesses, most_asked, lambda name: ROOM - len(self.paths[name]))
        self.unread: dict[str, int] = {}

    def begin(self, request: Request, num_read: int) -> None:
        self.unread[request.request_id] = len(request.tokens) - num_read
        super().begin(request, num_read)
        self.cascade.start(request.request_id, request.tokens)

    def roots(self, request_ids: Sequence[str]) -> Rows:
        found: dict[str, tuple[Any, Any]] = {}
        together = [name for name in request_ids if self.unread[name]]
        if together:
            rows = self.cascade.roots(together, [self.unread[name] for name in together], self.read)
            self.passes -= 1  # the other reader's roots are no passes either
            found |= {name: (ids, log_q) for name, ids, log_q in zip(together, *rows, strict=True)}
        for name in request_ids:
            if name not in found:
                found[name] = after(self.texts[name])
                self.cascade.rooted(name, *found[name])
        return Rows(*(np.stack([found[name][part] for name in request_ids]) for part in (0, 1)))

    def nodes(self, names: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        return self.cascade.nodes(names, parents, tokens, self.read)


def requests(step: int, texts: dict[str, list[int]], sampling: dict[str, Any]) -> list[Request]:
    made = []
    for name, text in texts.items():
        made.append(toy_draft.request(name, **sampling, budget_tokens=10, max_depth=8))
        object.__setattr__(made[-1], "tokens", np.array(text[: 4 + 3 * step], np.int32))
    return made


def play(reader: Reader, method: str, sampling: dict[str, Any], steps: int = 30) -> list[DraftTree]:
    """Two requests' trees, step by step; what the target says is mostly what the draft would."""
    proposer_class = load_method(method)
    options = {"model": "m", "num_speculative_tokens": 12, "budget": "fixed", **METHODS[method]}
    proposer = proposer_class.from_options(proposer_class.Options.model_validate(options), VOCAB)
    assert isinstance(proposer, DraftModelProposer)
    proposer.draft = reader
    texts = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}
    noise = np.random.default_rng(0)
    for text in texts.values():
        while len(text) < 4 + 3 * steps:
            text.append(int(after(text)[0][0]) if noise.random() < 0.9 else int(noise.integers(VOCAB)))
    trees = []
    for step in range(steps):
        asked = requests(step, texts, sampling)
        for place, request in enumerate(asked):
            plain = not isinstance(reader, Ahead)
            # How much was read before: all, as of a prompt, or up to the last 1 to 3 tokens.
            reader.begin(
                request, len(request.tokens) - (0 if plain or (step + place) % 5 == 0 else 1 + step % 3)
            )
        trees += proposer.propose(asked)
    return trees


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, DRAWN], ids=["greedy", "seeded", "drawn"])
@pytest.mark.parametrize("method", METHODS)
def test_trees_are_the_same_in_fewer_passes(method: str, sampling: dict[str, Any]) -> None:
    """Tokens, parents, probabilities, and of drawn trees what verification is told."""
    plain, ahead = Reader(), Ahead()
    expected, found = play(plain, method, sampling), play(ahead, method, sampling)
    for one, other in zip(expected, found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        assert one.probabilities.tolist() == other.probabilities.tolist()
        assert (one.drawn is None) == (other.drawn is None) == (sampling is not DRAWN)
        if one.drawn is not None and other.drawn is not None:
            assert one.drawn.q.keys() == other.drawn.q.keys()
            for node, row in one.drawn.q.items():
                assert row.ids.tolist() == other.drawn.q[node].ids.tolist()
                assert row.q.tolist() == other.drawn.q[node].q.tolist()
    assert max(map(len, found)) > 4
    least = LEAST_SPARED[method] if sampling is not DRAWN else 1.0
    assert plain.passes >= least * ahead.passes


def test_without_guesses_each_round_is_a_pass() -> None:
    """The passes over nodes are then those there are without a cascade."""
    plain, ahead = Reader(), Ahead(most_guesses=0)
    play(plain, "static_tree", GREEDY)
    play(ahead, "static_tree", GREEDY)
    assert ahead.passes == plain.passes


@pytest.mark.parametrize("most_asked", [24, 36, 40])
def test_places_of_what_is_asked_for_are_kept(most_asked: int) -> None:
    """`Reader.read` checks the room. Where all of it may be asked for, nothing is read ahead."""
    ahead, plain = Ahead(6, most_asked), Reader()
    play(plain, "dyspec", GREEDY)
    play(ahead, "dyspec", GREEDY)
    most = max(len(paths) for paths in ahead.paths.values())
    assert most <= ROOM
    if most_asked == ROOM:
        unread = len(ahead.paths["a"]) - max(ahead.cascade._states["a"].asked, default=0) - 1
        assert unread <= 0


def test_contexts_reach_into_the_text() -> None:
    """What is looked up, by place: committed tokens, the root, nodes; and before the text nothing."""
    cascade = Cascade(VOCAB, 0, 0, lambda _: 99)
    cascade.start("", np.array([9, 8, 7], np.int32))

    def answer(names: Sequence[str], *_: Any) -> Rows:
        rows = [after([0])] * len(names)
        return Rows(np.stack([ids for ids, _ in rows]), np.stack([log_q for _, log_q in rows]))

    cascade.roots([""], [2], answer)
    cascade.nodes([""], [-1], [5], answer)
    cascade.nodes([""], [0], [6], answer)
    state = cascade._states[""]
    assert state.last(0).tolist() == [-1, -1, 9, 8]
    assert state.last(1).tolist() == [-1, 9, 8, 7]
    assert state.last(2).tolist() == [9, 8, 7, 5]
    assert state.last(3).tolist() == [8, 7, 5, 6]
    assert len(state.last(3)) == CONTEXT


def test_a_request_that_is_gone_leaves_nothing() -> None:
    """Also its place in the text: another of its name begins at the start."""
    cascade = Cascade(VOCAB, 2, 0, lambda _: 9)
    cascade.start("", np.array([1, 2, 3], np.int32))
    cascade.forget("")
    assert not cascade._states
    assert not cascade._recorded


def test_options() -> None:
    """Guesses go with a cascade alone, and take slots of the cache."""
    options = DraftModelOptions(model="m", cascade="token_recycling")
    assert options.guesses == 6
    assert places_per_node(options) == 2 * places_per_node(DraftModelOptions(model="m"))
    assert DraftModelOptions(model="m").guesses == 0
    with pytest.raises(ValidationError, match="add cascade='token_recycling'"):
        DraftModelOptions(model="m", cascade_tokens=3)
