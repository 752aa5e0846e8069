# SPDX-License-Identifier: Apache-2.0
"""The part of the bench's page that shows a bench over HTTP: speed and latency under each load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vllm_ext.bench.serving_stats import latency, same
from vllm_ext.bench.settings import PLAIN
from vllm_ext.bench.stats import number
from vllm_ext.report import plots
from vllm_ext.report.engine_page import Plot, Section, conditions_of, environments_of
from vllm_ext.report.plots import Mark
from vllm_ext.report.saved_runs import WAY_OUT, Figure, printable, reason
from vllm_ext.report.tables import Cell, Key, Table, figure_cell, is_lost, method_keys

LATENCIES = ("ttft", "tpot", "itl", "e2el")


class ServingRow(BaseModel):
    """A method under one load, of the fields that are read here."""

    model_config = ConfigDict(frozen=True, extra="allow")
    load: str
    label: str
    concurrency: int | None = Field(None, ge=1)
    request_rate: Figure = None
    requests: int
    errors: tuple[str, ...] = ()
    output_tokens_per_s: Figure = None
    output_tokens_per_s_rounds: tuple[Figure, ...] = ()
    speedup_vs_plain: Figure = None
    speedup_vs_plain_rounds: tuple[Figure, ...] = ()
    tokens_per_step: Figure = None
    draft_tokens_per_request_step: Figure = None
    acceptance: Figure = None
    step_ms: Figure = None
    target_efficiency: Figure = None
    goodput_share: Figure = None
    same_as_plain: int | None = None


def serving_section(name: str, raw: Any, number_of_section: int) -> Section:
    """What the page shows of one document.

    Args:
        name: of its file.
        raw: parsed JSON of ``vllm-ext bench --concurrency ... --json``.
        number_of_section: so that ids of plots differ.

    Raises:
        ValueError: naming the file and the field.
    """
    document = printable(raw)
    environment = document.get("environment")
    if not isinstance(environment, dict):
        raise ValueError(f"{name}: does not say its environment; {WAY_OUT}")
    try:
        rows = TypeAdapter(list[ServingRow]).validate_python(document["serving"])
        notices = TypeAdapter(list[str]).validate_python(document.get("notices", []))
        whole = [row.model_dump() for row in rows]
        for row in whole:
            for latency_name in LATENCIES:
                latency(row, latency_name)
    except (ValidationError, TypeError, KeyError) as error:
        raise ValueError(f"{name}: {reason(error)}; {WAY_OUT}") from None
    if not rows:
        raise ValueError(f"{name}: holds no row; {WAY_OUT}")
    keys = method_keys([row.label for row in rows])
    if PLAIN not in {row.label for row in rows}:
        keys.pop(PLAIN)
    verdict, wrong = _verdict(rows)
    loads = list(dict.fromkeys(row.load for row in rows))
    return Section(
        title=str(environment.get("model", "")).rstrip("/").rpartition("/")[2] or "unknown model",
        conditions=conditions_of(environment, "over HTTP: " + ", ".join(loads), sum_of_requests(rows)),
        verdict=verdict,
        wrong=wrong,
        legend=list(keys.values()),
        compared=any(row.same_as_plain is not None for row in rows),
        summaries=[
            _summary(load, what, columns, [row for row in whole if row["load"] == load], keys)
            for load in loads
            for what, columns in (
                ("latencies are median / p90 / p99. Small: the lowest and the highest round", SPEED),
                ("what steps were made of", STEPS),
            )
        ],
        plots=_plots(whole, keys, f"v{number_of_section}"),
        remarks=notices,
        environments=environments_of([(name, environment)]),
    )


def sum_of_requests(rows: Sequence[ServingRow]) -> int:
    """Requests that one method answered."""
    return sum(row.requests for row in rows if row.label == rows[0].label)


def _verdict(rows: Sequence[ServingRow]) -> tuple[str, list[str]]:
    failed = [f"{row.label}, {row.load}: {len(row.errors)} failed" for row in rows if row.errors]
    if failed:
        return "Requests failed.", failed
    others = [row for row in rows if row.label != rows[0].label]
    lowest = min((row.speedup_vs_plain for row in others if row.speedup_vs_plain is not None), default=None)
    said = "Every request was answered"
    if lowest is not None:
        said += f"; the lowest speed-up of output tokens a second is {lowest:.2f}x"
    compared = [row for row in others if row.same_as_plain is not None]
    if compared:
        same_ones, asked = (
            sum(row.same_as_plain or 0 for row in compared),
            sum(row.requests for row in compared),
        )
        said += f"; {same_ones} of {asked} answers are plain's to the letter"
    return said + ".", []


Columns = dict[str, Callable[[dict[str, Any]], Cell]]
SPEED: Columns = {
    "speed-up": lambda row: figure_cell(
        row["speedup_vs_plain"], row["speedup_vs_plain_rounds"], ".2f", "x", is_lost(row["speedup_vs_plain"])
    ),
    "output tokens/s": lambda row: figure_cell(
        row["output_tokens_per_s"], row["output_tokens_per_s_rounds"], ".1f"
    ),
    "first token, ms": lambda row: Cell(latency(row, "ttft")),
    "per output token, ms": lambda row: Cell(latency(row, "tpot")),
    "between pieces, ms": lambda row: Cell(latency(row, "itl")),
    "whole request, ms": lambda row: Cell(latency(row, "e2el")),
}
STEPS: Columns = {
    "tokens/step": lambda row: Cell(number(row["tokens_per_step"], ".2f")),
    "drafts/step": lambda row: Cell(number(row["draft_tokens_per_request_step"], ".1f")),
    "accepted": lambda row: Cell(number(row["acceptance"], ".0%")),
    "step, ms": lambda row: Cell(number(row["step_ms"], ".1f")),
    "target efficiency": lambda row: Cell(number(row["target_efficiency"], ".2f")),
    "goodput": lambda row: Cell(number(row["goodput_share"], ".0%")),
    "same as plain": lambda row: Cell(same(row)),
}


def _summary(
    load: str, what: str, columns: Columns, rows: list[dict[str, Any]], keys: dict[str, Key]
) -> Table:
    kept = [head for head, cell in columns.items() if any(cell(row).text != "-" for row in rows)]
    return Table(
        f"{load.capitalize()}{', steps' if columns is STEPS else ''}: {what}.",
        kept,
        "method",
        [(keys[row["label"]], [columns[head](row) for head in kept]) for row in rows],
        cards=True,
    )


def _plots(rows: Sequence[dict[str, Any]], keys: dict[str, Key], salt: str) -> list[Plot]:
    """Over the concurrency, where there are several and no rates."""
    if any(row["request_rate"] is not None for row in rows):
        return []
    flying = sorted({row["concurrency"] for row in rows if row["concurrency"]})
    if len(flying) < 2:
        return []
    labels = list(dict.fromkeys(row["label"] for row in rows))

    def lines(value: str, rounds: str | None = None) -> list[tuple[str, str, list[tuple[int, Mark]]]]:
        return [
            (
                keys[label].letter,
                keys[label].colour,
                [
                    (
                        row["concurrency"],
                        Mark(
                            keys[label].letter,
                            keys[label].colour,
                            row[value],
                            [known for known in (row[rounds] if rounds else ()) if known is not None],
                        ),
                    )
                    for row in sorted(rows, key=lambda row: int(row["concurrency"]))
                    if row["label"] == label
                ],
            )
            for label in labels
        ]

    panels = [
        ("throughput", "output tokens/s", lines("output_tokens_per_s", "output_tokens_per_s_rounds")),
        ("speed-up", "multiples of plain's", lines("speedup_vs_plain", "speedup_vs_plain_rounds")),
        ("time per output token", "ms, median", lines("tpot_p50_ms")),
        ("between pieces", "ms, p99", lines("itl_p99_ms")),
        ("first token", "ms, p99", lines("ttft_p99_ms")),
        ("target efficiency", "plain's step / the method's", lines("target_efficiency")),
    ]
    svgs = plots.over_batch_sizes(panels, salt)
    return [
        Plot(
            "Throughput and latency under load",
            "Over the requests in flight. Dashed: plain. Upright lines: lowest to highest round. A piece of an answer "
            "holds several tokens where drafts were accepted, so the time between pieces may be longer than plain's "
            "while answers come faster.",
            [Markup(svg) for svg in svgs],
            [],
        )
    ]
