# SPDX-License-Identifier: Apache-2.0
"""Which committed rows an EAGLE head reads, and with which of the target's hidden states. Engine: test_eagle_engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.engine.draft_model.eagle import MOST_UNREAD, EaglePasses
from vllm_ext.engine.models.node_states import NodeStates
from vllm_ext.engine.tree_layout import starts
from vllm_ext.proposers.tree import Int32

BLOCK = 4


class Batch(EaglePasses):
    """A head without a model. A request's hidden state at a place is the number ``1000 * its text + place``."""

    def __init__(self) -> None:
        self._group_id, self._block_size = 0, BLOCK
        self._known, self._right, self.blind = {}, np.zeros(64, bool), set()
        self._growth, self._roots, self._unread = {}, {}, {}
        self._streams, self.passes, self._step = NodeStates(), [], []
        self._target_config: Any = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=10)
        )
        self.counts: list[str] = []
        self._count = self.counts.append
        self.texts: dict[str, int] = {}
        self.read: list[tuple[str, list[int]]] = []
        self._hidden = torch.zeros(0)
        self._runner = SimpleNamespace(requests={}, input_batch=SimpleNamespace(req_ids=[]))

    def begin(self, name: str, blocks: list[int], computed: int = 0, text: int = 1) -> None:
        self._begin(name, (blocks,), computed)
        self._runner.requests[name] = SimpleNamespace(block_ids=(list(blocks),))
        self.texts[name] = text

    def step(self, rows: dict[str, tuple[int, int, list[int], int]], drafting: set[str]) -> list[Any]:
        """A step of the target, and what is read after it.

        Args:
            rows: by request the first place of its query, its rows before the drafts, the accepted drafts' places among
                the drafts, from 1, and how many tokens it has afterwards.
            drafting: requests.
        """
        names = list(rows)
        self._runner.input_batch.req_ids = names
        lengths: list[int] = []
        hidden, query_row, context, accepted = [], [], [], []
        for name, (first, own, path, _) in rows.items():
            drafts = max(path, default=0)
            base = 1000 * self.texts[name]
            states = [base + first + i for i in range(own)] + [-1] * drafts
            for depth, row in enumerate(path):
                states[own - 1 + row] = base + first + own + depth
            query_row.append(sum(lengths) + own - 1)
            context.append(first + own - 1)
            accepted.append(path)
            lengths.append(own + drafts)
            hidden += states
        self._hidden = torch.tensor(hidden, dtype=torch.float32)[:, None]
        self._runner.query_start_loc = SimpleNamespace(np=starts(np.array(lengths)))
        self.verified(
            SimpleNamespace(  # type: ignore[arg-type]
                query_row=np.array(query_row, np.int32),
                context=np.array(context, np.int32),
                accepted=accepted,
            )
        )
        self.read = []
        self.advance([tokens for *_, tokens in rows.values()], drafting)
        return self.read

    def _features_of(self, rows: Int32) -> torch.Tensor:
        return self._hidden[torch.from_numpy(rows.astype(np.int64))]

    def _read(self, parts: Any, num_tokens: Any, drafting: set[str]) -> None:
        for slot, first, last in parts:
            name = self._runner.input_batch.req_ids[slot]
            unread = self._unread[name]
            states = torch.cat(unread.parts)[first - unread.first : last - unread.first, 0]
            # Each row gets the hidden state of its own place.
            assert states.tolist() == [1000 * self.texts[name] + place for place in range(first, last)]
            self.read.append((name, list(range(first, last))))


def test_a_prompt_in_chunks_then_drafts() -> None:
    batch = Batch()
    batch.begin("a", [1, 2, 3, 4])
    assert batch.step({"a": (0, 6, [], 9)}, set()) == [("a", [0, 1, 2, 3, 4, 5])]  # fills a block
    # Its last three, of which the third has no token behind it but the one just drawn.
    assert batch.step({"a": (6, 3, [], 10)}, {"a"}) == [("a", [6, 7, 8])]
    # Of four drafts the second and the fourth are accepted: rows of the tree, not the last ones.
    assert batch.step({"a": (9, 1, [2, 4], 13)}, {"a"}) == [("a", [9, 10, 11])]
    assert batch._known["a"] == 12  # all tokens but the last
    assert batch._growth == {}


def test_who_is_not_drafted_for_is_read_when_a_block_fills() -> None:
    batch = Batch()
    batch.begin("a", list(range(1, 40)))
    batch.step({"a": (0, 5, [], 6)}, {"a"})
    assert batch.step({"a": (5, 1, [], 7)}, set()) == []
    assert batch.step({"a": (6, 1, [], 8)}, set()) == []
    assert batch.step({"a": (7, 1, [], 9)}, set()) == [("a", [5, 6, 7])]
    batch._block_size = 1000
    found = [batch.step({"a": (8 + i, 1, [], 10 + i)}, set()) for i in range(MOST_UNREAD)]
    assert [bool(each) for each in found] == [False] * (MOST_UNREAD - 1) + [True]


def test_more_rows_than_a_step_may_have() -> None:
    batch = Batch()
    batch.begin("a", list(range(1, 20)))
    read = batch.step({"a": (0, 25, [], 26)}, {"a"})
    assert read == [("a", list(range(10))), ("a", list(range(10, 20))), ("a", list(range(20, 25)))]


def test_requests_that_share_a_prefix_in_one_step() -> None:
    """The scheduler lets one request have blocks that another fills in this very step, whichever comes first."""
    batch = Batch()
    batch.begin("a", [1, 2, 3])
    batch.begin("b", [1, 2, 4], computed=8)
    read = batch.step({"b": (8, 2, [], 11), "a": (0, 10, [], 11)}, {"a", "b"})
    assert read == [("a", list(range(10))), ("b", [8, 9])]
    assert not batch.blind


def test_a_prefix_that_the_head_has_not_read() -> None:
    """Hidden states of it will never come: no drafts, counted, until the request begins again."""
    batch = Batch()
    batch.begin("a", [1, 2, 3], computed=8)
    assert batch.step({"a": (8, 2, [], 11)}, {"a"}) == []
    assert batch.blind == {"a"}
    assert batch.step({"a": (10, 1, [], 12)}, {"a"}) == []
    assert batch.counts == ["fallbacks:hidden_states_missing"] * 2
    batch.begin("a", [4, 5, 6])  # preempted, and its blocks lost
    assert batch.step({"a": (0, 11, [], 12)}, {"a"}) == [("a", list(range(10))), ("a", [10])]
    batch.begin("b", [1, 2, 3], computed=8)
    batch.forget("b")
    assert not batch.blind


def test_a_step_that_is_done_again() -> None:
    """A token that was put off leaves its row without one behind it; the row comes again."""
    batch = Batch()
    batch.begin("a", [1, 2, 3])
    batch.step({"a": (0, 5, [], 6)}, {"a"})
    assert batch.step({"a": (5, 1, [], 6)}, set()) == []
    assert batch.step({"a": (5, 1, [], 7)}, {"a"}) == [("a", [5])]
