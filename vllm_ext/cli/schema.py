# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext schema``: what a strict server would say of JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_ext.cli.output.console import NOT_IN_ORDER, errors_of, say


def schema_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON schemas, one in each.")],
) -> None:
    """Say whether xgrammar enforces JSON schemas whole; exit 1 where one is enforced only in part.

    A server refuses requests with such schemas when it is started with --additional-config '{"vllm_ext":
    {"structured_outputs": {"strict": true}}}'; what vLLM refuses by itself is not looked at.
    """
    from vllm_ext.samplers.strict_schema import first_problem

    console, in_part = Console(), 0
    for file in files:
        with errors_of(console):
            problem = first_problem(_read(file))
        if problem is None:
            say(console, f"{file}: enforced whole")
        else:
            in_part += 1
            say(console, f"{file}: in part: {problem}{f'. {problem.instead}' if problem.instead else ''}")
    if in_part:
        raise typer.Exit(NOT_IN_ORDER)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: no JSON ({error}); give files with a schema in each.") from None
