# SPDX-License-Identifier: Apache-2.0
"""The page of ``vllm-ext kv report``: one file of HTML, tables and plots, from the figures of `kv_quality`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from vllm_ext.bench.settings import PLAIN
from vllm_ext.report.engine_page import Plot, listed, render
from vllm_ext.report.plots import name_width
from vllm_ext.report.svg import ANY, PAINT, canvas, draw_layouts
from vllm_ext.report.tables import Cell, Key, Table, method_keys

Point = tuple[float, float]
LETTER = 12  # points that a name is high


def html(name: str, document: Any) -> str:
    """The page.

    Args:
        name: of the file the figures are in.
        document: parsed JSON of ``vllm-ext kv report --json``.

    Raises:
        ValueError: it is not of the command.
    """
    try:
        environment, plain, methods = (document[key] for key in ("environment", "plain", "methods"))
        keys = method_keys([method["label"] for method in methods])
        model = str(environment["model"]).rstrip("/").rpartition("/")[2]
        conditions = (
            f"{environment['dtype']}, {environment['windows']} windows of {environment['context']} tokens, "
            f"{environment.get('cpu_model') or 'unknown CPU'}, vLLM {environment['vllm']}"
        )
        return render(
            "kv_report.html.jinja",
            model=model,
            conditions=conditions,
            summary=_summary(plain, methods, keys),
            plots=_plots(plain, methods, keys),
            legend=[keys[method["label"]] for method in methods],
            fills=_fills(methods),
            environments=[
                (name, shlex.join(map(str, environment.get("command_line") or [])), listed(environment))
            ],
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{name}: not of vllm-ext kv report --json ({error!r}).") from None


def _summary(plain: Any, methods: Sequence[Any], keys: dict[str, Key]) -> Table:
    contexts = [row["context"] for row in methods[0]["decode"]] if methods else []
    depths = [row["found"] for row in plain["keys"]]
    answered = "answers" in plain  # not in figures of before 2026-11-24
    first = [
        Cell("1.00x"),
        Cell(f"{plain['capacity_tokens']:,}"),
        Cell(f"{plain['bytes_per_token']:,.0f}"),
        Cell(f"{plain['perplexity']:.2f}"),
        Cell("-"),
        Cell("-"),
        Cell("-"),
        *([Cell(f"{plain['answers']['perplexity']:.2f}"), Cell("-")] if answered else []),
        *([Cell(f"{sum(depths) / len(depths):.0%}")] if depths else []),
        *(Cell("1.00x") for _ in contexts),
    ]
    rows: list[tuple[Key | str, list[Cell]]] = [(keys[PLAIN], first)]
    for method in methods:
        found = [row["found"] for row in method["keys"]]
        rows.append(
            (
                keys[method["label"]],
                [
                    Cell(f"{method['capacity']:.2f}x", lost=method["capacity"] < 1),
                    Cell(f"{method['capacity_tokens']:,}"),
                    Cell(f"{method['bytes_per_token']:,.0f}"),
                    Cell(f"{method['perplexity']:.2f}"),
                    Cell(f"{100 * (method['perplexity'] / plain['perplexity'] - 1):+.2f} %"),
                    Cell(f"{method['kl']:.4f}"),
                    Cell(f"{method['same_likeliest']:.1%}"),
                    *(_answers(plain["answers"], method["answers"]) if answered else []),
                    *([Cell(f"{sum(found) / len(found):.0%}")] if depths else []),
                    *(
                        Cell(
                            f"{row['speed']:.2f}x",
                            f"{min(row['speed_rounds']):.2f}-{max(row['speed_rounds']):.2f}",
                            lost=round(row["speed"], 2) < 1,
                        )
                        for row in method["decode"]
                    ),
                ],
            )
        )
    columns = ["room", "tokens", "bytes a token", "perplexity", "change", "KL, nats"]
    columns += ["same likeliest", *(["answers", "KL, nats"] if answered else [])]
    columns += [*(["pass keys"] if depths else [])]
    columns += [f"behind {context:,}" for context in contexts]
    return Table(
        "All methods. Room: tokens in the same memory, beside vLLM's own cache; answers: perplexity of the last tokens "
        "as an answer; behind so many tokens: steps of decoding a second. What is red loses",
        columns,
        "KV cache",
        rows,
        cards=True,
    )


def _answers(plain: Any, method: Any) -> list[Cell]:
    change = 100 * (method["perplexity"] / plain["perplexity"] - 1)
    return [Cell(f"{method['perplexity']:.2f}", f"{change:+.2f} %"), Cell(f"{method['kl']:.4f}")]


def _plots(plain: Any, methods: Sequence[Any], keys: dict[str, Key]) -> list[Plot]:
    def lines(of: Callable[[Any], Sequence[Point]]) -> list[tuple[Key, Sequence[Point]]]:
        return [(keys[method["label"]], of(method)) for method in methods]

    plots = [
        Plot(
            "Room and quality",
            "Each point is a method: how many tokens the same memory holds, and by how much the perplexity of the text "
            "is higher. Further right is more room, lower is better; the square is vLLM's own cache.",
            [
                Markup(svg)
                for svg in _points(
                    [
                        (
                            keys[method["label"]],
                            (method["capacity"], 100 * (method["perplexity"] / plain["perplexity"] - 1)),
                        )
                        for method in methods
                    ]
                )
            ],
            [],
        ),
        Plot(
            "Quality by position",
            "How far the next token's distribution is from that with vLLM's own cache (KL divergence in nats, a lower "
            "bound), for tokens with more and more of the text before them.",
            [
                Markup(svg)
                for svg in _lines(
                    lines(lambda method: [(row["end"], row["kl"]) for row in method["by_position"]]),
                    "tokens before",
                    "KL divergence, nats",
                    "kl",
                )
            ],
            [],
        ),
    ]
    if plain["keys"]:
        own = [(keys[PLAIN], [(row["depth"], row["found"]) for row in plain["keys"]])]
        found = own + lines(lambda method: [(row["depth"], row["found"]) for row in method["keys"]])
        depths = [row["depth"] for row in plain["keys"]]
        plots.append(
            Plot(
                "Pass keys by depth",
                "A number is said at some depth of a text that fills the context (0: at its beginning), and asked for "
                "at its end: the part of them that a greedy answer says.",
                [Markup(svg) for svg in _lines(found, "depth", "part that is said", "keys", depths)],
                [
                    Table(
                        "Mean log-probability of a pass key, nats",
                        [f"{depth:g}" for depth in depths],
                        "depth",
                        [
                            (keys[label], [Cell(f"{row['log_prob']:.2f}") for row in rows])
                            for label, rows in [
                                (PLAIN, plain["keys"]),
                                *((method["label"], method["keys"]) for method in methods),
                            ]
                        ],
                    )
                ],
            )
        )
    return plots


def _fills(methods: Sequence[Any]) -> list[str]:
    return [
        f"{method['label']}: {fill['requests']} requests of {fill['tokens'] // max(fill['requests'], 1):,} tokens at "
        f"once, {fill['finished']} finished, {fill['preemptions']:.0f} preempted, {fill['usage']:.1%} of it in use."
        for method in methods
        if (fill := method.get("fill")) is not None
    ]


def _points(points: Sequence[tuple[Key, Point]]) -> list[str]:
    def draw(width: int, columns: int) -> Figure:
        figure, place = canvas(
            width, 330, 1, left=50, right=name_width([key.letter for key, _ in points]), top=14, bottom=50
        )
        axes = place(0, 0, 266)
        axes.plot(1, 0, "s", color=PAINT["plain"], markersize=7, clip_on=False)
        for key, point in points:
            axes.plot(*point, "o", color=PAINT[key.colour], markersize=7)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=min([-0.2, *(1.2 * y for _, (_, y) in points)]))
        axes.set_xlim(0.8, max([2.0, *(x for _, (x, _) in points)]) * 1.1)
        labelled: list[Point] = []
        for key, point in points:  # names of points in one place stand above each other
            x, y = axes.transData.transform(point)
            near = sum(abs(x - other) < 2 * LETTER and abs(y - up) < LETTER for other, up in labelled)
            labelled.append((x, y))
            axes.annotate(
                key.letter,
                point,
                xytext=(7, 5 + LETTER * near),
                textcoords="offset points",
                fontsize=11,
                fontweight="bold",
                color=PAINT[key.colour],
            )
        axes.set_xlabel("room, multiples of vLLM's")
        axes.set_ylabel("perplexity, % more")
        axes.yaxis.set_major_formatter("{x:g}")
        _tidy(axes)
        return figure

    return draw_layouts(draw, "Points: room and loss of quality of each method", "room", ANY)


def _lines(
    lines: Sequence[tuple[Key, Sequence[Point]]],
    across: str,
    up: str,
    salt: str,
    ticks: Sequence[float] | None = None,
) -> list[str]:
    def draw(width: int, columns: int) -> Figure:
        right = name_width([key.letter for key, _ in lines])
        figure, place = canvas(width, 330, 1, left=56, right=right, top=14, bottom=50)
        axes = place(0, 0, 266)
        top = max(y for _, points in lines for _, y in points) or 1.0
        for key, points in lines:
            style = (0, (4, 3)) if key.colour == "plain" else "-"
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=4,
                color=PAINT[key.colour],
                linestyle=style,
                linewidth=1.6,
            )
        ends = sorted(((points[-1][1], key) for key, points in lines), key=lambda end: end[0])
        # Names one above the other where lines end together, none above the plot.
        heights: list[float] = []
        for value, _ in ends:
            heights.append(max(value / (1.05 * top) * 266, heights[-1] + 13 if heights else 0.0))
        most = 266.0
        for i in reversed(range(len(heights))):
            heights[i] = most = min(heights[i], most)
            most -= 13
        for height, (_, key) in zip(heights, ends, strict=True):
            axes.annotate(
                key.letter,
                (1, height / 266),
                xycoords="axes fraction",
                xytext=(5, -4),
                textcoords="offset points",
                fontsize=11,
                fontweight="bold",
                color=PAINT["text" if key.colour == "plain" else key.colour],
            )
        axes.set_ylim(0, 1.05 * top)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.xaxis.set_major_locator(MaxNLocator(5) if ticks is None else FixedLocator(list(ticks)))
        axes.xaxis.set_major_formatter("{x:g}")
        _tidy(axes)
        return figure

    return draw_layouts(draw, f"Lines: {up} of each method over {across}", salt, ANY)


def _tidy(axes: Axes) -> None:
    axes.grid()
    axes.tick_params(length=0, labelsize=11)
