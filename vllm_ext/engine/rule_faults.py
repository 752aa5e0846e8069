# SPDX-License-Identifier: Apache-2.0
"""What a rule raises ends the request it was for, and nothing else.

A rule runs code of others: a grammar's compiler, an analysis, functions of the user's. Where it raises, rows of other
requests get what they would have got alone; the request's own row is left with its end token, and the scheduler
(`scheduler.faulty_requests`) ends the request with an error before anybody sees that token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from vllm_ext.engine import step_extras
from vllm_ext.engine.composed import scheduler
from vllm_ext.samplers.base import Row, Rule
from vllm_ext.samplers.messages import quoted
from vllm_ext.samplers.steering import Deferral, LookaheadRule

PATIENCE = 0.05  # seconds of a step that rows may wait before they are put off
SHORT_PATIENCE = 0.25  # where they cannot be
CANNOT_WAIT = "and rows wait no longer with a scheduler_cls or async_scheduling of one's own"

logger = logging.getLogger("vllm.vllm_ext")


def apply(
    name: str,
    rule: Rule,
    logits: torch.Tensor,
    rows: Sequence[Row],
    at: Callable[[Sequence[int]], None] = lambda places: None,
) -> Mapping[int, Deferral | None]:
    """Apply a rule to rows, in place; where it raises, to each row alone, and note the rows that it raises for.

    Args:
        name: of the rule.
        rule: it.
        logits: ``[num_rows, vocab]``.
        rows: as many.
        at: told which of the rows the rule is about to be applied to, before each call behind the first.

    Returns:
        The rows whose token is put off; None for those that wait for work beside the engine.
    """
    before = logits.clone() if len(rows) > 1 else logits
    try:
        rule.apply(logits, rows)
        return _put_off(rule)
    except Exception as error:
        if len(rows) == 1:
            note(name, rows[0], error)
            return {}
    found: dict[int, Deferral | None] = {}
    for place, row in enumerate(rows):
        at([place])
        try:
            rule.apply(before[place : place + 1], [row])
        except Exception as error:
            note(name, row, error)
        else:
            logits[place] = before[place]
            found.update((place, deferral) for deferral in _put_off(rule).values())
    return found


def _put_off(rule: Rule) -> dict[int, Deferral | None]:
    """Rows of a rule's last call that get no token yet."""
    deferrals: dict[int, Deferral | None] = dict(rule.deferrals) if isinstance(rule, LookaheadRule) else {}
    return deferrals | dict.fromkeys(rule.waiting)


def patience_of(vllm_config: Any) -> float | None:
    """How long rows of an engine may wait in a step; see `Rule.patience`."""
    if vllm_config.parallel_config.world_size > 1:
        return None  # ranks have different clocks, and must have the same rows
    return PATIENCE if scheduler.has(vllm_config, "DeferredTokens") else SHORT_PATIENCE


def wait_no_longer(
    name: str, rows: Sequence[Row], deferrals: Mapping[int, Deferral | None]
) -> dict[int, Deferral]:
    """End requests whose rows wait where an engine cannot let them; what is left of what `apply` has said."""
    for place, deferral in deferrals.items():
        if deferral is None:
            late = TimeoutError(f"what it needs took more than {SHORT_PATIENCE:g} s, {CANNOT_WAIT}")
            note(name, rows[place], late)
    return {place: deferral for place, deferral in deferrals.items() if deferral is not None}


def note(name: str, row: Row, error: Exception) -> None:
    """Keep what a rule has raised for a row, the first such thing of a request."""
    if not row.faults:
        reason = f"vllm-ext: rule {name!r} failed: {type(error).__name__}: {quoted(error)}"
        logger.error("%s. The request ends.", reason, exc_info=error)
        row.faults[len(row.output)] = reason


def end(logits: torch.Tensor, rows: Mapping[int, Row]) -> None:
    """Leave those rows their end token whose request has failed, in place.

    Args:
        logits: ``[num_rows, vocab]``.
        rows: by index.
    """
    for index, row in rows.items():
        if row.faults:
            logits[index] = -torch.inf
            logits[index, row.end or 0] = 0.0


def attach(
    output: Any,
    faults: Mapping[str, tuple[int, str]],
    notes: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
    deferrals: Mapping[str, Deferral | None] = MappingProxyType({}),
) -> None:
    """Send a step's faults with its tokens, what rules have noted of these, and which they have put off.

    Args:
        output: vLLM's ModelRunnerOutput, or what it becomes one of.
        faults: by request id; see `StepExtras`.
        notes: likewise.
        deferrals: likewise.
    """
    if (faults or notes or deferrals) and output is not None:
        extras = step_extras.set_of(output)
        extras.faults, extras.notes, extras.deferrals = dict(faults), dict(notes), dict(deferrals)
