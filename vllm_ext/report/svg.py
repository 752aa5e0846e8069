# SPDX-License-Identifier: Apache-2.0
"""matplotlib's figures as SVG to stand inside HTML.

Every plot comes in two layouts, for a phone and for a desktop, which have the same panels in one column and in
several: a plot that is only scaled has unreadable text on one of the two. One unit of the SVG is one CSS pixel.
Colours are names that the page's style sheet defines, once for light and once for dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_ext.report.tables import NUM_COLOURS

# Layouts, by the CSS class of the SVG: width in pixels, columns of panels at most. A phone of 360 pixels has 328
# between the page's margins.
PHONE, DESKTOP = {"narrow": (328, 1)}, {"wide": (980, 3)}
ANY = {"any": (328, 1)}  # a lone panel, beside its text on a desktop
# matplotlib wants colours it knows; these become var(--NAME) in the SVG.
NAMES = ("page", "text", "muted", "grid", "plain", "loss", *(f"m{number}" for number in range(NUM_COLOURS)))
PAINT = {name: f"#0000{number + 1:02x}" for number, name in enumerate(NAMES)}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a category may have dollar signs
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 12.0,
    "text.color": PAINT["text"],
    "axes.edgecolor": PAINT["muted"],
    "axes.labelcolor": PAINT["text"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": PAINT["grid"],
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": PAINT["muted"],
    "ytick.color": PAINT["muted"],
    "xtick.labelcolor": PAINT["text"],
    "ytick.labelcolor": PAINT["text"],
    "legend.frameon": False,
}


def draw_layouts(
    draw: Callable[[int, int], Figure], label: str, salt: str, layouts: dict[str, tuple[int, int]]
) -> list[str]:
    """The plot in each layout, as SVG."""
    found = []
    for name, (width, columns) in layouts.items():
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"{salt}-{name}"}), warnings.catch_warnings():
            # The page's font draws the text, and it may have glyphs that matplotlib's has not.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            found.append(_inline(draw(width, columns), name, label, f"{salt}-{name}-"))
    return found


def canvas(
    width: int, height: int, columns: int, *, left: float, right: float, top: int, bottom: int
) -> tuple[Figure, Callable[[int, int, int], Axes]]:
    """A figure, and a function that makes the axes of a column: column, pixels from the top, height.

    left to bottom: pixels around the axes of each panel.
    """
    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    column_width = width / columns

    def place(column: int, down: int, inside: int) -> Axes:
        x, y = column * column_width + left, height - down - top - inside
        panel = (column_width - left - right) / width
        return figure.add_axes((x / width, y / height, panel, inside / height))

    return figure, place


NAMESPACE = re.compile(r"^\{[^}]*\}")


def _inline(figure: Figure, layout: str, label: str, prefix: str) -> str:
    """The figure as an SVG element for HTML: no namespaces, no metadata, ids of its own, named colours."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in reversed(list(root.iter())):
        parent.tail = None
        if len(parent):
            parent.text = None
        for child in list(parent):
            tag = NAMESPACE.sub("", child.tag)
            # matplotlib's style rule would count for the whole page, which has it too.
            if tag in ("metadata", "style") or (tag == "g" and not len(child)):
                parent.remove(child)
    used = set(re.findall(r"#([\w-]+)[\")]", buffer.getvalue().decode()))
    names = {value: name for name, value in PAINT.items()}
    for element in root.iter():
        element.tag = NAMESPACE.sub("", element.tag)
        given = {NAMESPACE.sub("", key): value for key, value in element.attrib.items()}
        attributes = {}
        for key, value in given.items():
            if key == "id" and value not in used:
                continue
            if key == "id":
                value = prefix + value
            elif key in ("href", "clip-path"):
                value = value.replace("#", "#" + prefix)
            elif key == "style":
                value = re.sub(r"#0000\w\w", lambda match: f"var(--{names[match[0]]})", value)
                value = re.sub(r"font-family:[^;]*;? ?", "", value)  # the page's
            elif key == "transform" and value.startswith("rotate(-0 "):
                continue
            attributes[key] = value
        element.attrib = attributes
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"class": layout, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")
