# SPDX-License-Identifier: Apache-2.0
"""docs/models.md, of the record that `scripts/model_zoo.py` writes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLAIN = "plain"
# Of these a model's row says whether it gets trees; in this order the first there is.
DECIDING = ("token_recycling", "hybrid")
HEAD = """# Which models get trees

Made by `python scripts/model_zoo.py --table` from [the record](benchmarks/models.jsonl), which
`python scripts/model_zoo.py` writes. Each model is a checkpoint of random weights, a few megabytes, of its
architecture (`tests/zoo.py`): few layers, 24 tokens that are ever likely, so that drafts are accepted. Five requests,
greedy and seeded, of 12 to 350 tokens and so shorter and longer than windows and chunks, are asked together, and again
with their prefixes in the cache, with so few blocks that some are preempted. On a CPU, in float32 where vLLM takes
that; a GPU is not tested here, and of real weights only [Gemma 3 270M](benchmarks/README.md#gemma-3) elsewhere.
`vllm-ext doctor --model MODEL` says of any model what it would get,
[by its config](troubleshooting.md#what-a-model-would-get).

`plain, alone`: how many of plain vLLM's answers stay the same when each request is asked alone. Where some do not,
nobody can say what a method should have answered, and its answers are not judged. In bfloat16 (Qwen3-Next, int4)
answers may part from plain's at near ties; `tests/engine/test_zoo.py` bounds by how much less likely plain has the
other token. Below a method: how many answers are plain's token for token, and how many of its drafts were accepted.
Models that draft are the first three layers, and seldom right.
"""
LATENT = """
Latent attention (MLA) keeps a compressed row of each token, which vLLM's kernels for it multiply out as they read. They
take no mask of a tree, and ours do not read such rows; chains need neither."""


def lines_of(record: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By model that has run and by method the last line; those with trees first."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["model"], {})[entry["method"]] = entry
    order = ("trees", "chains", "refused")
    ran = [each for each in found.items() if not each[1].keys().isdisjoint(DECIDING)]
    return dict(sorted(ran, key=lambda each: (order.index(got_by(each[1])), each[0])))


def got_by(lines: dict[str, dict[str, Any]]) -> str:
    """What a model gets, by its lines."""
    got: str = next(lines[method]["got"] for method in DECIDING if method in lines)
    return got


def cell(entry: dict[str, Any] | None) -> str:
    """What a line of a method says."""
    if entry is None:
        return ""
    if entry["got"] == "refused":
        return "refused"
    drafted = entry["drafted"]
    accepted = f", {100 * entry['accepted'] / drafted:.0f} %" if drafted else ", no drafts"
    return f"{entry['identical']} of {entry['requests']}{accepted}"


def page(record: Path) -> Iterator[str]:
    """Its lines."""
    known = lines_of(record)
    methods = list(dict.fromkeys(method for lines in known.values() for method in lines if method != PLAIN))
    yield HEAD
    yield f"| model | of interest | drafts | plain, alone | {' | '.join(f'`{name}`' for name in methods)} |"
    yield f"| --- | --- | --- | --- |{' --- |' * len(methods)}"
    for name, lines in known.items():
        any_line = next(iter(lines.values()))
        plain = lines.get(PLAIN)
        alone = "" if plain is None else f"{plain['identical']} of {plain['requests']}"
        cells = " | ".join(cell(lines.get(method)) for method in methods)
        yield f"| {name}, `{any_line['architecture']}` | {any_line['about']} | {got_by(lines)} | {alone} | {cells} |"
    calm = [
        name
        for name, lines in known.items()
        if all(line.get("preempted", 0) == 0 for method, line in lines.items() if method in DECIDING)
    ]
    if calm:
        yield f"\nNo request was preempted of {', '.join(calm)}: windows give blocks back, states take few."
    yield from _reasons(known)
    if any("MLA" in (line.get("reason") or "") for lines in known.values() for line in lines.values()):
        yield LATENT
    newest = max((line for lines in known.values() for line in lines.values()), key=lambda line: line["date"])
    runs = sorted({(line["vllm"], line["cpu"]) for lines in known.values() for line in lines.values()})
    where = "; ".join(f"vLLM {version}, {cpu}" for version, cpu in runs)
    yield f"\n{where}; the last on {newest['date']}, on vLLM's V1 runner."


def _reasons(known: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Why there are no trees: once for each reason, as the log gives it."""
    why: dict[str, dict[str, list[str]]] = {}
    for name, lines in known.items():
        for method, line in lines.items():
            if line.get("reason"):
                # As it is of any model: without its name, and without the way out.
                said = line["reason"].replace(
                    f"{line['architecture']}, the architecture of {name}", "this architecture"
                )
                why.setdefault(said.split(". ")[0].rstrip("."), {}).setdefault(name, []).append(method)
    if not why:
        return
    yield "\n## Why not\n\nAs the log or the error at start-up says it, less the way out:\n"
    for reason, models in why.items():
        methods = list(dict.fromkeys(method for of_model in models.values() for method in of_model))
        item = f"- {', '.join(models)} with {', '.join(f'`{method}`' for method in methods)}: {reason}"
        yield from textwrap.wrap(
            item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
