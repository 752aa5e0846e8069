# SPDX-License-Identifier: Apache-2.0
"""The bench's page, of both kinds of bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_ext.report.engine_page import render, sections
from vllm_ext.report.serving_page import serving_section


def html(documents: Sequence[tuple[str, Any]]) -> str:
    """The page.

    Args:
        documents: file name and parsed JSON of each, from ``vllm-ext bench --json`` or scripts/bench_load.py.
            Those of engines made under the same conditions are joined; others are shown one after the other.

    Raises:
        ValueError: none, or one that is not of the bench; the message names it.
    """
    if not documents:
        raise ValueError("no figures to show; give at least one JSON file.")
    engines: list[tuple[str, Any]] = []
    over_http: list[tuple[str, Any]] = []
    for name, raw in documents:
        (over_http if isinstance(raw, dict) and "serving" in raw else engines).append((name, raw))
    found = sections(engines) if engines else []
    found += [serving_section(name, raw, number) for number, (name, raw) in enumerate(over_http)]
    return render("bench_report.html.jinja", sections=found)
