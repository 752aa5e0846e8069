# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext warm``: what a server's method knows before its first request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_ext.cli.output.console import errors_of, progress_on, say
from vllm_ext.cli.train.common import MaxNumSeqs, Prompts, Verbose


def warm_command(
    model: Annotated[str, typer.Option(help="The model that will be served: folder or Hugging Face id.")],
    output: Annotated[Path, typer.Option(help="Folder to be the server's `state_dir`.")],
    speculative_config: Annotated[
        str, typer.Option(help="As the server gets it, without `state_dir`: other options, another state.")
    ] = '{"method": "hybrid"}',
    prompts: Prompts = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long the model answers.")] = 10.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 256,
    max_num_seqs: MaxNumSeqs = 64,
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "auto",
    verbose: Verbose = False,
) -> None:
    """Have the model answer prompts, its own if none are given, and keep what the method learns of it."""
    console, errors = Console(), Console(stderr=True)
    with errors_of(errors):
        from vllm_ext.bench.side_by_side import set_environment
        from vllm_ext.data.prompts import load_prompts

        method = _method(speculative_config, output)
        chats = (
            [prompt.messages for prompt in load_prompts([Path(file) for file in prompts])] if prompts else []
        )
        set_environment(verbose)
        from vllm_ext.training.warm import warm

        options = {
            "max_num_seqs": max_num_seqs,
            "dtype": dtype,
            "enforce_eager": True,
            "use_tqdm_on_load": verbose,
        }
        with progress_on(errors) as report:
            # By the name that the server has it by: the state belongs to it.
            done = warm(model, method, chats, minutes, max_tokens, options, report)
    say(
        console,
        f"{output}: {done.prompts:,} prompts answered with {done.tokens:,} tokens, {done.vocabulary:,} tokens read "
        "alone",
    )
    say(console, f"serve with: --speculative-config '{json.dumps(method)}'")


def _method(given: str, output: Path) -> dict[str, Any]:
    """The server's, with the folder.

    Raises:
        ValueError: it is not one of ours, or has a folder.
    """
    from vllm_ext.proposers.registry import METHODS

    try:
        method = json.loads(given)
    except ValueError as error:
        raise ValueError(f"--speculative-config={given!r} is no JSON: {error}") from None
    if not isinstance(method, dict) or method.get("method") not in METHODS:
        raise ValueError(
            f"--speculative-config={given!r} is not allowed; allowed: a JSON object whose `method` is one of "
            f"{', '.join(sorted(METHODS))}"
        )
    if "state_dir" in method:
        raise ValueError(
            f"--speculative-config={given!r} is not allowed: --output is its state_dir; leave it out"
        )
    return {**method, "state_dir": str(output.resolve())}
