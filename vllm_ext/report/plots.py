# SPDX-License-Identifier: Apache-2.0
"""The plots of the bench's page, each in every layout: bars, points, lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, isclose

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from vllm_ext.report.svg import ANY, DESKTOP, PAINT, PHONE, canvas, draw_layouts
from vllm_ext.report.tables import is_lost

BAR, HEADER, GAP = 15, 20, 9  # pixels: a bar's row, a category's name, the space below a category
OUTLIER = 1.5  # times what nine of ten bars reach
LONGEST_NAME = 34  # characters of a category's name that fit above its bars


@dataclass(frozen=True)
class Mark:
    """A method's figure with its rounds' figures."""

    letter: str  # its short name
    colour: str  # a key of PAINT
    value: float | None
    rounds: Sequence[float]

    @property
    def span(self) -> tuple[float, float] | None:
        """Lowest and highest round; None with fewer than two."""
        return (min(self.rounds), max(self.rounds)) if len(self.rounds) > 1 else None


@dataclass(frozen=True)
class Point:
    """A method among tokens and nodes of a step."""

    nodes: Mark
    tokens: Mark


def category_bars(groups: Sequence[tuple[str, Sequence[Mark]]], salt: str) -> list[str]:
    """Speed-up bars, a group for each category, with lines from the lowest to the highest round.

    Args:
        groups: name and bars; all have as many.
        salt: different for each plot of a page; part of the SVG's ids.
    """
    bars = [bar for _, group in groups for bar in group]
    limit = _limit([bar.value for bar in bars if bar.value is not None])
    left = name_width([bar.letter for bar in bars])

    def draw(width: int, columns: int) -> Figure:
        columns = min(columns, len(groups))
        per_column = ceil(len(groups) / columns)
        inside = per_column * (HEADER + BAR * len(groups[0][1]) + GAP)
        figure, place = canvas(width, inside + 68, columns, left=left, right=50, top=24, bottom=44)
        for column in range(columns):
            axes = place(column, 0, inside)
            part = groups[column * per_column : (column + 1) * per_column]
            axes.set(xlim=(0, limit), ylim=(inside, 0))
            axes.set_xlabel("decode speed, multiples of plain's")
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axes.xaxis.set_major_formatter(lambda x, _: "plain 1x" if x == 1 else f"{x:g}x")
            axes.tick_params(axis="x", labeltop=True, length=0, labelsize=11)
            axes.grid(axis="x")
            axes.spines[["left", "bottom"]].set_visible(False)
            _draw_groups(axes, part)
        return figure

    return draw_layouts(
        draw, "Bars: decode speed of each method beside plain, by category", salt, PHONE | DESKTOP
    )


def _limit(values: Sequence[float]) -> float:
    """Where bars end that are far longer than nearly all others: those would be too short to be told apart."""
    if not values:
        return 1.25
    usual = sorted(values)[int(0.9 * (len(values) - 1))]
    return max(1.25, min(max(values), OUTLIER * usual)) * 1.08


def name_width(names: Sequence[str]) -> float:
    """Pixels that the longest of some names takes in small type, and a gap."""
    return 8 + 6.6 * max(map(len, names), default=0)


def _draw_groups(axes: Axes, groups: Sequence[tuple[str, Sequence[Mark]]]) -> None:
    ticks, letters, y = [], [], 0.0
    for name, bars in groups:
        short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "\u2026"
        axes.text(0, y + HEADER - 5, short, fontweight="bold", va="baseline", fontsize=13)
        y += HEADER
        end = y + BAR * len(bars)
        axes.vlines(1, y - 1, end + 1, color=PAINT["page"], linewidth=2.4, zorder=3)
        axes.vlines(1, y - 1, end + 1, color=PAINT["text"], linewidth=1.2, linestyle=(0, (3, 2)), zorder=3)
        for bar in bars:
            middle = y + BAR / 2
            ticks.append(middle)
            letters.append(bar.letter)
            limit = axes.get_xlim()[1]
            if bar.value is not None:
                axes.barh(middle, min(bar.value, limit), height=BAR - 4, color=PAINT[bar.colour])
            if max([bar.value or 0.0, *bar.rounds]) > limit:
                axes.plot(limit, middle, ">", color=PAINT["text"], markersize=6, clip_on=False, zorder=5)
            if bar.span:
                span = [min(end, limit) for end in bar.span]
                for paint, width in (("page", 3.2), ("text", 1.4)):  # seen on the bar and beside it
                    axes.plot(
                        span,
                        [middle, middle],
                        marker="|",
                        markersize=7,
                        markeredgewidth=width,
                        linewidth=width,
                        color=PAINT[paint],
                        zorder=4,
                    )
            lost = is_lost(bar.value)
            axes.annotate(
                "-" if bar.value is None else f"{bar.value:.2f}x",
                (1, middle),
                xycoords=("axes fraction", "data"),
                xytext=(44, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                color=PAINT["loss" if lost else "text"],
                fontweight="bold" if lost else "normal",
            )
            y += BAR
        y += GAP
    axes.set_yticks(ticks, letters)
    axes.tick_params(axis="y", length=0, labelsize=11)


def tokens_and_nodes(panels: Sequence[tuple[str, Sequence[Point]]], salt: str) -> list[str]:
    """Tokens per step over nodes per step, a panel for each batch size; lines are the rounds' spans.

    Args:
        panels: title and points.
        salt: as above.
    """
    points = [point for _, panel in panels for point in panel]
    right = max(_reached([point.nodes for point in points], 1.0)) * 1.12
    top = 1 + (max(_reached([point.tokens for point in points], 1.5)) - 1) * 1.15
    layouts = PHONE | DESKTOP if len(panels) > 1 else ANY

    def draw(width: int, columns: int) -> Figure:
        columns = min(columns, len(panels))
        rows, height = ceil(len(panels) / columns), 250
        figure, place = canvas(width, rows * (height + 78), columns, left=46, right=14, top=28, bottom=50)
        for number, (title, panel) in enumerate(panels):
            axes = place(number % columns, number // columns * (height + 78), height)
            axes.set(xlim=(-0.03 * right, right), ylim=(1 - 0.06 * (top - 1), top))
            axes.set_xlabel("draft nodes verified, per step and request")
            axes.set_ylabel("tokens emitted, per step and request")
            axes.set_title(title, loc="left", fontsize=13, fontweight="bold")
            axes.grid()
            axes.tick_params(length=0, labelsize=11)
            ends = min(right, top - 1)
            axes.plot([0, ends], [1, 1 + ends], color=PAINT["muted"], linewidth=1, linestyle=(0, (4, 3)))
            axes.plot(0, 1, "s", color=PAINT["plain"], markersize=7, clip_on=False)
            for point in panel:
                x, y = point.nodes.value, point.tokens.value
                if x is None or y is None:
                    continue
                for span, line in ((point.nodes.span, axes.hlines), (point.tokens.span, axes.vlines)):
                    if span:
                        line(y if line == axes.hlines else x, *span, color=PAINT[point.nodes.colour], lw=1.2)
                axes.plot(x, y, "o", color=PAINT[point.nodes.colour], markersize=8)
            _letters(axes, panel, right, top - 1, height)
        return figure

    return draw_layouts(
        draw, "Points: tokens per step of each method over draft nodes per step", salt, layouts
    )


def _letters(axes: Axes, points: Sequence[Point], right: float, up: float, height: int) -> None:
    """Each point's name beside it, where neither a point nor another name is."""
    width = axes.get_position().width * axes.get_figure().get_figwidth() * 72  # type: ignore[union-attr]
    known = [(p, p.nodes.value, p.tokens.value) for p in points]
    where = [
        (point, x / right * width, (y - 1) / up * height)
        for point, x, y in known
        if x is not None and y is not None
    ]
    # Boxes in pixels right of and above plain's point: left, bottom, right, top.
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in [(0.0, 0.0), *((x, y) for _, x, y in where)]]
    for point, x, y in where:
        long = 6.8 * len(point.nodes.letter)
        spots = [(x + dx * (r + long / 2), y + dy * r) for r in (12, 22, 34, 48) for dx, dy in DIRECTIONS]
        boxes = [(a - long / 2, b - 7, a + long / 2, b + 7) for a, b in spots]
        fits = (
            spot
            for spot, box in zip(spots, boxes, strict=True)
            if box[0] > 2
            and box[1] > 0
            and box[2] < width
            and box[3] < height
            and not any(_meet(box, other) for other in taken)
        )
        inside = min(max(x, long / 2), width - long / 2), y - 14
        a, b = next(fits, inside)
        taken.append((a - long / 2, b - 7, a + long / 2, b + 7))
        axes.annotate(
            point.nodes.letter,
            (point.nodes.value or 0, point.tokens.value or 0),
            xytext=(a - x, b - y),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=11,
            fontweight="bold",
            color=PAINT[point.nodes.colour],
        )


Box = tuple[float, float, float, float]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.7, 0.7), (0.7, -0.7), (-0.7, 0.7), (-0.7, -0.7))


def over_batch_sizes(
    panels: Sequence[tuple[str, str, Sequence[tuple[str, str, Sequence[tuple[int, Mark]]]]]], salt: str
) -> list[str]:
    """Lines over the batch size; upright lines are the rounds' spans.

    Args:
        panels: title, label of the y axis with its unit, and lines: short name, colour, and a mark for each batch size.
        salt: as above.
    """

    right = name_width([name for _, _, lines in panels for name, _, _ in lines])

    def draw(width: int, columns: int) -> Figure:
        columns = min(columns, len(panels))
        rows, height = ceil(len(panels) / columns), 260
        figure, place = canvas(width, rows * (height + 78), columns, left=46, right=right, top=28, bottom=50)
        for number, (title, unit, lines) in enumerate(panels):
            axes = place(number % columns, number // columns * (height + 78), height)
            _draw_lines(axes, lines, height)
            axes.set_ylabel(unit)
            axes.set_title(title, loc="left", fontsize=13, fontweight="bold")
        return figure

    return draw_layouts(
        draw, "Lines: throughput and speed-up of each method over the batch size", salt, PHONE | DESKTOP
    )


def _draw_lines(
    axes: Axes, lines: Sequence[tuple[str, str, Sequence[tuple[int, Mark]]]], height: int
) -> None:
    sizes = sorted({size for _, _, points in lines for size, _ in points})
    top = max(_reached([mark for _, _, points in lines for _, mark in points], 0.0)) * 1.06
    axes.set_xscale("log", base=2)
    axes.set(xlim=(sizes[0] / 1.15, sizes[-1] * 1.15), ylim=(0, top))
    axes.set_xlabel("batch size: requests in flight")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid()
    axes.tick_params(length=0, labelsize=11)
    ends = []
    for letter, colour, points in lines:
        known = [(size, mark, mark.value) for size, mark in points if mark.value is not None]
        if not known:
            continue
        style = (0, (4, 3)) if colour == "plain" else "-"
        axes.plot(
            [size for size, _, _ in known],
            [value for _, _, value in known],
            marker="o",
            markersize=5,
            color=PAINT[colour],
            linestyle=style,
            linewidth=1.6,
        )
        for size, mark, _ in known:
            if mark.span and not isclose(*mark.span):
                axes.vlines(size, *mark.span, color=PAINT[colour], lw=1.2)
        ends.append((known[-1][2], letter, colour))
    _end_letters(axes, sorted(ends), top, height)


def _end_letters(axes: Axes, ends: Sequence[tuple[float, str, str]], top: float, height: int) -> None:
    """The names at the right, each at its line's end or as near above it as the others let it."""
    at = [value / top * height for value, _, _ in ends]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + 13)
    over = max(0.0, at[-1] - height) if at else 0.0
    for i in reversed(range(len(at))):  # what was pushed over the top goes down again
        at[i] = min(at[i], height - (len(at) - 1 - i) * 13) if over else at[i]
    for y, (_, letter, colour) in zip(at, ends, strict=True):
        axes.annotate(
            letter,
            (1, y / height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
            fontweight="normal" if colour == "plain" else "bold",
            color=PAINT["text" if colour == "plain" else colour],
        )


def _reached(marks: Sequence[Mark], least: float) -> Iterator[float]:
    yield least
    for mark in marks:
        yield from mark.rounds
        if mark.value is not None:
            yield mark.value
