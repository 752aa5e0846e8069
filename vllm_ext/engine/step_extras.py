# SPDX-License-Identifier: Apache-2.0
"""What goes with a step beside vLLM's own fields, between scheduler and worker: one attribute of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext.samplers.steering import Deferral

ATTRIBUTE = "vllm_ext"


@dataclass
class StepExtras:
    """Of one `SchedulerOutput` or `ModelRunnerOutput`; a field that nobody has set says nothing."""

    # Of a SchedulerOutput.
    choices: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # by request: a place in the output, its token
    level: int | None = None  # nodes of a request on average, where its drafts are more
    budget: Mapping[str, float] | None = None  # now and then: the budget's figures, for gauges
    # By request that has given KV blocks back, how many it has kept; of each of these KV groups.
    kept_blocks: Mapping[str, int] = field(default_factory=dict)
    kept_in: Sequence[int] = ()
    # Of a ModelRunnerOutput.
    drafts: Any = None  # vLLM's DraftTokenIds, which would be asked for in a call of their own
    notes: Mapping[str, Mapping[int, float]] = field(
        default_factory=dict
    )  # by request, by place in its output
    deferrals: Mapping[str, Deferral | None] = field(
        default_factory=dict
    )  # by request; None: it waits, and asks again
    evicted: Mapping[str, Any] = field(
        default_factory=dict
    )  # by request: blocks, as `EvictionPolicy.settle` names them
    faults: Mapping[str, tuple[int, str]] = field(
        default_factory=dict
    )  # by request: a place in the output, the reason
    # Of the worker's counters what is new, and its gauges that have changed (`engine.counters`).
    counted: Mapping[str, float] = field(default_factory=dict)


_NONE = StepExtras()
_INSIDE = ("model_runner_output", "_model_runner_output")  # of V2's and V1's asynchronous outputs


def of(output: Any) -> StepExtras:
    """Those of vLLM's output, to read; steps without any share one object."""
    extras: StepExtras = getattr(output, ATTRIBUTE, _NONE)
    return extras


def set_of(output: Any) -> StepExtras:
    """Those of vLLM's output, or of what an asynchronous one becomes, to set fields of."""
    for own in _INSIDE:
        output = getattr(output, own, output)
    extras: StepExtras | None = getattr(output, ATTRIBUTE, None)
    if extras is None:
        extras = StepExtras()
        setattr(output, ATTRIBUTE, extras)
    return extras
