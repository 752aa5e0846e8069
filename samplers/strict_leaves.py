# SPDX-License-Identifier: Apache-2.0
"""Constants, strings, numbers and counts of a JSON schema: where xgrammar 0.2.8 takes for them what is not valid.

Each function raises `Found` where that is so. What is no valid schema may pass.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

from vllm_ext.samplers.strict_pattern import COUNTED, pattern_problem

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Formats that xgrammar has grammars for; what it writes for the first three is not always JSON.
NO_JSON = ("email", "json-pointer", "relative-json-pointer")
FORMATS = (
    *NO_JSON,
    *("date", "time", "date-time", "duration", "ipv4", "ipv6"),
    *("hostname", "uuid", "uri", "uri-reference", "uri-template"),
)
MOST = 2**31 - 1  # of what is counted
GRID = 10**6  # a number between bounds has up to six decimals
EXACT = {False: 2**53, True: 2**32}  # bounds around which floats tell such numbers apart; exclusive ones


class Found(Exception):
    """A problem of the schema that is being looked at; see `vllm_ext.samplers.strict_schema.Problem`."""

    def __init__(self, keyword: str, value: Any, why: str, instead: str = "") -> None:
        self.problem = keyword, value, why, instead


def check_values(form: str, value: Any) -> None:
    """Constants, which xgrammar writes out with 64-bit numbers."""
    todo = [value]
    while todo:
        found = todo.pop()
        if isinstance(found, dict | list):
            todo += found.values() if isinstance(found, dict) else found
        elif isinstance(found, int) and not -(2**63) <= found < 2**63:
            raise Found(form, value, f"xgrammar rounds {found}")
        elif isinstance(found, float) and not math.isfinite(found):
            raise Found(form, value, f"xgrammar writes {found} where JSON has no such number")


def check_string(node: dict[str, Any]) -> None:
    """Lengths, patterns and formats."""
    least, most = node.get("minLength", 0), node.get("maxLength")
    others = [
        name for name in ("minLength", "maxLength") if node.get(name, 0) != 0 or name == "maxLength" in node
    ]
    if node.get("format") in FORMATS:
        if node["format"] in NO_JSON:
            raise Found(
                "format", node["format"], "what xgrammar has for it is not always JSON", "Leave it out"
            )
        if "pattern" in node:
            others = ["pattern", *others]
        if others:
            raise Found(others[0], node[others[0]], "xgrammar reads the format of this schema, and not this")
    elif "pattern" in node:
        if others:
            raise Found(others[0], node[others[0]], "xgrammar reads the pattern of this schema, and not this")
        if isinstance(node["pattern"], str) and (problem := pattern_problem(node["pattern"])):
            raise Found("pattern", node["pattern"], problem)
    elif others:
        # As patterns that pass.
        character = "." if most is None else "[ -~]" if most <= COUNTED else r"[ !#-\[\]-~]"
        counted = f"^{character}{{{least},{'' if most is None else most}}}$"
        what = "" if most is None else ", which is ASCII alone"
        raise Found(
            others[0],
            node[others[0]],
            "xgrammar lets control characters into strings of a given length, which JSON does not have as they are",
            "" if pattern_problem(counted) else f'Say "pattern": {json.dumps(counted)}{what}',
        )


def check_number(node: dict[str, Any], name: str, draft: int) -> None:
    """Bounds; of integers they are exact, of what has decimals within what floats tell apart."""
    low, high, last = -math.inf, math.inf, "type"
    for keyword in NUMBERS:
        value = node.get(keyword)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue  # xgrammar refuses it
        is_exclusive = keyword.startswith("exclusive")
        if is_exclusive and draft <= 4:
            raise Found(keyword, value, "draft-04 takes it for true")
        if name == "integer":
            continue
        if abs(value) > EXACT[is_exclusive]:
            raise Found(keyword, value, f"xgrammar rounds numbers around bounds beyond {EXACT[is_exclusive]}")
        place, last = Fraction(value) * GRID, keyword
        if keyword.lower().endswith("minimum"):
            low = max(low, math.floor(place) + 1 if is_exclusive else math.ceil(place))
        else:
            high = min(high, math.ceil(place) - 1 if is_exclusive else math.floor(place))
    if low > high:
        raise Found(
            last, node[last], "no number of six decimals is between the bounds, and it writes no others"
        )


def check_counts(node: dict[str, Any], *keywords: str) -> None:
    """Of items and properties."""
    for keyword in keywords:
        if isinstance(node.get(keyword), int) and node[keyword] > MOST:
            raise Found(keyword, node[keyword], f"xgrammar counts to {MOST}")
