# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext demo``: plain vLLM and one of our methods side by side, on screen."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_ext.cli.output.console import errors_of

if TYPE_CHECKING:
    from vllm_ext.demo.servers import Answer, Server

# A panel shows the end of a long answer.
PANEL_CHARACTERS = 420
HEADERS = "decode\ntok/s", "speed\nup", "tokens\na step", "drafted", "accepted", "identical\noutput"


@dataclass
class _Column:
    """One server's side of the screen."""

    server: Server
    shown: str = ""
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(answer.decode_seconds for answer in self.answers)
        tokens = sum(answer.num_tokens - 1 for answer in self.answers)
        return tokens / seconds if seconds else 0.0

    def panel(self) -> Panel:
        title = f"{self.server.label}  {self.tokens_per_s:.1f} tok/s" if self.answers else self.server.label
        return Panel(Text(self.shown[-PANEL_CHARACTERS:]), title=title, height=10)


def demo_command(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or id; default: the embedded SmolLM2-135M-Instruct."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Method or --speculative-config JSON of the second server.")
    ] = "token_recycling",
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt a line; default: six built in.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer may have.")] = 128,
    dtype: Annotated[
        str, typer.Option(help="float32 compares outputs exactly; in bfloat16 plain vLLM itself has ties.")
    ] = "float32",
) -> None:
    """Start two real servers, plain vLLM and a method of ours, and answer the same prompts with both.

    Prints each server's decode speed, its tokens per engine step (from /metrics) and whether the outputs are
    identical; exits 1 when they are not.
    """
    import shlex

    from vllm_ext.bench.local_server import wait_until_ready
    from vllm_ext.demo import embedded_model
    from vllm_ext.demo import servers as demo

    console = Console()
    with errors_of(Console(stderr=True)):
        config = _method(method)
        questions = [*demo.PROMPTS]
        if prompts is not None:
            questions = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
            if not questions:
                raise ValueError(f"--prompts={prompts} holds no prompt; give a text file with one a line.")
    try:
        folder = model or str(embedded_model.ensure_model())
        with ExitStack() as stack:
            servers = [
                stack.enter_context(demo.Server("plain vLLM", folder, dtype, None)),
                stack.enter_context(demo.Server(str(config["method"]), folder, dtype, config)),
            ]
            for server in servers:
                console.print(f"$ {shlex.join(server.command)}", soft_wrap=True, highlight=False)
            with console.status("starting both servers (about a minute) ..."):
                for _ in wait_until_ready(servers):
                    pass
            columns = [_Column(server) for server in servers]
            _answer(console, columns, questions, max_tokens)
            identical = _summary(console, columns)
    except RuntimeError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    if identical < len(questions):
        raise typer.Exit(1)


def _method(given: str) -> dict[str, Any]:
    """Of the second server.

    Raises:
        ValueError: it is none.
    """
    from vllm_ext.config import speculative

    if not given.lstrip().startswith("{"):
        found: dict[str, Any] = {"method": given}
    else:
        try:
            found = json.loads(given)
        except ValueError as error:
            raise ValueError(
                f"--method={given[:200]!r} is not JSON ({error}); allowed: a name, or an object with a method."
            ) from None
    if speculative.is_ours(found):
        speculative.parse(found)
    else:
        speculative.check_known(found)
    if not found.get("method"):
        raise ValueError(
            f"--method={given[:200]!r} names no method; allowed: a name, or an object with a method."
        )
    return found


def _answer(console: Console, columns: list[_Column], questions: list[str], max_tokens: int) -> None:
    """Each prompt to both servers in turn, never at the same time: they share this machine's cores."""
    from vllm_ext.demo.servers import Answer

    # Both servers' first request pays for what no later one pays for.
    for column in columns:
        for _ in column.server.stream("Say hello.", 8):
            pass

    def screen(number: int, question: str) -> Group:
        row = Table.grid(expand=True)
        row.add_column(ratio=1)
        row.add_column(ratio=1)
        row.add_row(*(column.panel() for column in columns))
        return Group(Text(f"[{number}/{len(questions)}] {question}", style="bold"), row)

    with Live(console=console, refresh_per_second=12) as live:
        for number, question in enumerate(questions, 1):
            for column in columns:
                column.shown = ""
            # Turns alternate, so that neither is always the one that runs warm.
            for column in columns if number % 2 else columns[::-1]:
                for piece in column.server.stream(question, max_tokens):
                    if isinstance(piece, Answer):
                        column.answers.append(piece)
                    else:
                        column.shown += piece
                    live.update(screen(number, question))


def _summary(console: Console, columns: list[_Column]) -> int:
    """Print the table; returns how many answers are identical."""
    from vllm_ext.cli.output.bench_tables import print_table

    plain = columns[0]
    identical = sum(
        a.text == b.text and a.num_tokens == b.num_tokens
        for a, b in zip(plain.answers, columns[1].answers, strict=True)
    )
    rows = []
    for column in columns:
        read = column.server.metric
        # Both from vLLM's own counters: tokens generated over engine steps that generated any.
        per_step = read("vllm:generation_tokens_total") / max(read("vllm:iteration_tokens_total_count"), 1)
        cells = (
            f"{column.tokens_per_s:.1f}",
            f"{column.tokens_per_s / max(plain.tokens_per_s, 1e-9):.2f}x",
            f"{per_step:.2f}",
            f"{read('vllm_ext:spec_draft_tokens_total'):.0f}",
            f"{read('vllm_ext:spec_accepted_tokens_total'):.0f}",
            "" if column is plain else f"{identical} of {len(plain.answers)}",
        )
        rows.append((column.server.label, cells))
    print_table(console, f"{len(plain.answers)} prompts", HEADERS, rows)
    return identical
