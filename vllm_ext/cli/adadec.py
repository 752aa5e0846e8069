# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext adadec learn``."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_ext.cli.output.console import errors_of, progress_on, say

if TYPE_CHECKING:
    from vllm_ext.samplers.adadec_threshold import Told
    from vllm_ext.training.adadec import Result

adadec_app = typer.Typer(help="Learn what rule adadec goes by.", no_args_is_help=True)

SHOWN = 5  # files named that were left out


@adadec_app.callback()
def _adadec() -> None:
    """One command so far, that is to be named."""


@adadec_app.command("learn", short_help="Learn a model's threshold for rule adadec from code.")
def learn_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Files of code, and folders of them. .jsonl: a record a line, with prompt (or complete_prompt) and "
            "completion (or canonical_solution, or solution), of which only the completion counts.",
        ),
    ],
    model: Annotated[str, typer.Option(help="The model that is served: folder or Hugging Face id.")],
    tokens: Annotated[int, typer.Option(min=500, help="Tokens that count, at most.")] = 50_000,
    context: Annotated[
        int, typer.Option(min=64, help="Tokens that are read at once, a prompt's with its completion's.")
    ] = 1024,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the files in folders only those like this: '*.py'; may be given several times. Default: by "
            "their endings those of about 40 programming languages.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: that it is served in.")] = "auto",
    seed: Annotated[
        int, typer.Option(min=0, help="Of which files and windows are read, where not all are.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Learn above which entropy rule adadec should look ahead, by code that the model reads token for token.

    One text of five, a file's window or a completion, is held out, for the figures. Exits 2, without a threshold,
    where entropy does not tell which tokens the model has first.
    """
    from vllm_ext.bench.side_by_side import set_environment

    console, errors = Console(), Console(stderr=True)
    started = time.perf_counter()
    with errors_of(errors):
        from vllm_ext.data.model_files import load_tokenizer, snapshot
        from vllm_ext.training.adadec_texts import read_texts

        folder = str(snapshot(model))
        found = read_texts(inputs, include or (), load_tokenizer(folder), tokens, context, seed)
        for line in found.skipped[:SHOWN]:
            errors.print(f"[yellow]left out:[/] {escape(line)}", highlight=False, soft_wrap=True)
        if (others := len(found.skipped) - SHOWN) > 0:
            errors.print(f"[yellow]left out:[/] {others:,} more files")
        if found.num_binary:
            errors.print(f"[yellow]left out:[/] files that are no text: {found.num_binary:,}")
        set_environment(verbose)
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the rule runs on V1
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # beside JSON, where it is shown
        from vllm_ext.training.adadec import check_engine, engine_options, learn_from, read

        options = engine_options(dtype, context, verbose)
        check_engine(folder, options)
        with progress_on(errors) as report, warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")  # of the engine, where it is in this process
            made = read(folder, found.texts, options, report)
        result = learn_from(made)
    config = {"vllm_ext": {"rules": {"adadec": {"threshold": result.threshold}}}}
    if as_json:
        say(console, json.dumps(_as_json(model, len(found.texts), result, config), indent=2))
        return
    say(
        console,
        f"{result.num_tokens:,} tokens of {len(found.texts):,} texts read in {time.perf_counter() - started:.0f} s; "
        f"{result.rank_1:.1%} have rank 1",
    )
    say(console, f"threshold: {result.threshold} nats")
    console.print(_table(result))
    say(console, f"serve with: --additional-config '{json.dumps(config)}'")
    say(console, 'ask with: "vllm_xargs": {"adadec": true}')


def _table(result: Result) -> Table:
    from vllm_ext.training.adadec import DEFAULT

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(f"on {result.num_held_out:,} tokens held out")
    for header in (f"at {result.threshold}", f"at {DEFAULT}, the default"):
        table.add_column(header, justify="right")
    for name, field in (
        ("accuracy", "accuracy"),
        ("accuracy, mean of both classes", "balanced"),
        ("tokens that would pause", "pauses"),
    ):
        table.add_row(name, *(f"{getattr(each, field):.1%}" for each in (result.learnt, result.default)))
    return table


def _as_json(model: str, num_texts: int, result: Result, config: dict[str, Any]) -> dict[str, Any]:
    from vllm_ext.training.adadec import DEFAULT

    def figures(threshold: float, of: Told) -> dict[str, float]:
        return {
            "threshold": threshold,
            "accuracy": of.accuracy,
            "balanced_accuracy": of.balanced,
            "pauses": of.pauses,
        }

    return {
        "model": model,
        "texts": num_texts,
        "tokens": result.num_tokens,
        "rank_1": result.rank_1,
        "threshold": result.threshold,
        "weight": result.weight,
        "bias": result.bias,
        "cut": result.cut,
        "held_out": {
            "tokens": result.num_held_out,
            "learnt": figures(result.threshold, result.learnt),
            "default": figures(DEFAULT, result.default),
        },
        "additional_config": config,
    }
