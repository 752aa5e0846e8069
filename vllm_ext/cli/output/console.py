# SPDX-License-Identifier: Apache-2.0
"""What the commands print with: plain lines, errors that a user can put right, progress."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from vllm_ext.data.atomic_files import Progress as Report


SECONDS_BETWEEN_LINES = 30.0


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def wrapped(console: Console, head: str, text: str) -> None:
    """Print ``text`` behind ``head``, as wide as the screen; further lines stand below its beginning."""
    indent = len(head) if len(head) < console.width // 2 else 6
    lines = textwrap.wrap(
        text,
        console.width,
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    say(console, "\n".join(lines or [head.rstrip()]))


# Exit codes of all commands: a check has failed; the command could not be carried out.
NOT_IN_ORDER, NOT_DONE = 1, 2


@contextmanager
def errors_of(console: Console, code: int = NOT_DONE) -> Iterator[None]:
    """Exit with ``code`` and the message of what a user can put right."""
    try:
        yield
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or 'output'}: {error.strerror}"
    else:
        return
    # In a terminal words are kept whole; elsewhere an error is one line, to be searched for.
    console.print(f"[red]error:[/] {escape(problem)}", highlight=False, soft_wrap=not console.is_terminal)
    raise typer.Exit(code)


@contextmanager
def progress_on(console: Console) -> Iterator[Report]:
    """What tells how far work is, by name: bars in a terminal, elsewhere lines; both with the time left."""
    if not console.is_terminal:
        yield _lines(console)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=2,
        transient=True,
    ) as bar:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=min(done, total), total=total)

        yield report


def _lines(console: Console) -> Report:
    """A line when work begins, and then every half minute, and when it ends."""
    began: dict[str, float] = {}
    said: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        started = began.setdefault(what, now)
        ended = done >= total
        if (what in said and now - said[what] < SECONDS_BETWEEN_LINES and not ended) or said.get(
            what
        ) == math.inf:
            return
        said[what] = math.inf if ended else now
        share = min(done / total, 1.0) if total else 1.0
        spent = now - started
        left = "" if ended or not done else f", {_clock(spent / share - spent)} left"
        say(console, f"{what}: {share:.0%}, {_clock(spent)}{left}")

    return report


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
