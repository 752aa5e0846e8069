# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-ext`` console script. Commands import what they need when they run: ``--help`` stays instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_ext import __version__
from vllm_ext.bench_cli import bench_command, report_command
from vllm_ext.console import errors_of
from vllm_ext.datastore_cli import datastore_app
from vllm_ext.demo_cli import demo_command
from vllm_ext.guide_cli import caad_app, svdecode_app
from vllm_ext.kv_cli import kv_app
from vllm_ext.schema_cli import schema_command
from vllm_ext.train_cli import train_app
from vllm_ext.trie_cli import trie_app

app = typer.Typer(
    name="vllm-ext",
    help="Lossless speculative decoding methods for an unmodified vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command)
app.command("bench")(bench_command)
app.command("report")(report_command)
app.command("schema")(schema_command)
app.add_typer(datastore_app, name="datastore")
app.add_typer(train_app, name="train")
app.add_typer(kv_app, name="kv")
app.add_typer(trie_app, name="trie")
app.add_typer(caad_app, name="caad")
app.add_typer(svdecode_app, name="svdecode")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"vllm-ext {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Holds the options that stand before a command."""


@app.command()
def methods() -> None:
    """List the methods and their options, for --speculative-config."""
    from vllm_ext.config import option_rows
    from vllm_ext.proposers.registry import METHODS, load_method

    table = Table("method", "option", "default", "allowed", "meaning")
    for name in METHODS:
        proposer = load_method(name)
        table.add_row(f"[bold]{name}", "", "", "", f"{proposer.summary} ({proposer.paper})")
        for option, default, allowed, meaning in option_rows(proposer.Options):
            table.add_row("", option, default, allowed, meaning)
    Console().print(table)


@app.command()
def rules() -> None:
    """List the sampling rules: options, for --additional-config, and parameters, for vllm_xargs of requests."""
    from vllm_ext.config import option_rows
    from vllm_ext.samplers.registry import RULES, load_rule

    table = Table("rule", "whose", "name", "default", "allowed", "meaning")
    for name in RULES:
        rule = load_rule(name)
        table.add_row(f"[bold]{name}", "", "", "", "", f"{rule.summary} ({rule.paper})")
        for whose, fields in (("server", rule.Options), ("request", rule.Params)):
            for field, default, allowed, meaning in option_rows(fields):
                table.add_row("", whose, field, default, allowed, meaning)
    Console().print(table)


@app.command()
def doctor(
    vllm_files: Annotated[
        Path | None,
        typer.Option(
            help="Instead, check our hooks against the Python files of a vLLM unpacked in this folder (it has the "
            "folder vllm): nothing is imported."
        ),
    ] = None,
) -> None:
    """Check this environment; exit 1, with the way out, when a method could not run in it."""
    from vllm_ext.doctor import checks, checks_of_files

    console = Console()
    if vllm_files is not None:
        with errors_of(console):
            found = iter(list(checks_of_files(vllm_files)))
    else:
        found = checks()
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    failed = 0
    for check in found:
        console.print(
            f"[{colours[check.status]}]{check.status:>4}[/]  {check.what}: {check.found}", highlight=False
        )
        if check.way_out:
            console.print(f"      -> {check.way_out}", highlight=False)
        failed += check.status == "fail"
    if failed:
        console.print(f"[red]{failed} failed")
        raise typer.Exit(1)
    console.print("[green]all methods can run here" if vllm_files is None else "[green]nothing is missing")


def main() -> None:
    """Entry point of the console script."""
    app()
