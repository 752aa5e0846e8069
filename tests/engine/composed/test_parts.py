# SPDX-License-Identifier: Apache-2.0
"""Schedulers and workers of parts: only those that an engine asks for, in the table's order, named in the class."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest

from vllm_ext.engine.composed import parts, scheduler, worker

ROOM = "vllm_ext.engine.scheduler."
# A server with a method that drafts without a model, and nothing else of ours.
ALONE = f"""
import sys
from vllm_ext.engine.composed.parts import load
from vllm_ext.engine.composed import scheduler, worker
made = load(scheduler.path_of(["StructuredDrafts", "DraftCounts"], ahead=False))
load(worker.path_of(["Speculation"]))
print(*sorted(name for name in sys.modules if name.startswith("{ROOM}")), sep=",")
print(*(kind.__name__ for kind in made.__mro__ if kind.__module__.startswith("vllm_ext")), sep=",")
"""


def test_what_was_not_asked_for_is_not_even_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE], check=True, capture_output=True, text=True
    )
    loaded, made = done.stdout.splitlines()[-2:]
    assert loaded.split(",") == [f"{ROOM}drafts", f"{ROOM}structured_drafts"]
    assert made.split(",") == ["StructuredDrafts_DraftCounts", "StructuredDrafts", "DraftCounts"]


@pytest.mark.parametrize("table", [scheduler, worker])
def test_all_parts_go_together(table: object) -> None:
    """In the table's order; a part has what it builds on behind it."""
    known = table.PARTS  # type: ignore[attr-defined]
    for asked in combinations(known, 3):
        names = [name for name in known if name in asked]
        path = table.path_of(asked, ahead=True) if table is scheduler else table.path_of(asked)  # type: ignore[attr-defined]
        made = parts.load(path)
        mixins = [parts.load(known[name]) for name in names]
        assert [kind for kind in made.__mro__ if kind in mixins] == mixins
        assert made is parts.load(path)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Nothing",
        "DraftCounts_DraftSlots",
        "Async_",
        "DraftCounts_DraftCounts",
        "__path__",
        "Overx_Budget",
    ],
)
def test_a_name_that_lists_no_parts_is_none(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(scheduler, name)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(KeyError, match="no part 'Nothing'; there are DraftSlots, "):
        scheduler.path_of(["Nothing"], ahead=False)
