# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext datastore``: build, info and merge."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_ext.cli.output.console import NOT_IN_ORDER, errors_of, progress_on, say

if TYPE_CHECKING:
    from vllm_ext.proposers.datastore import Header

datastore_app = typer.Typer(help="Make and look at the datastores of method rest.", no_args_is_help=True)

SHOWN = 20  # unreadable files named
MANY_SEGMENTS = 8  # more are worth merging


@datastore_app.command("build")
def build_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Text, Markdown and code files, .jsonl, .parquet, and folders of them; what is not UTF-8 text is "
            "left out.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of the datastore; one that it holds is replaced at the end.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--tokenizer",
            help="The model: folder or Hugging Face id. With --append: the store's own unless given.",
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Of .jsonl records and .parquet files: a string, or a list of strings.")
    ] = "text",
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the files in folders only those like this: '*.py'; may be given several times."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the files and folders in folders none like this: 'tests', '*.min.js'; may be given several times."
        ),
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Add to the datastore; nothing is sorted again.")
    ] = False,
) -> None:
    """Make a datastore for method rest. Until it is complete, the old one stays as it was."""
    from vllm_ext.data.datastore_build import build

    console, errors = Console(), Console(stderr=True)
    started = time.perf_counter()
    with errors_of(errors), progress_on(errors) as report:
        header, sources = build(
            inputs, output, tokenizer, field, append, report, include or (), exclude or ()
        )
    for line in sources.skipped[:SHOWN]:
        errors.print(f"[yellow]left out:[/] {escape(line)}", highlight=False, soft_wrap=True)
    if len(sources.skipped) > SHOWN:
        errors.print(f"[yellow]left out:[/] {len(sources.skipped) - SHOWN} more files")
    if sources.num_binary:
        errors.print(f"[yellow]left out:[/] files that are no text: {sources.num_binary}")
    say(console, f"{output}: {_summary(header)}, in {time.perf_counter() - started:.0f} s")
    config = json.dumps({"method": "rest", "datastore": str(output.resolve())})
    say(console, f"serve with: --speculative-config '{config}'")


@datastore_app.command("info", short_help="Print what a datastore holds, and whether it can be used.")
def info_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a datastore.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Also read everything and compare checksums.")
    ] = False,
) -> None:
    """Print what a datastore holds; exit 1, with the way out, when it cannot be used."""
    from vllm_ext.proposers import datastore

    console = Console()
    with errors_of(Console(stderr=True), NOT_IN_ORDER):
        header = datastore.verify(folder, checksums=verify)
    table = Table("segment", "documents", "tokens", "bytes")
    for segment in header.segments:
        size = segment.num_tokens * (header.dtype.itemsize + 4)
        table.add_row(segment.name, f"{segment.num_documents:,}", f"{segment.num_tokens:,}", f"{size:,}")
    say(console, f"{folder}: {_summary(header)}")
    made_by = f"tokenizer {header.tokenizer}, {header.vocab_size:,} ids, hash {header.tokenizer_hash}"
    say(console, f"format {header.version}, made {header.created}; {made_by}")
    console.print(table)
    console.print("all checksums fit" if verify else "sizes fit; --verify reads everything")
    if len(header.segments) > MANY_SEGMENTS:
        say(console, f"each look-up searches every segment: vllm-ext datastore merge {folder}")


@datastore_app.command("merge")
def merge_command(folder: Annotated[Path, typer.Argument(help="Folder of a datastore.")]) -> None:
    """Make one segment of all: look-ups take the time of one. Until it is complete, the old ones stay."""
    from vllm_ext.data.datastore_merge import merge

    errors = Console(stderr=True)
    started = time.perf_counter()
    with errors_of(errors), progress_on(errors) as report:
        header = merge(folder, report)
    say(Console(), f"{folder}: {_summary(header)}, in {time.perf_counter() - started:.0f} s")


def _summary(header: Header) -> str:
    size = sum(size for _, size, _ in header.files())
    return (
        f"{header.num_documents:,} documents, {header.num_tokens:,} tokens, {len(header.segments)} "
        f"segment{'s' if len(header.segments) > 1 else ''}, {size / 1e6:,.1f} MB"
    )
