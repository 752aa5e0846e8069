# SPDX-License-Identifier: Apache-2.0
"""What the commands print with: plain lines, errors that a user can put right, progress."""

from __future__ import annotations

import logging
import os
import textwrap
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


def hide_vllm_log() -> None:
    """Before vLLM is imported: of its log errors alone, here and in its engines, unless the user has set a level."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # of what it says before it reads that


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
    # In a terminal words are kept whole; elsewhere an error is one line, to be searched for.
    console.print(f"[red]error:[/] {escape(problem)}", highlight=False, soft_wrap=not console.is_terminal)
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
