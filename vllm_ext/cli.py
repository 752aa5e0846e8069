# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-ext`` console script. Commands import what they need when they run: ``--help`` stays instant."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ext import __version__
from vllm_ext.bench_cli import bench_command, report_command
from vllm_ext.datastore_cli import datastore_app
from vllm_ext.demo_cli import demo_command
from vllm_ext.doctor_cli import doctor_command
from vllm_ext.guide_cli import caad_app, svdecode_app
from vllm_ext.kv_cli import kv_app
from vllm_ext.list_cli import methods, rules
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
app.command("doctor")(doctor_command)
app.command("methods")(methods)
app.command("rules")(rules)
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


def main() -> None:
    """Entry point of scripts that were installed before `vllm_ext.entry` was."""
    app()
