# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext caad build`` and ``vllm-ext svdecode build``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_ext.cli.output.console import errors_of, progress_on, say

caad_app = typer.Typer(help="Make what rule caad goes by.", no_args_is_help=True)
svdecode_app = typer.Typer(help="Make what rule svdecode goes by.", no_args_is_help=True)

Examples = Annotated[
    list[Path],
    typer.Argument(
        metavar="EXAMPLES...",
        help="JSONL files: prompts as `vllm-ext bench` takes them, with an answer each; about ten are enough.",
    ),
]
Model = Annotated[str, typer.Option(help="The model that is served: folder or Hugging Face id.")]
Output = Annotated[Path, typer.Option(help="The file to make; one that is there is replaced at the end.")]
Field = Annotated[str, typer.Option(help="Of each record, the answer's.")]


@caad_app.callback()
def _caad() -> None:
    """One command so far, that is to be named."""


@svdecode_app.callback()
def _svdecode() -> None:
    """One command so far, that is to be named."""


@caad_app.command("build")
def build_caad(
    examples: Examples,
    model: Model,
    output: Output,
    field: Field = "answer",
    top_k: Annotated[int, typer.Option(min=1, max=65_536, help="Next tokens kept of each context.")] = 256,
) -> None:
    """Make a store of true answers for rule caad."""
    from vllm_ext.data import steering_artifacts

    console, errors = Console(), Console(stderr=True)
    with errors_of(errors), progress_on(errors) as report:
        read = steering_artifacts.read_examples(examples, field)
        header = steering_artifacts.make_caad(model, read, top_k, report, output)
    say(console, f"{output}: {header.made_of:,} contexts of {len(read):,} answers")
    _say_how(console, "caad", output)


@svdecode_app.command("build", short_help="Make a direction for rule svdecode.")
def build_svdecode(
    examples: Examples,
    model: Model,
    original: Annotated[
        str, typer.Option(help="The model that it was tuned from: folder or Hugging Face id.")
    ],
    output: Output,
    field: Field = "answer",
    alpha: Annotated[
        float,
        typer.Option(
            min=1e-9, max=1.0, help="Tokens less probable than this part of the likeliest are left out."
        ),
    ] = 0.1,
) -> None:
    """Make a direction for rule svdecode: what tuning has changed over a task's answers."""
    from vllm_ext.data import steering_artifacts

    console, errors = Console(), Console(stderr=True)
    with errors_of(errors), progress_on(errors) as report:
        read = steering_artifacts.read_examples(examples, field)
        header, mu = steering_artifacts.make_svdecode(model, original, read, alpha, report, output)
    say(console, f"{output}: of {header.made_of:,} tokens of {len(read):,} answers; best strength {mu:.4g}")
    _say_how(console, "svdecode", output)


def _say_how(console: Console, rule: str, output: Path) -> None:
    config = json.dumps({"vllm_ext": {"rules": {rule: {"file": str(output.resolve())}}}})
    say(console, f"serve with: --additional-config '{config}'")
    say(console, f'ask with: "vllm_xargs": {{"{rule}": true}}')
