# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-ext`` console script. Commands import what they need when they run: ``--help`` stays instant."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ext import __version__
from vllm_ext.cli.adadec import adadec_app
from vllm_ext.cli.bench import bench_command, report_command
from vllm_ext.cli.datastore import datastore_app
from vllm_ext.cli.demo import demo_command
from vllm_ext.cli.doctor import doctor_command
from vllm_ext.cli.kv import kv_app
from vllm_ext.cli.listings import methods, rules
from vllm_ext.cli.schema import schema_command
from vllm_ext.cli.steering import caad_app, svdecode_app
from vllm_ext.cli.train import train_app
from vllm_ext.cli.trie import trie_app
from vllm_ext.cli.warm import warm_command

app = typer.Typer(
    name="vllm-ext",
    help="Lossless speculative decoding methods for an unmodified vLLM.",
    epilog="Exit codes: 0: done; 1: what was looked at is not in order; 2: the command could not be carried out.",
    # Plain text: others take what stands in brackets for markup, and leave it out.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor", short_help="Say whether the methods can run here, and what to do if not.")(
    doctor_command
)
app.command("methods", short_help="List the methods; with NAME, the options of one.")(methods)
app.command("rules", short_help="List the sampling rules; with NAME, the options of one.")(rules)
app.command("demo", short_help="Run plain vLLM and a method side by side, on real servers.")(demo_command)
app.command("bench", short_help="Compare methods with plain vLLM on your own prompts.")(bench_command)
app.command("report", short_help="Make bench's page from saved figures.")(report_command)
app.command("warm", short_help="Make what a server's method knows before its first request.")(warm_command)
app.command("schema", short_help="Say whether JSON schemas are enforced whole.")(schema_command)
app.add_typer(datastore_app, name="datastore")
app.add_typer(train_app, name="train")
app.add_typer(kv_app, name="kv")
app.add_typer(trie_app, name="trie")
app.add_typer(caad_app, name="caad")
app.add_typer(svdecode_app, name="svdecode")
app.add_typer(adadec_app, name="adadec")


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
