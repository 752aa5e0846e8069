# SPDX-License-Identifier: Apache-2.0
"""What a draft model has read: by request, and by the blocks that requests share. Engine: tests/engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_ext.engine.draft_model.own_caches import packed
from vllm_ext.engine.draft_model.separate import SeparateModel

BLOCK = 4


def step(new: dict[str, tuple[list[int], int]], cached: dict[str, Any], resumed: frozenset[str]) -> Any:
    """The scheduler's output: blocks and computed tokens of new requests, new blocks of the others."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[None if blocks is None else (blocks,) for blocks, _ in cached.values()],
            num_computed_tokens=[computed for _, computed in cached.values()],
            resumed_req_ids=set(resumed),
        ),
    )


class Bookkeeping(SeparateModel):
    """A companion without a model: `read` takes the place of a pass."""

    def __init__(self, num_blocks: int) -> None:
        self._group_id, self._block_size = 0, BLOCK
        self._known, self._right = {}, np.zeros(num_blocks, bool)
        self._growth, self._roots = {}, {}
        self._runner = SimpleNamespace(requests={})

    def schedule(
        self,
        new: dict[str, tuple[list[int], int]] | None = None,
        cached: dict[str, Any] | None = None,
        resumed: frozenset[str] = frozenset(),
    ) -> None:
        self.begin_step(step(new or {}, cached or {}, resumed))
        for name, (blocks, _) in (new or {}).items():
            self._runner.requests[name] = SimpleNamespace(block_ids=(list(blocks),))
        for name, (blocks, _) in (cached or {}).items():
            own = self._runner.requests[name].block_ids[0]
            own[:] = blocks if name in resumed else own + (blocks or [])

    def read(self, name: str, last: int) -> None:
        first, self._known[name] = self._read_of(name), last
        self._fill(name, first, last)


def test_a_block_is_right_once_it_is_read_for_anyone() -> None:
    companion = Bookkeeping(8)
    companion.schedule({"a": ([1, 2, 3], 0)})
    assert companion.unread(["a"], [10]) == [10]
    companion.read("a", 10)
    assert companion.unread(["a"], [11]) == [1]
    # Its first two blocks are another's prefix; the third is not full, and the other's own.
    companion.schedule({"b": ([1, 2, 4], 8)})
    assert companion.unread(["b"], [11]) == [3]
    # What was not read is not right, though the prefix cache has it.
    companion.schedule({"c": ([5, 6], 0)})
    companion.schedule({"d": ([5, 6, 7], 8)})
    assert companion.unread(["d"], [9]) == [9]
    companion.read("d", 9)
    assert companion.unread(["c"], [8]) == [0]


def test_a_block_that_is_given_out_again_is_not_right() -> None:
    companion = Bookkeeping(8)
    companion.schedule({"a": ([1, 2], 0)})
    companion.read("a", 8)
    companion.forget("a")
    # Block 2 comes to a new request in its first step, block 1 to a running one.
    companion.schedule({"b": ([2, 3], 0), "c": ([4], 0)})
    companion.schedule(cached={"c": ([1], 4), "b": (None, 8)})
    assert companion.unread(["b", "c"], [8, 8]) == [8, 8]


def test_a_request_that_comes_back_has_what_the_cache_kept() -> None:
    companion = Bookkeeping(8)
    companion.schedule({"a": ([1, 2, 3], 0)})
    companion.read("a", 12)
    companion.schedule(cached={"a": ([1, 5, 6], 4)}, resumed=frozenset({"a"}))
    assert companion.unread(["a"], [12]) == [8]


def test_a_pass_is_full_before_the_next_begins() -> None:
    assert list(packed([(0, 3, 8), (2, 0, 9), (5, 1, 2)], 6)) == [
        [(0, 3, 8), (2, 0, 1)],
        [(2, 1, 7)],
        [(2, 7, 9), (5, 1, 2)],
    ]
    assert list(packed([(0, 0, 6)], 6)) == [[(0, 0, 6)]]
    assert list(packed([], 6)) == []
