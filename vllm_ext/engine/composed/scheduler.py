# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with parts of ours: ``scheduler_cls`` names the class, and with it the parts.

``Async_`` before them says that vLLM's own schedules steps ahead; ``Over`` with a path in hexadecimal, that it is a
class of the user's own instead.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from vllm_ext.engine.composed import parts

_ROOM = "vllm_ext.engine.scheduler"
AHEAD, OVER = "Async_", "Over"
# The outermost first: an outer one's methods see what inner ones have made of the step.
PARTS = {
    "DraftSlots": f"{_ROOM}.drafts.DraftSlots",
    "StructuredDrafts": f"{_ROOM}.structured_drafts.StructuredDrafts",
    "DraftCounts": f"{_ROOM}.drafts.DraftCounts",
    "RuleReports": f"{_ROOM}.rule_reports.RuleReports",
    "CompanionBlocks": f"{_ROOM}.companion_blocks.CompanionBlocks",
    "SharedGrammars": f"{_ROOM}.shared_grammars.SharedGrammars",
    "EvictedBlocks": f"{_ROOM}.evicted_blocks.EvictedBlocks",
    "FaultyRequests": f"{_ROOM}.faulty_requests.FaultyRequests",
    "LookaheadRequests": f"{_ROOM}.lookahead.LookaheadRequests",
    "PairedRequests": f"{_ROOM}.paired.PairedRequests",
    "DeferredTokens": f"{_ROOM}.deferred.DeferredTokens",
    "Budget": f"{_ROOM}.budget.Budget",
    "DraftBlocks": f"{_ROOM}.draft_blocks.DraftBlocks",
    "Counts": f"{_ROOM}.counts.Counts",
}


def path_of(asked: Collection[str], ahead: bool) -> str:
    """What to put in ``scheduler_cls``.

    Args:
        asked: names of parts.
        ahead: whether steps are scheduled ahead (``async_scheduling``).
    """
    return f"{__name__}.{AHEAD if ahead else ''}{parts.name_of(PARTS, asked)}"


def path_over(asked: Collection[str], base: str) -> str:
    """What to put in ``scheduler_cls`` instead of the user's.

    Args:
        asked: names of parts.
        base: path of the user's class, which derives from vLLM's.
    """
    return f"{__name__}.{OVER}{base.encode().hex()}_{parts.name_of(PARTS, asked)}"


def has(vllm_config: Any, part: str) -> bool:
    """Whether an engine's scheduler has a part."""
    module, _, name = str(vllm_config.scheduler_config.scheduler_cls).rpartition(".")
    return module == __name__ and part in name.split("_")


@functools.cache
def __getattr__(name: str) -> type[Any]:
    if name.startswith(OVER):
        prefix = name.partition("_")[0]
        try:
            users = bytes.fromhex(prefix.removeprefix(OVER)).decode()
        except ValueError:
            raise AttributeError(name) from None
        return parts.compose(PARTS, f"{__name__}.{name}", users, prefix=f"{prefix}_")
    ahead = name.startswith(AHEAD)
    base = "async_scheduler.AsyncScheduler" if ahead else "scheduler.Scheduler"
    return parts.compose(
        PARTS, f"{__name__}.{name}", f"vllm.v1.core.sched.{base}", prefix=AHEAD if ahead else ""
    )
