# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext bench`` over HTTP: its options, and its tables in a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from vllm_ext.bench.serving import ServingReport, ServingSettings, parse_limits, parse_loads, parse_urls
from vllm_ext.bench.serving_stats import latency, same
from vllm_ext.bench.settings import Settings, short_labels
from vllm_ext.bench.stats import number
from vllm_ext.cli.output.bench_tables import print_names, print_table

# Options of a bench over HTTP, and those that only a bench without it has, or only servers of our own.
HTTP_OPTIONS = ("concurrency", "request_rate", "url")
WITH_HTTP = ("goodput", "input_tokens", "ignore_eos", "serve_args")
WITHOUT_HTTP = ("batch_size", "workload")
OF_OWN_SERVERS = ("methods", "dtype", "kv_cache_memory_bytes", "compile_model", "serve_args")


def check_options(given: Sequence[str]) -> bool:
    """Whether the bench is one over HTTP.

    Args:
        given: names of the options that were written.

    Raises:
        ValueError: options that do not go together.
    """
    over_http = [name for name in HTTP_OPTIONS if name in given]
    if not over_http:
        if alone := [name for name in WITH_HTTP if name in given]:
            raise ValueError(
                f"{_option(alone[0])} goes with servers; add --concurrency 1,8,32, --request-rate or --url."
            )
        return False
    if beside := [name for name in WITHOUT_HTTP if name in given]:
        raise ValueError(
            f"{_option(beside[0])} is not allowed with {_option(over_http[0])}; give --concurrency for requests in "
            "flight, and each prompt is asked once."
        )
    if "url" in given and (beside := [name for name in OF_OWN_SERVERS if name in given]):
        raise ValueError(
            f"{_option(beside[0])} is not allowed with --url: a running server has its own; leave it out, and give "
            "each server a label, --url plain=http://host:8000."
        )
    return True


def _option(name: str) -> str:
    return "--" + {"compile_model": "compile"}.get(name, name).replace("_", "-")


def serving_settings(
    base: Settings,
    concurrency: str | None,
    request_rate: str | None,
    urls: Sequence[str],
    goodput: str | None,
    input_tokens: int | None,
    ignore_eos: bool,
    serve_args: str,
) -> ServingSettings:
    """The options as settings.

    Raises:
        ValueError: naming the option.
    """
    if input_tokens is not None and input_tokens + base.max_tokens > base.max_model_len:
        raise ValueError(
            f"--input-tokens={input_tokens} and --max-tokens={base.max_tokens} do not fit into "
            f"--max-model-len={base.max_model_len}; raise that, or lower one."
        )
    loads = parse_loads(concurrency, request_rate) or parse_loads("1", None)
    return ServingSettings(
        base,
        loads,
        parse_urls(urls),
        input_tokens,
        ignore_eos,
        parse_limits(goodput),
        tuple(shlex.split(serve_args)),
    )


def show(console: Console, report: ServingReport) -> None:
    """Print two tables for each load, speed with latency and steps; below them what short names stand for."""
    short = short_labels(list(dict.fromkeys(row["label"] for row in report.rows)))
    for load in dict.fromkeys(row["load"] for row in report.rows):
        rows = [row for row in report.rows if row["load"] == load]
        for what, columns in (("milliseconds: median / p90 / p99", LATENCY), ("steps", STEPS)):
            kept = [name for name, cell in columns.items() if any(cell(row) != "-" for row in rows)]
            cells = [(short[row["label"]], [columns[name](row) for name in kept]) for row in rows]
            print_table(console, f"{load}, {what}", kept, cells)
    print_names(console, short)


Cells = dict[str, Callable[[dict[str, Any]], str]]
LATENCY: Cells = {
    "tok/s": lambda row: number(row["output_tokens_per_s"], ".1f"),
    "speed\nup": lambda row: number(row["speedup_vs_plain"], ".2f", "x"),
    "first token": lambda row: latency(row, "ttft"),
    "per token": lambda row: latency(row, "tpot"),
    "between pieces": lambda row: latency(row, "itl"),
}
STEPS: Cells = {
    "tokens\n/step": lambda row: number(row["tokens_per_step"], ".2f"),
    "drafts\n/step": lambda row: number(row["draft_tokens_per_request_step"], ".1f"),
    "accept\n-ed": lambda row: number(row["acceptance"], ".0%"),
    "step\nms": lambda row: number(row["step_ms"], ".1f"),
    "target\neff.": lambda row: number(row["target_efficiency"], ".2f"),
    "goodput": lambda row: number(row["goodput_share"], ".0%"),
    "same as\nplain": same,
    "failed": lambda row: str(len(row["errors"])) if row["errors"] else "-",
}
