# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext trie``: build and info."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_ext.cli.output.console import NOT_IN_ORDER, errors_of, progress_on, say

if TYPE_CHECKING:
    from vllm_ext.kernels.trie import Trie
    from vllm_ext.samplers.trie_file import Header

trie_app = typer.Typer(help="Make and look at the closed sets of rule trie.", no_args_is_help=True)


@trie_app.command("build")
def build_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help=".txt: an answer a line. .jsonl: an answer a record, a string or a list of token ids. .npy: token "
            "ids, integers of shape [answers, longest], -1 behind the end of shorter ones.",
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option("--model", "--tokenizer", help="The model: folder or Hugging Face id.")
    ],
    output: Annotated[Path, typer.Option(help="The file to make; one that is there is replaced at the end.")],
    field: Annotated[str, typer.Option(help="Of .jsonl records.")] = "text",
    prefix: Annotated[
        str, typer.Option(help="Text before each answer, such as the space that completions begin with.")
    ] = "",
) -> None:
    """Make a closed set for rule trie."""
    from vllm_ext.data.trie_build import build

    console, errors = Console(), Console(stderr=True)
    started = time.perf_counter()
    with errors_of(errors), progress_on(errors) as report:
        header, made, read = build(inputs, output, tokenizer, field, prefix, report)
    if read.num_empty:
        errors.print(f"[yellow]left out:[/] empty answers: {read.num_empty:,}")
    if again := read.num_sequences - header.num_sequences:
        errors.print(f"[yellow]left out:[/] answers that are there already: {again:,}")
    say(console, f"{output}: {_summary(header, made)}, in {time.perf_counter() - started:.0f} s")
    config = json.dumps({"vllm_ext": {"rules": {"trie": {"files": {output.stem: str(output.resolve())}}}}})
    say(console, f"serve with: --additional-config '{config}'")
    say(console, f'ask with: "vllm_xargs": {{"trie": "{output.stem}"}}')


@trie_app.command("info", short_help="Print what a closed set holds, and whether it can be used.")
def info_command(file: Annotated[Path, typer.Argument(help="File of a closed set.")]) -> None:
    """Print what a closed set holds; exit 1, with the way out, when it cannot be used."""
    from vllm_ext.samplers import trie_file

    console = Console()
    with errors_of(Console(stderr=True), NOT_IN_ORDER):
        try:
            made, header = trie_file.verify(file)
        except ValueError as error:
            raise ValueError(f"{file} {error}") from None
    say(console, f"{file}: {_summary(header, made)}")
    made_by = f"tokenizer {header.tokenizer}, {header.vocab_size:,} ids, hash {header.tokenizer_hash}"
    say(console, f"made {header.created}; {made_by}")


def _summary(header: Header, made: Trie) -> str:
    return (
        f"{header.num_sequences:,} answers of {header.longest:,} tokens at most, {made.num_states:,} states, "
        f"{made.num_bytes / 1e6:,.1f} MB"
    )
