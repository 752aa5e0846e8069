# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext doctor``: the verdict first, then what matters; everything with --verbose or --json."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_ext.cli.output.console import errors_of, say, wrapped
from vllm_ext.compat.vllm_log import hide_vllm_log

if TYPE_CHECKING:
    from vllm_ext.doctor.check import Check

FIELDS = ("status", "what", "found", "way_out")  # of a check, as JSON
SHOWN = 3  # warnings or failures of one kind; --verbose has all


def doctor_command(
    vllm_files: Annotated[
        Path | None,
        typer.Option(
            help="Instead, check our hooks against the Python files of a vLLM unpacked in this folder (it has the "
            "folder vllm): nothing is imported."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead, say what this model would get, by its config alone: trees, chains or nothing, and why. A "
            "folder or a hub name; no weights are read."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Beside --model: num_speculative_tokens, the most nodes of a tree.", min=1),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Beside --model: vLLM's option of that name.")] = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every check.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every check as JSON.")] = False,
) -> None:
    """Check this environment; exit 1, with the way out, when a method could not run in it."""
    from vllm_ext.doctor.environment import checks
    from vllm_ext.doctor.hooks import checks_of_files

    hide_vllm_log()
    console, errors = Console(), Console(stderr=True)
    if model is not None:
        _of_model(console, errors, model, nodes, dtype, verbose, as_json)
        return
    if vllm_files is not None:
        with errors_of(errors):
            found = list(checks_of_files(vllm_files))
    else:
        with errors.status("checking ..."):
            found = list(checks())
    _report(console, found, _verdict(found, vllm_files), verbose, as_json, {})


def _of_model(
    console: Console, errors: Console, name: str, nodes: int | None, dtype: str, verbose: bool, as_json: bool
) -> None:
    from dataclasses import asdict

    from vllm_ext.doctor import model

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # what it could not build is said below
    with errors_of(errors), errors.status("reading its config ..."):
        found = model.answer(name, nodes, dtype)
    _report(console, list(model.checks(found)), found.verdict, verbose, as_json, {"model": asdict(found)})


def _report(
    console: Console, found: Sequence[Check], verdict: str, verbose: bool, as_json: bool, more: dict[str, Any]
) -> None:
    """Print checks, and exit 1 where one has failed."""
    failed = [check for check in found if check.status == "fail"]
    if as_json:
        listed = [{field: getattr(check, field) for field in FIELDS} for check in found]
        report = {"ok": not failed, "verdict": verdict, **more, "checks": listed}
        say(console, json.dumps(report, indent=2))
    else:
        colour = "red" if failed else "green"
        console.print(f"[{colour}]{verdict}", highlight=False)
        for check in found if verbose else _short(found):
            _print(console, check)
    if failed:
        raise typer.Exit(1)


def _verdict(found: Sequence[Check], vllm_files: Path | None) -> str:
    num_failed, num_warned = (sum(check.status == status for check in found) for status in ("fail", "warn"))
    if num_failed:
        what = "methods cannot run here" if vllm_files is None else "methods cannot run with these files"
        first = next(check for check in found if check.status == "fail")
        return f"{what}: {num_failed} failed, first {first.what}"
    warned = f", {num_warned} warning{'s' if num_warned > 1 else ''}" if num_warned else ""
    return ("all methods can run here" if vllm_files is None else "nothing is missing") + warned


def _short(found: Sequence[Check]) -> list[Check]:
    """What fails and warns, a few of each kind, and of the rest what says most, in one line each."""
    from vllm_ext.doctor.check import Check
    from vllm_ext.doctor.environment import VERSIONS

    lines = []
    versions = [f"{check.what} {check.found}" for check in found if check.what in VERSIONS]
    lines.append(Check("ok", "versions", ", ".join(versions)))
    fine = [check for check in found if check.status == "ok" and check.short]
    lines += [
        Check("ok", what, "; ".join(check.short for check in fine if check.what == what))
        for what in dict.fromkeys(check.what for check in fine)
    ]
    if hooks := [check for check in found if check.what.startswith("seam ")]:
        good = sum(check.status == "ok" for check in hooks)
        lines.append(Check("ok", "hooks", f"{good} of {len(hooks)} symbols of vLLM are as we know them"))
    for status in ("warn", "fail"):
        bad = [check for check in found if check.status == status]
        for what in dict.fromkeys(check.what for check in bad):
            same = [check for check in bad if check.what == what]
            lines += same[:SHOWN]
            if len(same) > SHOWN:
                lines.append(Check(status, what, f"{len(same) - SHOWN} more: vllm-ext doctor --verbose"))
    return [line for line in lines if line.found]


def _print(console: Console, check: Check) -> None:
    wrapped(console, f"{check.status:>4}  {check.what}: ", check.found)
    if check.way_out:
        wrapped(console, "      -> ", check.way_out)
