# SPDX-License-Identifier: Apache-2.0
"""What the commands print with: plain lines, errors that a user can put right, progress."""

from __future__ import annotations

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
    from vllm_ext.datastore_files import Progress as Report


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def errors_of(console: Console) -> Iterator[None]:
    """Exit 1 with the message of what a user can put right."""
    try:
        yield
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or 'output'}: {error.strerror}"
    else:
        return
    console.print(f"[red]error:[/] {escape(problem)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


@contextmanager
def progress_on(console: Console) -> Iterator[Report]:
    """Bars with the time left, one for each name that is reported."""
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
