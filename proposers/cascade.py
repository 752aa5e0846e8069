# SPDX-License-Identifier: Apache-2.0
"""A draft cascade: the draft model has a drafter of its own, so that one of its passes says several tokens.

Each pass of the draft reads, below the requested nodes, what the draft is likely to say next: a small tree of Token
Recycling, from tables of what the draft itself ranked highest. The distribution of a node that was read ahead is there
without a pass when the node is requested. Trees are what they are without a cascade, token for token and
probability for probability, drawn ones too: it only changes in which pass a node is read.

Source: "Speculative Decoding Meets Quantization: Compatibility Evaluation and Hierarchical Framework Design"
(SpecMQuant), arXiv 2505.22179, section 4: a small model turns the trees of its own drafter into the chain that the
target verifies. Token Recycling: arXiv 2408.08696 (`token_recycling`).

Deviations: the paper's innermost drafter is a trained EAGLE head; here nothing is trained. The paper collects at least
six tokens before the target is asked; here the method says how far its tree goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_ext.kernels.best_first_tree import EMPTY, SuccessorTables, grow_trees, record_rows, record_text
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.proposers.token_recycling import PAIR_SLOTS, SHARES, TEXT_SLOTS, prior_chances
from vllm_ext.proposers.tree import Float32, Int32

WIDTH = 8  # successors kept of a token, and of a pair
CONTEXT = 4  # tokens of the longest context looked up

# Reads nodes in one pass of the draft, as `DraftModel.nodes` does; but parents may be nodes of the same pass, before
# their children, and nodes of one request stand together.
Read = Callable[[Sequence[str], Sequence[int], Sequence[int]], Rows]


@dataclass(slots=True)
class _State:
    """The nodes of one request that were read since its last committed tokens were."""

    text: Int32  # [num_tokens], committed; a view
    root: int = ROOT  # the place of the last of them, where nodes are counted from an earlier one
    # By place, that is in the order in which nodes were read:
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # places
    rows: list[tuple[Int32, Float32]] = field(default_factory=list)
    found: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # by a place and a token below it, its place
    asked: list[int] = field(default_factory=list)  # by node asked for, its place

    def add(self, parent: int, token: int) -> int:
        """A node more that will be read; gives its place."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.found[parent, token] = len(self.tokens) - 1
        return len(self.tokens) - 1

    def last(self, place: int) -> Int32:
        """int32 ``[CONTEXT]``: the last tokens up to a node, EMPTY before the first."""
        path: list[int] = []
        while place > self.root and len(path) < CONTEXT:
            path.append(self.tokens[place])
            place = self.parents[place]
        end = len(self.text) - (self.root - place if place < self.root else 0)
        before = self.text[max(end - CONTEXT + len(path), 0) : end].tolist()
        known = before + path[::-1]
        return np.array([EMPTY] * (CONTEXT - len(known)) + known, np.int32)


class Cascade:
    """Reads ahead for a draft model.

    Args:
        vocab_size: number of token ids.
        most_guesses: nodes of a request that a pass reads ahead.
        most_asked: nodes of a request that may be asked for between two steps of the target: their places are kept.
        room: of a request, how many nodes more have a place.
    """

    def __init__(
        self, vocab_size: int, most_guesses: int, most_asked: int, room: Callable[[str], int]
    ) -> None:
        self.most_guesses = most_guesses
        self._most_asked, self._room = most_asked, room
        self._tables = SuccessorTables.empty(vocab_size, WIDTH, PAIR_SLOTS, TEXT_SLOTS)
        self._estimates: Float32 = prior_chances(CONTEXT)[..., None].astype(np.float32)
        self._states: dict[str, _State] = {}
        self._recorded: dict[str, int] = {}  # by request, tokens whose text is in the tables

    def start(self, request_id: str, text: Int32) -> None:
        """The target has committed tokens; what was read before is of no use any more.

        Args:
            request_id: any.
            text: int32 ``[num_tokens]``, prompt and output; kept as a view until the next call.
        """
        record_text(
            self._tables, np.ascontiguousarray(text, np.int32), self._recorded.get(request_id, 1), CONTEXT
        )
        self._recorded[request_id] = len(text)
        self._states[request_id] = _State(text)

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._states.pop(request_id, None)
        self._recorded.pop(request_id, None)

    def rooted(self, request_id: str, ids: Int32, log_q: Float32) -> None:
        """The last committed token was read without guesses: after it the draft says this, as a row of `Rows`."""
        last = self._states[request_id].last(ROOT)
        self._learn(last[None], [True], Rows(ids[None], log_q[None]))

    def roots(self, request_ids: Sequence[str], unread: Sequence[int], read: Read) -> Rows:
        """Read the last committed tokens in one pass with guesses below them.

        Args:
            request_ids: those of this pass.
            unread: by request, how many tokens; the places of nodes are counted from the first of them on.
            read: the pass.

        Returns:
            After the last token of each.
        """
        wanted: list[list[tuple[int, int]]] = []
        for request_id, many in zip(request_ids, unread, strict=True):
            state = self._states[request_id]
            state.root = many - 1
            wanted.append([(place - 1, token) for place, token in enumerate(state.text[-many:].tolist())])
        self._read(request_ids, wanted, read)
        return self._rows([(name, self._states[name].root) for name in request_ids])

    def nodes(
        self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int], read: Read
    ) -> Rows:
        """See `DraftModel.nodes`; ``read`` is called for those that were not read ahead, if there are any."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        asked: list[tuple[str, int, int]] = []
        for request_id, parent, token in zip(request_ids, parents, tokens, strict=True):
            state = self._states[request_id]
            below = state.root if parent == ROOT else state.asked[parent]
            asked.append((request_id, below, token))
            if (below, token) not in state.found:
                wanted.setdefault(request_id, []).append((below, token))
        if wanted:
            self._read(list(wanted), list(wanted.values()), read)
        places = [(name, self._states[name].found[below, token]) for name, below, token in asked]
        for name, place in places:
            self._states[name].asked.append(place)
        return self._rows(places)

    def _rows(self, places: Sequence[tuple[str, int]]) -> Rows:
        rows = [self._states[name].rows[place] for name, place in places]
        return Rows(np.stack([ids for ids, _ in rows]), np.stack([log_q for _, log_q in rows]))

    def _read(
        self, request_ids: Sequence[str], wanted: Sequence[Sequence[tuple[int, int]]], read: Read
    ) -> None:
        """One pass over nodes, given by request as parent's place and token, and over guesses below the childless."""
        firsts = []  # by request, the first of its places in this pass
        below: list[tuple[int, int]] = []  # nodes that get guesses: request and place
        budgets: list[int] = []
        for index, (name, nodes) in enumerate(zip(request_ids, wanted, strict=True)):
            state = self._states[name]
            firsts.append(len(state.tokens))
            left = self._room(name) - len(nodes) - max(self._most_asked - len(state.asked) - len(nodes), 0)
            places = [state.add(parent, token) for parent, token in nodes]
            childless = [place for place in places if place >= state.root]
            many = max(min(self.most_guesses, left), 0)
            for order, place in enumerate(childless):  # the first ones are the likeliest
                below.append((index, place))
                budgets.append(many // len(childless) + (order < many % len(childless)))
        self._guess(request_ids, below, budgets)
        names, parents, tokens, contexts, confirmed = [], [], [], [], []
        for name, first, nodes in zip(request_ids, firsts, wanted, strict=True):
            state = self._states[name]
            for place in range(first, len(state.tokens)):
                names.append(name)
                parents.append(state.parents[place])
                tokens.append(state.tokens[place])
                contexts.append(state.last(place))
                confirmed.append(place < first + len(nodes))
        rows = read(names, parents, tokens)
        for name, ids, log_q in zip(names, *rows, strict=True):
            self._states[name].rows.append((ids, log_q))
        self._learn(np.stack(contexts), confirmed, rows)

    def _guess(
        self, request_ids: Sequence[str], below: Sequence[tuple[int, int]], budgets: Sequence[int]
    ) -> None:
        """Add what the draft will likely say below some nodes."""
        if not any(budgets):
            return
        states = [self._states[request_ids[index]] for index, _ in below]
        grown = grow_trees(
            self._tables,
            self._estimates,
            np.stack([state.last(place) for state, (_, place) in zip(states, below, strict=True)]),
            np.array(budgets, np.int64),
            np.array(budgets, np.int64),
            np.zeros(len(budgets), np.bool_),
            np.empty((0, WIDTH), np.int32),
        )
        for index, (state, (_, root)) in enumerate(zip(states, below, strict=True)):
            tree = grown.tree(index)
            places: list[int] = []
            for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
                places.append(state.add(places[parent] if parent >= 0 else root, token))

    def _learn(self, contexts: Int32, confirmed: Sequence[bool], rows: Rows) -> None:
        """Of nodes ``[num_rows, CONTEXT]`` that were read, keep what the draft ranked highest after them."""
        num_rows = len(contexts)
        record_rows(
            self._tables,
            np.arange(num_rows + 1, dtype=np.int32),
            np.ascontiguousarray(contexts[:, -1]),
            np.full(num_rows, EMPTY, np.int32),
            np.array(confirmed, np.bool_),
            np.ascontiguousarray(contexts[:, -2]),
            np.ascontiguousarray(rows.ids[:, :WIDTH], np.int32),
            np.ascontiguousarray(rows.log_q[:, :WIDTH], np.float32),
            SHARES,
        )

    def warm_up(self) -> None:
        """Compile what would else stall the first request, on a small one: compiled code is shared by all."""
        small = Cascade(WIDTH, 1, 0, lambda _: 2)
        ids = np.arange(WIDTH, dtype=np.int32)[None]
        small.start("", np.zeros(2, np.int32))
        small.roots([""], [1], lambda names, *_: Rows(ids.repeat(len(names), 0), -ids.astype(np.float32)))
