# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext bench``: its options, its table, its JSON and its page; ``vllm-ext report``: the page alone."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vllm_ext import __version__
from vllm_ext.bench.engine import EngineError
from vllm_ext.bench.settings import Settings, parse_batch_sizes, parse_methods
from vllm_ext.bench.side_by_side import run
from vllm_ext.cli.bench_serving import check_options, serving_settings, show
from vllm_ext.cli.output.bench_tables import progress, say_where
from vllm_ext.cli.output.bench_tables import show as show_engines

if TYPE_CHECKING:
    from vllm_ext.bench.serving import ServingSettings


def bench_command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model folder or Hugging Face id.")],
    prompts: Annotated[
        list[Path],
        typer.Option(
            help="JSON-lines file with messages, turns (the first is asked), question or prompt, "
            "and optionally category; FILE:N has at most N of each category, evenly spaced over it; "
            "can be given several times.",
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help="Comma list of NAME, NAME(key=value, ...) or FILE.json with speculative_config "
            "objects; plain (no speculation) is added when missing. num_speculative_tokens is 5, "
            "and ngram has prompt_lookup_max=4, prompt_lookup_min=2, unless given."
        ),
    ] = "plain,ngram,token_recycling",
    batch_size: Annotated[
        str, typer.Option(help="Requests in flight; comma list, each with fresh engines.")
    ] = "1",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts to use, evenly spaced over all files; default: all."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens an answer may have.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="0: greedy answers, compared with plain's. Above: answers are drawn, and cannot be compared.",
        ),
    ] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    workload: Annotated[
        str,
        typer.Option(
            help="fresh: each prompt is answered once, in one of the rounds. repeat: every round "
            "asks all prompts, so methods that learn replay their answers."
        ),
    ] = "fresh",
    dtype: Annotated[
        str,
        typer.Option(help="bfloat16, float16, float32 or auto; only float32 allows no near ties."),
    ] = "auto",
    max_model_len: Annotated[
        int, typer.Option(min=16, help="Tokens of prompt and answer; longer prompts are skipped.")
    ] = 2048,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="KV memory of each engine. Default: 1 GiB on a CPU, where VLLM_CPU_KVCACHE_SPACE (GiB), "
            "if set, goes before; an equal share of a GPU.",
        ),
    ] = None,
    compile_model: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the model, or run it eagerly; default: eager on a CPU only.",
        ),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    html_path: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page with plots to this file; needs the extra 'report' (matplotlib)."
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Over HTTP: a vllm serve for each method, and so many requests in flight; comma list.",
            rich_help_panel="Servers",
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(
            help="Over HTTP: requests a second, coming at random; comma list. --concurrency is then the most "
            "in flight.",
            rich_help_panel="Servers",
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="LABEL=http://host:port of a running server, instead of --methods; can be given several "
            "times. The one labelled plain, or the first, is what others are compared with.",
            rich_help_panel="Servers",
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            help="Milliseconds within which a request is a good one, as ttft:500,tpot:50,e2el:4000.",
            rich_help_panel="Servers",
        ),
    ] = None,
    input_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Make each prompt so long, with text of other prompts ahead of it.",
            rich_help_panel="Servers",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Each answer has --max-tokens tokens; text behind an answer's end repeats, and is easy to draft.",
            rich_help_panel="Servers",
        ),
    ] = False,
    serve_args: Annotated[
        str, typer.Option(help="More arguments of vllm serve, for all methods.", rich_help_panel="Servers")
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Compare methods on real engines: speed beside plain vLLM, and whether greedy outputs are the same.

    With --concurrency, --request-rate or --url on real servers under load: also latencies, timed as
    vllm bench serve does.

    Exits 1 when an answer differs from plain's by more than a near tie, or an engine fails.
    """
    console = Console()
    errors = Console(stderr=True)
    try:
        over_http = check_options(_written(context))
        settings = Settings(
            model=model,
            prompt_files=tuple(prompts),
            methods=tuple(parse_methods(methods)),
            batch_sizes=tuple(parse_batch_sizes(batch_size)),
            limit=limit,
            max_tokens=max_tokens,
            temperature=temperature,
            rounds=rounds,
            dtype=dtype,
            workload=workload,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            compile=compile_model,
            verbose=verbose,
        )
        check_folder("--json", json_path)
        check_folder("--html", html_path)
        if json_path is not None and html_path is not None and json_path.resolve() == html_path.resolve():
            raise ValueError(f"--json={json_path} and --html={html_path} are one file; give two.")
        if not math.isfinite(temperature):
            raise ValueError(f"--temperature={temperature} is not allowed; allowed: a number, at least 0.")
        if html_path is not None:
            _html()  # now, and not after the run
        if over_http:
            serving = serving_settings(
                settings, concurrency, request_rate, url or (), goodput, input_tokens, ignore_eos, serve_args
            )
            _bench_servers(serving, console, errors, json_path, html_path)
            return
        with progress(errors) as begin:
            report = run(settings, begin)
    except ValueError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except EngineError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None

    show_engines(console, report.runs)
    content = {
        "environment": environment(_asked(settings, report.dtype)),
        "notices": report.notices,
        "runs": report.runs,
    }
    _write(content, json_path, html_path, console, errors)
    for line in report.wrong:
        errors.print(f"[red]wrong:[/] {escape(line)}", highlight=False, soft_wrap=True)
    if report.wrong:
        raise typer.Exit(1)


def _written(context: typer.Context) -> list[str]:
    """Names of the options that the user wrote."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def _bench_servers(
    settings: ServingSettings,
    console: Console,
    errors: Console,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    from vllm_ext.bench.serving import run_serving

    try:
        with progress(errors) as begin:
            report = run_serving(settings, begin)
    except RuntimeError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    show(console, report)
    asked = _asked(settings.base, settings.base.dtype) | {
        "loads": [str(load) for load in settings.loads],
        "input_tokens": settings.input_tokens,
        "ignore_eos": settings.fixed_output,
        "serve_args": list(settings.serve_args),
        "urls": [f"{label}={url}" for label, url in settings.urls],
    }
    content = {"environment": environment(asked), "notices": report.notices, "serving": report.rows}
    _write(content, json_path, html_path, console, errors)
    if any(row["errors"] for row in report.rows):
        raise typer.Exit(1)


def _write(
    content: dict[str, Any], json_path: Path | None, html_path: Path | None, console: Console, errors: Console
) -> None:
    """The files that were asked for, the notices, and what was written where."""
    if json_path is not None:
        json_path.write_text(json.dumps(content, indent=2) + "\n")
    if html_path is not None:
        name = "this run, saved nowhere else" if json_path is None else json_path.name
        html_path.write_text(_html()([(name, content)]), encoding="utf-8")
    for notice in content["notices"]:
        errors.print(f"[yellow]note:[/] {escape(notice)}", highlight=False, soft_wrap=True)
    say_where(console, json_path, html_path)


def report_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE.json...", help="From vllm-ext bench --json, or from scripts/bench_load.py."
        ),
    ],
    html_path: Annotated[Path, typer.Option("--html", help="Write the page to this file.")],
) -> None:
    """Make bench's page from saved figures: one file that needs no network, with plots and tables.

    Several files of the same conditions, such as one for each batch size, are joined.
    Needs the extra 'report' (matplotlib).
    """
    try:
        check_folder("--html", html_path)
        html = _html()
        documents = [(path.name, _load(path)) for path in files]
        html_path.write_text(html(documents), encoding="utf-8")
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); give a file of vllm-ext bench --json.") from None


def check_folder(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written in the end.

    Raises:
        ValueError: naming the option.
    """
    if path is None:
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option}={path}: its folder does not exist; create it first.")
    if path.is_dir():
        raise ValueError(f"{option}={path} is a folder; give a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(
            f"{option}={path} cannot be written; give another place, or the right to write there."
        )


def _html() -> Callable[[Sequence[tuple[str, Any]]], str]:
    """What makes the page. Only here: a server, and a bench without a page, need no matplotlib."""
    with needs_report():
        from vllm_ext.report.bench_page import html
    return html


@contextmanager
def needs_report() -> Iterator[None]:
    """Around imports of what draws.

    Raises:
        ValueError: with what is not installed, and how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ValueError(
            f"--html needs {package}, which is not installed: pip install 'vllm-ext[report]'. Or write --json "
            "here, and make the page from it elsewhere with vllm-ext report, or vllm-ext kv page."
        ) from None


def environment(asked: dict[str, Any]) -> dict[str, Any]:
    """What figures depend on: where and with what they were made, and what was ``asked`` for."""
    import torch
    import vllm

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "vllm_ext": __version__,
        **asked,
        "command_line": sys.argv,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _asked(settings: Settings, dtype: str) -> dict[str, Any]:
    return {
        "model": settings.model,
        "dtype": dtype,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "rounds": settings.rounds,
        "limit": settings.limit,
        "workload": settings.workload,
        "prompt_files": [str(path) for path in settings.prompt_files],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
