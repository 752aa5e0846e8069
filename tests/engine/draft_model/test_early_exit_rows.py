# SPDX-License-Identifier: Apache-2.0
"""When a step may begin behind the exit: only rows that were drafted, in the places they were drafted for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_ext.engine.draft_model.early_exit import EarlyExit, _Settled
from vllm_ext.engine.tree_layout import StepTrees


def early_exit() -> EarlyExit:
    """Request a waits at 16 tokens, its tree 7 with children 8 and 9; b at 5, with a root alone."""
    model = SimpleNamespace(model="m", get_vocab_size=lambda: 50)
    exits = EarlyExit(SimpleNamespace(model_config=model), [2])
    exits._settled = {
        "a": _Settled(16, np.array([7, 8, 9], np.int32), np.array([-1, 0, 0], np.int32), [0, 2, 3]),
        "b": _Settled(5, np.array([4], np.int32), np.array([-1], np.int32), [1]),
    }
    return exits


def step(**changes: Any) -> StepTrees:
    values: dict[str, Any] = {
        "row_start": [0, 3, 4],
        "tokens": [7, 8, 9, 4],
        "parents": [-1, 0, 0, -1],
        "query_row": [0, 3],
        "context": [16, 5],
        **changes,
    }
    decoding: list[int] = values.pop("decoding", [0, 1])
    arrays: dict[str, Any] = {name: np.array(value, np.int32) for name, value in values.items()}
    return StepTrees(**arrays, branching=[0], decoding=decoding)


def test_what_was_drafted_is_found() -> None:
    assert early_exit()._rows(["a", "b"], step()) == [0, 2, 3, 1]
    # The scheduler has left out the last node.
    cut = step(row_start=[0, 2, 3], tokens=[7, 8, 4], parents=[-1, 0, -1], query_row=[0, 2])
    assert early_exit()._rows(["a", "b"], cut) == [0, 2, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [7, 8, 8, 4]},
        {"parents": [-1, 0, 1, -1]},
        {"context": [17, 5]},
        {"decoding": [1]},
    ],
    ids=["token", "parent", "place", "prompt"],
)
def test_anything_else_runs_the_whole_model(changes: dict[str, Any]) -> None:
    assert early_exit()._rows(["a", "b"], step(**changes)) is None
    assert early_exit()._rows(["a", "c"], step()) is None


def test_a_request_that_comes_back_has_other_blocks() -> None:
    """Its last token may be where it was before, but not what the draft has written for it."""
    exits = early_exit()
    exits.begin_step(SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"b", "z"})))
    assert exits._rows(["a", "b"], step()) is None
    assert exits._rows(["a"], step(row_start=[0, 3], tokens=[7, 8, 9], parents=[-1, 0, 0], decoding=[0])) == [
        0,
        2,
        3,
    ]
