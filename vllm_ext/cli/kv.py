# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext kv``: the methods for the KV cache, and what they cost and save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_ext.cli.listings import kv_methods
from vllm_ext.cli.output.console import errors_of, say, wrapped

kv_app = typer.Typer(help="KV caches that hold more tokens in the same memory.", no_args_is_help=True)


kv_app.command("methods", short_help="List the methods; with NAME, the options of one.")(kv_methods)


@kv_app.command("report", short_help="Measure room, quality and speed beside vLLM's own cache.")
def report_command(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="Any text of a few thousand words, as UTF-8.")],
    method: Annotated[
        list[str],
        typer.Option(
            help='A name, or an object: \'{"method": "kivi", "bits": 2}\'; can be given several times.'
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Model folder or id; default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    context: Annotated[int, typer.Option(min=256, help="Tokens of a window of the text.")] = 4096,
    windows: Annotated[int, typer.Option(min=1, help="How many are read, at most.")] = 3,
    answer: Annotated[
        int, typer.Option(min=8, help="Tokens at the end of a window that are also given as an answer.")
    ] = 256,
    keys: Annotated[int, typer.Option(min=0, help="Pass keys hidden at each of five depths.")] = 4,
    decode_context: Annotated[
        str, typer.Option(help="Behind how many tokens decoding is timed; comma list.")
    ] = "1024,7168",
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 4,
    decode_tokens: Annotated[int, typer.Option(min=2, help="Of each of them.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of decoding, in turns with vLLM's cache.")] = 3,
    fill: Annotated[bool, typer.Option("--fill", help="Fill each cache with requests to the end.")] = False,
    memory: Annotated[float, typer.Option(min=0.01, help="GiB of KV cache of each engine.")] = 1.0,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of a step of each engine. Under a window, fewer make more room."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page with plots to this file. Needs the extra 'report'."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Measure what a KV cache holds, what it costs in quality and how fast it is, beside vLLM's own.

    Two engines stand in memory at a time. Timed figures mean something where nothing else runs.
    """
    from vllm_ext.cli.bench import check_folder, environment
    from vllm_ext.config import kv_cache
    from vllm_ext.demo import embedded_model

    console, errors = Console(), Console(stderr=True)
    with errors_of(errors):
        for option, path in (("--json", json_path), ("--html", html_path)):
            check_folder(option, path)
        page = None if html_path is None else _page()
        methods = [_method(each) for each in method]
        for each in methods:
            kv_cache.parse(each)
        contexts = _numbers(decode_context)
        from vllm_ext.bench.side_by_side import set_environment

        set_environment(verbose)
        from vllm_ext.bench.kv_quality import Plan, measure

        plan = Plan(
            model=model or str(embedded_model.ensure_model()),
            text=text.read_text(encoding="utf-8"),
            methods=methods,
            context=context,
            windows=windows,
            answer=min(answer, context // 2),
            keys=keys,
            decode_contexts=contexts,
            batch=batch,
            decode_tokens=decode_tokens,
            rounds=rounds,
            fill=fill,
            dtype=dtype,
            memory_bytes=int(memory * 2**30),
            max_num_batched_tokens=max_num_batched_tokens,
        )
        asked = {"model": plan.model, "dtype": dtype, "context": context, "windows": windows, "keys": keys}
        asked |= {
            "answer": plan.answer,
            "batch": batch,
            "decode_tokens": decode_tokens,
            "rounds": rounds,
            "memory_gib": memory,
        }
        if max_num_batched_tokens is not None:
            asked["max_num_batched_tokens"] = max_num_batched_tokens
        for found in measure(plan, lambda line: say(errors, line)):
            document = {"environment": environment(asked), **found}
            if json_path is not None:  # after each method: what is measured is not lost
                json_path.write_text(json.dumps(document, indent=1) + "\n")
        if html_path is not None and page is not None:
            name = "this run, saved nowhere else" if json_path is None else json_path.name
            html_path.write_text(page(name, document), encoding="utf-8")
    show(console, document)


@kv_app.command("page")
def page_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="From vllm-ext kv report --json.")],
    html_path: Annotated[Path, typer.Option("--html", help="Write the page to this file.")],
) -> None:
    """Make the page of kv report from saved figures. Needs the extra 'report'."""
    from vllm_ext.cli.bench import check_folder

    with errors_of(Console(stderr=True)):
        check_folder("--html", html_path)
        page = _page()
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{file}: not JSON ({error}); give a file of vllm-ext kv report --json."
            ) from None
        html_path.write_text(page(file.name, document), encoding="utf-8")


def _method(given: str) -> dict[str, Any]:
    if not given.lstrip().startswith("{"):
        return {"method": given}
    try:
        found: dict[str, Any] = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--method={given!r} is not JSON ({error}); allowed: a name, or an object with a method."
        ) from None
    return found


def _numbers(given: str) -> list[int]:
    numbers = [int(part) for part in given.split(",") if part.strip().isdigit()]
    if len(numbers) != len(given.split(",")) or not all(numbers):
        raise ValueError(
            f"--decode-context={given!r} is not allowed; allowed: positive integers, 1024,7168 say."
        )
    return numbers


def _page() -> Any:
    from vllm_ext.cli.bench import needs_report

    with needs_report():
        from vllm_ext.report.kv_page import html
    return html


HEADERS = "room", "text\nPPL", "text\nKL", "answer\nPPL", "answer\nKL", "same\ntoken", "keys", "decode"


def show(console: Console, document: Any) -> None:
    """Print the table of a report.

    Args:
        console: where to.
        document: parsed JSON of ``vllm-ext kv report --json``.
    """
    from vllm_ext.bench.settings import short_labels
    from vllm_ext.cli.output.bench_tables import print_names, print_table

    plain = document["plain"]

    def said(keys: list[dict[str, float]]) -> str:
        return f"{sum(row['found'] for row in keys) / len(keys):.0%}" if keys else "-"

    def change(entry: dict[str, float], of_plain: dict[str, float]) -> str:
        return f"{100 * (entry['perplexity'] / of_plain['perplexity'] - 1):+.2f}%"

    short = short_labels([entry["label"] for entry in document["methods"]])
    perplexity, of_answers = f"{plain['perplexity']:.2f}", f"{plain['answers']['perplexity']:.2f}"
    found = said(plain["keys"])
    rows: list[tuple[str, tuple[str, ...]]]
    rows = [("vLLM's", ("1.00x", perplexity, "", of_answers, "", "", found, ""))]
    for entry in document["methods"]:
        cells = (
            f"{entry['capacity']:.2f}x",
            change(entry, plain),
            f"{entry['kl']:.4f}",
            change(entry["answers"], plain["answers"]),
            f"{entry['answers']['kl']:.4f}",
            f"{entry['same_likeliest']:.1%}",
            said(entry["keys"]),
            " ".join(f"{row['speed']:.2f}x" for row in entry["decode"]),
        )
        rows.append((short[entry["label"]], cells))
    title = f"KV caches; vLLM's has room for {plain['capacity_tokens']:,} tokens"
    print_table(console, title, HEADERS, rows)
    print_names(console, short)
    wrapped(
        console,
        "",
        "PPL: perplexity, vLLM's and the change of it; KL: divergence in nats; answer: the last tokens of a "
        "window; same token: the likeliest is plain's; keys: pass keys that are said; decode: speed beside vLLM's.",
    )
