# SPDX-License-Identifier: Apache-2.0
"""The tables of the bench's page: what stands for a method, and how figures are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_ext.bench.settings import PLAIN, short_labels
from vllm_ext.report.doubts import is_doubtful
from vllm_ext.report.saved_runs import CategoryFigures, Comparison, Run

NUM_COLOURS = 10  # of methods, before they repeat; the names do not


@dataclass(frozen=True)
class Key:
    """What stands for a method in plots and narrow columns."""

    letter: str  # its short name
    colour: str
    label: str


@dataclass(frozen=True)
class Cell:
    """A figure, and the lowest and highest round below it."""

    text: str
    spread: str = ""
    lost: bool = False  # slower than plain


@dataclass(frozen=True)
class Table:
    """Rows of figures: a name, then cells."""

    caption: str
    columns: Sequence[Key | str]  # of the cells
    corner: str  # heads the names
    rows: Sequence[tuple[Key | str, list[Cell]]]
    cards: bool = False  # on a phone each row is a block of its own


def is_lost(speedup: float | None) -> bool:
    """Slower than plain, as it is written."""
    return speedup is not None and round(speedup, 2) < 1


def method_keys(labels: Sequence[str]) -> dict[str, Key]:
    """A short name and a colour for each method, in this order; plain has no colour."""
    keys = {PLAIN: Key(PLAIN, "plain", PLAIN)}
    for label, name in short_labels(list(dict.fromkeys(labels))).items():
        keys.setdefault(label, Key(name, f"m{(len(keys) - 1) % NUM_COLOURS}", label))
    return keys


def summary(comparison: Comparison, keys: dict[str, Key], size: int) -> Table:
    """All methods at a batch size; figures that no run has are left out."""
    columns: dict[str, Callable[[Run], Cell]] = {
        "speed-up": lambda run: Cell("1.00x") if run.label == PLAIN else speedup_cell(run),
        "tokens/s": lambda run: figure_cell(run.tokens_per_s, run.tokens_per_s_rounds, ".1f"),
        "tokens/step": tokens_per_step_cell,
        "nodes/step": lambda run: figure_cell(
            run.draft_tokens_per_step, run.draft_tokens_per_step_rounds, ".2f"
        ),
        "draft time": lambda run: figure_cell(run.draft_time_share, (), ".1%"),
        "same / tie / wrong": lambda run: Cell(
            "-"
            if run.wrong_divergences is None
            else f"{run.identical} / {run.tie_divergences} / {run.wrong_divergences}",
            lost=bool(run.wrong_divergences),
        ),
    }
    runs = [run for run in comparison.runs if run.batch_size == size]
    kept = [head for head, cell in columns.items() if any(cell(run).text != "-" for run in runs)]
    what = "whole requests, prefill included" if comparison.load else "decoding, first token to last"
    return Table(
        f"Batch size {size}: {what}. Small: the lowest and the highest round.",
        list(kept),
        "method",
        [(keys[run.label], [columns[head](run) for head in kept]) for run in runs],
        cards=True,
    )


def speedup_cell(figures: Run | CategoryFigures) -> Cell:
    """Red below plain; with a question mark where it is more than drafts can do."""
    value = figures.speedup_vs_plain
    unit = "x ?" if isinstance(figures, Run) and is_doubtful(figures) else "x"
    return figure_cell(value, figures.speedup_vs_plain_rounds, ".2f", unit, is_lost(value))


def figure_cell(
    value: float | None, rounds: Sequence[float | None], form: str, unit: str = "", lost: bool = False
) -> Cell:
    """A value and its rounds, all written alike."""
    known = known_rounds(rounds)
    spread = f"{min(known):{form}}\u2013{max(known):{form}}" if known and min(known) < max(known) else ""
    return Cell("-" if value is None else f"{value:{form}}{unit}", spread, lost)


def known_rounds(rounds: Sequence[float | None]) -> list[float]:
    """Without the rounds that had nothing to measure."""
    return [value for value in rounds if value is not None]


def tokens_per_step_cell(figures: Run | CategoryFigures) -> Cell:
    """Tokens that a request's step puts out, with the spread over rounds."""
    return figure_cell(figures.tokens_per_step, figures.tokens_per_step_rounds, ".2f")


def throughput_cell(run: Run | None) -> Cell:
    """Of a method, or of none at this batch size."""
    return Cell("-") if run is None else figure_cell(run.tokens_per_s, run.tokens_per_s_rounds, ".1f")
