# SPDX-License-Identifier: Apache-2.0
"""The tables of ``vllm-ext bench`` in a terminal, and its progress where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_ext.bench.settings import short_labels
from vllm_ext.bench.stats import number
from vllm_ext.cli.output.console import say, wrapped
from vllm_ext.report.doubts import doubts, is_doubtful
from vllm_ext.report.saved_runs import Run

WIDEST = 200  # columns
Begin = Callable[[str, int, int], None]


def show(console: Console, entries: Sequence[dict[str, Any]]) -> None:
    """Print a table for each batch size, what short names stand for, and what is doubtful.

    Args:
        console: as wide as the table is to be.
        entries: ``runs`` of the JSON.
    """
    runs = TypeAdapter(list[Run]).validate_python(entries)
    e2e = {(entry["label"], entry["batch_size"]): entry["e2e_speedup_vs_plain"] for entry in entries}
    short = short_labels(list(dict.fromkeys(run.label for run in runs)))
    for size in dict.fromkeys(run.batch_size for run in runs):
        rows = [
            (short[run.label], _cells(run, e2e[run.label, size])) for run in runs if run.batch_size == size
        ]
        print_table(console, f"batch size {size}", HEADERS, rows)
    print_names(console, short)
    for line in doubts(runs):
        console.print(
            f"[yellow]doubtful:[/] {escape(line)}", highlight=False, soft_wrap=not console.is_terminal
        )


def print_table(
    console: Console, title: str, headers: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]]
) -> None:
    """Print a table of methods; in a narrow terminal lines go on, and nothing is cut."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for name, cells in rows:
        table.add_row(escape(name), *cells)
    table.width = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    console.print(table, crop=False)


def print_names(console: Console, short: Mapping[str, str]) -> None:
    """What the short names in tables stand for; by label."""
    for label, name in short.items():
        if label != name:
            wrapped(console, f"{name}: ", label)


HEADERS = (
    "tok/s",
    "speed\nup",
    "end to\nend",
    "tokens\na step",
    "drafts\na step",
    "time\ndrafting",
    "same/tie\n/wrong",
)


def _cells(run: Run, e2e_speedup: float | None) -> list[str]:
    wrong = run.wrong_divergences
    speedup = number(run.speedup_vs_plain, ".2f", "x")
    return [
        number(run.tokens_per_s, ".1f"),
        f"[yellow]{speedup} ?[/]" if is_doubtful(run) else speedup,
        number(e2e_speedup, ".2f", "x"),
        number(run.tokens_per_step, ".2f"),
        number(run.draft_tokens_per_step, ".2f"),
        number(run.draft_time_share, ".1%"),
        "-"
        if wrong is None
        else f"{run.identical}/{run.tie_divergences}/" + (f"[red]{wrong}[/]" if wrong else "0"),
    ]


def say_where(console: Console, json_path: Path | None, html_path: Path | None) -> None:
    """What was written where."""
    for what, path in (("figures", json_path), ("page", html_path)):
        if path is not None:
            say(console, f"{what}: {path}")


@contextmanager
def progress(console: Console) -> Iterator[Begin]:
    """What tells of work that begins: a bar in a terminal, elsewhere a line for each start and each round."""
    if not console.is_terminal:
        yield _lines(console)
        return
    # One redraw a second: the bar shares this process with the engines' clients.
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=1,
        speed_estimate_period=3600,  # a unit of work takes half a minute or more
        transient=True,
    ) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(
            task, description=escape(what), completed=done, total=total
        )


def _lines(console: Console) -> Begin:
    started, said = time.monotonic(), ""

    def begin(what: str, done: int, total: int) -> None:
        nonlocal said
        # Of a round without the method whose turn it is.
        part = what.partition(", ")[0] if ": round " in what else what
        if part != said:
            said = part
            minutes, seconds = divmod(int(time.monotonic() - started), 60)
            progressed = f" ({done} of {total} done)" if total else ""
            say(console, f"{minutes:3}:{seconds:02}  {part}{progressed}")

    return begin
