# SPDX-License-Identifier: Apache-2.0
"""The bench's figures as one page of HTML: no scripts, nothing loaded from anywhere, the same bytes for the same JSON.

What every plot shows stands below it as a table too. Values are escaped by the template, whose text is in
bench_report.html.jinja; this file decides what is shown, plots.py draws.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vllm_ext.bench.settings import PLAIN
from vllm_ext.report import plots as bench_plots
from vllm_ext.report.doubts import doubts
from vllm_ext.report.plots import Mark, Point
from vllm_ext.report.saved_runs import CategoryFigures, Comparison, Run, comparisons
from vllm_ext.report.tables import (
    Cell,
    Key,
    Table,
    known_rounds,
    method_keys,
    speedup_cell,
    summary,
    throughput_cell,
    tokens_per_step_cell,
)

ALL = "all prompts"
NO_FIGURES = CategoryFigures(prompts=0)  # of a method that was not asked this category


@dataclass(frozen=True)
class Plot:
    """A plot in all layouts, with its tables."""

    title: str
    reading: str  # what is drawn, and how
    svgs: list[Markup]
    tables: list[Table]


@dataclass(frozen=True)
class Section:
    """One comparison as the template shows it."""

    title: str
    conditions: str
    verdict: str
    wrong: list[str]  # a line for each wrong answer, or each method that has some
    legend: list[Key]
    compared: bool  # whether the file says anything of the answers
    summaries: list[Table]  # one for each batch size
    plots: list[Plot]
    remarks: list[str]
    environments: list[tuple[str, str, list[tuple[str, str]]]]  # file, command, what it ran on
    headline: str = ""
    doubts: Sequence[str] = ()


def sections(documents: Sequence[tuple[str, Any]]) -> list[Section]:
    """What the page shows of benches of engines.

    Args:
        documents: file name and parsed JSON of each. Those made under the same conditions are joined.

    Raises:
        ValueError: one that is not of the bench; the message names it.
    """
    found = comparisons(documents)
    for comparison in found:
        _sort(comparison)
    keys = method_keys([run.label for comparison in found for run in comparison.runs])
    return [_section(comparison, keys, number) for number, comparison in enumerate(found)]


def render(template: str, **values: Any) -> str:
    """One of the package's pages."""
    environment = Environment(
        loader=PackageLoader("vllm_ext.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(values) + "\n"


def _section(comparison: Comparison, keys: dict[str, Key], number: int) -> Section:
    environments = [environment for _, environment in comparison.files]
    first = environments[0]
    model = str(first.get("model", "")).rstrip("/").rpartition("/")[2] or "unknown model"
    sizes = ", ".join(map(str, comparison.batch_sizes))
    plots = [] if comparison.load else _category_plots(comparison, keys, f"s{number}")
    plots += _node_plots(comparison, keys, f"s{number}nodes")
    plots += _batch_plots(comparison, keys, f"s{number}batch")
    verdict, wrong = _verdict(comparison)
    return Section(
        title=model,
        conditions=conditions_of(first, f"batch size {sizes}", comparison.runs[0].prompts),
        verdict=verdict,
        wrong=wrong,
        legend=[keys[label] for label in dict.fromkeys(run.label for run in comparison.runs)],
        compared=any(run.wrong_divergences is not None for run in comparison.runs),
        summaries=[summary(comparison, keys, size) for size in comparison.batch_sizes],
        plots=plots,
        remarks=_remarks(comparison),
        environments=environments_of(comparison.files),
        headline=_headline(comparison, keys),
        doubts=doubts(comparison.runs),
    )


def _sort(comparison: Comparison) -> None:
    """The fastest method first, by its speed-up at the smallest batch size that it ran at; plain before all."""
    first: dict[str, float] = {}
    for run in sorted(comparison.runs, key=lambda run: run.batch_size):
        first.setdefault(run.label, run.speedup_vs_plain or 0.0)
    comparison.runs.sort(key=lambda run: (run.label != PLAIN, -first[run.label]))


def _headline(comparison: Comparison, keys: dict[str, Key]) -> str:
    """What came out, in one sentence."""
    runs = [run for run in comparison.runs if run.label != PLAIN and run.speedup_vs_plain is not None]
    if not runs:
        return ""
    best = max(runs, key=lambda run: run.speedup_vs_plain or 0.0)
    speedup = f"{best.speedup_vs_plain:.2f}x"
    where = f"at batch size {best.batch_size}"
    tokens = f", with {best.tokens_per_step:.2f} tokens a step" if best.tokens_per_step is not None else ""
    if (best.speedup_vs_plain or 0.0) > 1.0:
        return f"{keys[best.label].letter} is the fastest: {speedup} plain vLLM's speed {where}{tokens}."
    return f"No method is faster than plain vLLM; {keys[best.label].letter} comes nearest: {speedup} {where}{tokens}."


def conditions_of(environment: dict[str, Any], load: str, prompts: int | None) -> str:
    """One line: what was run on what."""
    facts = [
        environment.get("dtype"),
        load,
        _counted(prompts, "prompt"),
        _counted(environment.get("max_tokens"), "token", " an answer"),
        f"temperature {environment['temperature']:g}" if environment.get("temperature") else None,
        _counted(environment.get("rounds"), "round"),
        environment.get("cpu_model"),
        _counted(environment.get("cores", environment.get("cpus")), "core"),
        f"vLLM {environment['vllm']}" if "vllm" in environment else None,
        str(environment.get("date", ""))[:10],
    ]
    return ", ".join(str(fact) for fact in facts if fact)


def environments_of(
    files: Sequence[tuple[str, dict[str, Any]]],
) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """File, command, and what it ran on."""
    return [
        (name, shlex.join(map(str, entry.get("command_line") or [])), listed(entry)) for name, entry in files
    ]


def _breakable(text: str) -> Markup:
    """Escaped, and may go on in the next line behind these characters of long names."""
    return Markup("").join(part + Markup("<wbr>") for part in re.split(r"(?<=[,_/])|(?<=\()(?=[a-z])", text))


def _counted(number: Any, noun: str, after: str = "") -> str | None:
    return None if number is None else f"{number} {noun}{'' if number == 1 else 's'}{after}"


def listed(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """What a run depended on, as a page shows it."""

    def text(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)

    return [(key, text(value)) for key, value in environment.items() if key != "command_line"]


def _verdict(comparison: Comparison) -> tuple[str, list[str]]:
    """One sentence on the answers, and a line for each wrong one."""
    runs = [run for run in comparison.runs if run.label != PLAIN]
    compared = [run for run in runs if run.wrong_divergences is not None]
    if not compared:
        return "Answers were not compared in these runs.", []
    same, ties = (
        sum(getattr(run, kind) or 0 for run in compared) for kind in ("identical", "tie_divergences")
    )
    wrong = [
        f"{run.label}, batch size {run.batch_size}: {line}"
        for run in compared
        for line in run.wrong
        or [f"{run.wrong_divergences} of {run.prompts} answers"] * bool(run.wrong_divergences)
    ]
    count = sum(run.wrong_divergences or 0 for run in compared)
    if count:
        return f"{count} wrong: answers that leave plain's by more than a near tie.", wrong
    return (
        f"No wrong answer: of {same + ties} answers {same} are token-identical to plain's, {ties} leave it where "
        "plain's own first two candidates are nearly tied.",
        [],
    )


def _mark(key: Key, value: float | None, rounds: Sequence[float | None]) -> Mark:
    return Mark(key.letter, key.colour, value, known_rounds(rounds))


def _at(comparison: Comparison, size: int) -> list[Run]:
    """The methods at a batch size, without plain."""
    return [run for run in comparison.runs if run.batch_size == size and run.label != PLAIN]


def _category_plots(comparison: Comparison, keys: dict[str, Key], salt: str) -> list[Plot]:
    plots = []
    for size in comparison.batch_sizes:
        runs = _at(comparison, size)
        names = sorted({name for run in runs for name in run.category})
        if not names:
            continue
        categories = [(name, [run.category.get(name, NO_FIGURES) for run in runs]) for name in names]
        rows: list[tuple[str, int, Sequence[Run | CategoryFigures]]] = [(ALL, runs[0].prompts or 0, runs)]
        rows += [(name, max(entry.prompts for entry in entries), entries) for name, entries in categories]
        groups = [
            (
                name,
                [
                    _mark(keys[run.label], entry.speedup_vs_plain, entry.speedup_vs_plain_rounds)
                    for run, entry in zip(runs, entries, strict=True)
                ],
            )
            for name, _, entries in rows
        ]
        where = f", batch size {size}" if len(comparison.batch_sizes) > 1 else ""
        tables = [
            Table(
                caption,
                [keys[run.label] for run in runs],
                "category (prompts)",
                [(f"{name} ({count})", [cell(entry) for entry in entries]) for name, count, entries in rows],
            )
            for caption, cell in (
                (f"Speed-up over plain{where}", speedup_cell),
                (f"Tokens per step and request{where} (plain: 1.00)", tokens_per_step_cell),
            )
        ]
        plots.append(
            Plot(
                f"Speed-up by category{where}",
                f"Bars: decode speed as a multiple of plain's in the same run; plain is the dashed line at 1.00x, and "
                f"what is slower is red. \u201c{ALL}\u201d is the median of the rounds\u2019 ratios, a category the "
                "ratio over all its prompts; an arrow says that more is cut off. "
                f"{_spread(comparison, [e for _, entries in categories for e in entries])}",
                [Markup(svg) for svg in bench_plots.category_bars(groups, f"{salt}b{size}")],
                tables,
            )
        )
    return plots


def _spread(comparison: Comparison, entries: Sequence[CategoryFigures]) -> str:
    """What the lines over the bars are."""
    if not any(len(known_rounds(entry.speedup_vs_plain_rounds)) > 1 for entry in entries):
        return f"Thin lines: lowest to highest round, for \u201c{ALL}\u201d; no category has several rounds here."
    if comparison.conditions["workload"] == "repeat":
        return "Thin lines: lowest to highest round; every round asks all prompts again."
    return "Thin lines: lowest to highest round; rounds have different prompts."


def _node_plots(comparison: Comparison, keys: dict[str, Key], salt: str) -> list[Plot]:
    panels = []
    for size in comparison.batch_sizes:
        points = [
            Point(
                _mark(keys[run.label], run.draft_tokens_per_step, run.draft_tokens_per_step_rounds),
                _mark(keys[run.label], run.tokens_per_step, run.tokens_per_step_rounds),
            )
            for run in _at(comparison, size)
            if run.tokens_per_step is not None and run.draft_tokens_per_step is not None
        ]
        if points:
            panels.append((f"batch size {size}", points))
    if not panels:
        return []
    return [
        Plot(
            "Tokens per step and nodes per step",
            "Each point is a method: how many draft tokens (tree nodes) a step verifies for a request, and how many "
            "tokens the step emits. Higher is better, further left is cheaper. Square: plain, one token a step. "
            "Dashed: every draft accepted, which nothing can pass. Thin lines: lowest to highest round, where the "
            "file has them. The figures are in the table of all methods.",
            [Markup(svg) for svg in bench_plots.tokens_and_nodes(panels, salt)],
            [],
        )
    ]


def _batch_plots(comparison: Comparison, keys: dict[str, Key], salt: str) -> list[Plot]:
    if len(comparison.batch_sizes) < 2:
        return []
    runs = sorted(comparison.runs, key=lambda run: run.batch_size)
    labels = list(dict.fromkeys(run.label for run in comparison.runs))
    found = {(run.label, run.batch_size): run for run in runs}

    def lines(
        value: str, rounds: str, all_labels: list[str]
    ) -> list[tuple[str, str, list[tuple[int, Mark]]]]:
        return [
            (
                keys[label].letter,
                keys[label].colour,
                [
                    (run.batch_size, _mark(keys[label], getattr(run, value), getattr(run, rounds)))
                    for run in runs
                    if run.label == label
                ],
            )
            for label in all_labels
        ]

    panels = [
        ("throughput", "tokens/s, all requests", lines("tokens_per_s", "tokens_per_s_rounds", labels)),
        (
            "speed-up",
            "multiples of plain's speed",
            lines("speedup_vs_plain", "speedup_vs_plain_rounds", labels),
        ),
    ]
    return [
        Plot(
            "Throughput and batch size",
            "Tokens per second of all requests together, and the same as a multiple of plain's. Dashed: plain. "
            "Upright lines: lowest to highest round.",
            [Markup(svg) for svg in bench_plots.over_batch_sizes(panels, salt)],
            [
                Table(
                    caption,
                    [keys[label] for label in labels],
                    "batch size",
                    [
                        (str(size), [cell(found.get((label, size))) for label in labels])
                        for size in comparison.batch_sizes
                    ],
                )
                for caption, cell in (
                    ("Tokens per second, all requests together", throughput_cell),
                    ("Speed-up over plain", lambda run: Cell("-") if run is None else speedup_cell(run)),
                )
            ],
        )
    ]


def _remarks(comparison: Comparison) -> list[str]:
    remarks = list(comparison.notices)
    if len(comparison.batch_sizes) < 2:
        remarks.append(
            "Throughput over the batch size needs at least two: run with --batch-size 1,4, or make the page from "
            "the JSON files of several runs."
        )
    return remarks
