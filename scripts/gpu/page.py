# SPDX-License-Identifier: Apache-2.0
"""A page of one run of the suite: Markdown, and a plot next to it.

    python scripts/gpu/page.py docs/benchmarks/2026-11-27-gpu-h200.jsonl

writes the same name with .md and .svg. Figures come from the file alone.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

TITLES = {"8b": "the shape of Llama 3.1 8B", "smol": "the shape of SmolLM2-135M", "dry": "a tiny shape"}
PAGE = """# GPU: {title}

{gpu}. {versions}. Commit {commit}. Data: {file}, which `scripts/gpu/page.py` made
into this page. How to run it: `scripts/gpu/README.md`.

Models have random weights in a real shape, and answer what SmolLM2-135M answered to real prompts: in every engine
alike, eight logits of each row are overwritten from recordings (`scripts/gpu/planted.py`). So a drafter is right as
often as it is with a real model of that text, and every answer must equal its recording. A fault of attention cannot
show there; the section on correctness is about that. All engines: vLLM's V2 runner, async scheduling,
`compilation_config={{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}`, each in processes of its own, timed one after
the other. Drafters begin cold in each pass and first answer 16 prompts that are not timed.

{body}
"""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; columns behind the first are numbers."""
    lines = [
        "| " + " | ".join(map(str, head)) + " |",
        "| --- |" + " ---: |" * (len(head) - 1),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
    return "\n".join(lines)


class Run:
    """The lines of a file."""

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]

    def of(self, stage: str, **fields: Any) -> list[dict[str, Any]]:
        """Lines of one stage with these values."""
        return [
            line
            for line in self.lines
            if line["stage"] == stage and all(line.get(name) == value for name, value in fields.items())
        ]

    def values(self, stage: str, field: str, **fields: Any) -> list[Any]:
        """What there is of a field, in order of appearance."""
        return list(dict.fromkeys(line[field] for line in self.of(stage, **fields)))


def speedups(run: Run, group: str, method: str, batch: int) -> list[float]:
    """Tokens a second next to plain's, by round."""
    plain = {
        line["round"]: line["tokens_per_s"]
        for line in run.of("end_to_end", group=group, method="plain", batch=batch)
    }
    ours = run.of("end_to_end", group=group, method=method, batch=batch)
    return [line["tokens_per_s"] / plain[line["round"]] for line in ours if line["round"] in plain]


def end_to_end(run: Run, group: str) -> str:
    """Tokens a second by method and batch."""
    batches, methods = (run.values("end_to_end", field, group=group) for field in ("batch", "method"))
    rows = []
    for method in methods:
        row = [f"`{method}`"]
        for batch in batches:
            lines = run.of("end_to_end", group=group, method=method, batch=batch)
            if not lines:
                row.append("")
                continue
            rate = median(line["tokens_per_s"] for line in lines)
            steps = median(line["tokens_per_step"] for line in lines)
            ratios = speedups(run, group, method, batch)
            row.append(
                f"{rate:,.0f}, {median(ratios):.2f}x ({', '.join(f'{r:.2f}' for r in ratios)}), {steps:.2f}"
            )
        rows.append(row)
    wrong = sum(line["wrong"] for line in run.of("end_to_end", group=group))
    answers = sum(line["tokens"] for line in run.of("end_to_end", group=group))
    planted = [
        sum(column)
        for column in zip(*(line["planted"] for line in run.of("end_to_end", group=group)), strict=True)
    ]
    note = (
        f"Tokens a second while decoding, next to plain (by round), tokens a step. {answers:,} tokens were compared "
        f"with the recordings, {wrong} answers differed. Of the planted rows {planted[0]:,} were of answers, "
        f"{planted[1]:,} of rejected nodes on record, {planted[2]:,} of nodes that no recording has (there the model's "
        "logits behind that token alone)."
    )
    return f"{table(['requests at once', *batches], rows)}\n\n{note}"


def costs(run: Run, group: str) -> str:
    """What a step takes, by level."""
    batches = run.values("cost", "batch", group=group)
    rows = []
    for method in run.values("cost", "method", group=group):
        for level in run.values("cost", "level", group=group, method=method):
            row = [f"`{method}`" + ("" if level is None else f", {level} nodes")]
            for batch in batches:
                lines = run.of("cost", group=group, method=method, level=level, batch=batch)
                plain = run.of("cost", group=group, method="plain", batch=batch)
                if not lines or not plain:
                    row.append("")
                    continue
                took, tokens = (lines[0][field] for field in ("step_ms", "tokens_per_step"))
                row.append(f"{took:.2f} ({took / plain[0]['step_ms']:.2f}x), {tokens:.2f}")
            rows.append(row)
    note = "Milliseconds a step (next to plain's), tokens a step with a drafter that begins cold."
    return f"{table(['requests at once', *batches], rows)}\n\n{note}"


def anatomy(run: Run, group: str) -> str:
    """Launches, what the device did, what it waited for."""
    rows = []
    for line in run.of("anatomy", group=group):
        if not line["steps"]:
            continue
        calls = line["calls"]
        waits = sum(calls.get(name, 0) for name in ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
        events = calls.get("cudaEventSynchronize", 0)
        level = "" if line["level"] is None else f", {line['level']} nodes"
        rows.append(
            [
                f"{line['batch']}, `{line['method']}`{level}",
                f"{line['launches']:.0f}",
                f"{calls.get('cudaGraphLaunch', 0):.0f}",
                f"{waits:.0f} + {events:.0f}",
                f"{line['busy_us']:,.0f}",
                f"{line['wall_us'] - line['busy_us']:,.0f}",
            ]
        )
    head = [
        "requests, method",
        "launches outside the graph",
        "graphs",
        "waits: stream + event",
        "device busy, us",
        "idle, us",
    ]
    return (
        f"{table(head, rows)}\n\nOf 12 steps under PyTorch's profiler, which slows the host down: idle times are "
        "longer than without it. One launch of each step is the planting."
    )


def correctness(run: Run) -> str:
    """Answers next to plain's."""
    rows = []
    for line in run.of("correct"):
        answers = sum(part["answers"] for part in line["compared"])
        parted = [gap for part in line["compared"] for *_, gap in part["parted"]]
        largest = max(part["largest_logprob_difference"] for part in line["compared"])
        gaps = ", ".join(f"{gap:.4f}" for gap in parted) or "none"
        rows.append(
            [
                f"{line.get('group', 'float32')}, `{line['engine']}`",
                answers,
                len(parted),
                gaps,
                f"{largest:.5f}",
                line["steps"].get("drafts", 0),
            ]
        )
    head = [
        "engine",
        "answers",
        "parted from plain's",
        "plain's gap there",
        "largest difference of a log-probability",
        "nodes",
    ]
    return (
        f"{table(head, rows)}\n\nFour layers of random weights, in graphs but for `eager`: greedy and seeded, "
        "penalties, min_p, 80 tokens across blocks, eight in a batch and alone, and a second turn on cached blocks. In "
        "float32 (IEEE arithmetic, TRITON_ATTN) all must be plain's; in bfloat16 (FLASH_ATTN) answers may part where "
        "plain's two best tokens are within rounding."
    )


def kernels(run: Run) -> str:
    """Times in captured graphs."""
    by_size: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    others = []
    for line in run.of("kernel"):
        if "us" not in line:
            continue
        if "attention" in line["op"] or "attend" in line["op"]:
            by_size[line["size"]][line["op"]] = line
        else:
            others.append([f"{line['op']}, {line['size']}", line["us"][1]])
    rows = []
    for size, ops in by_size.items():
        row = [size]
        for op in ("tree_attention", "FlashAttention + attend_nodes"):
            found = ops.get(op)
            row += ["", ""] if found is None else [found["us"][1], found["eager_us"] or ""]
        rows.append(row)
    head = ["requests x rows", "ours, us", "ours bare", "FlashAttention + nodes, us", "that bare"]
    ceilings = run.of("kernel", op="ceilings")
    rates = "".join(
        f" A copy moved {line['bytes_per_s'] / 1e12:.2f} TB/s, a bfloat16 product did "
        f"{line['flop_per_s'] / 1e12:.0f} TFLOP/s."
        for line in ceilings
    )
    text = f"{table(head, rows)}\n\n{table(['kernel', 'us'], others)}\n\n"
    return text + (
        "Medians, replayed from a captured graph with the second-level cache cleared; `bare` is launched from Python. "
        f"32 heads, 8 KV heads of 128, bfloat16.{rates}"
    )


def kept_kv(run: Run) -> str:
    """Steps behind long prompts, and how many requests ran at once."""
    rows = []
    for context in run.values("kv crowd", "context"):
        plain = median(line["step_ms"] for line in run.of("kv step", context=context, method="plain"))
        for line in run.of("kv crowd", context=context):
            steps = run.of("kv step", context=context, method=line["method"])
            step = median(each["step_ms"] for each in steps)
            speed = f"{step:.2f} ({plain / step:.2f}x)"
            crowd = f"{line['at_once']:.0f}, {line['preemptions']:.0f} preempted"
            rows.append(
                [f"{line['method']}, {context:,}", steps[0]["batch"], speed, crowd, f"{line['seconds']:.1f}"]
            )
    head = [
        "method, prompt",
        "batch",
        "step, ms (of plain's speed)",
        "most at once of 3 times what fits",
        "all, s",
    ]
    return table(head, rows)


def plot(run: Run, groups: Sequence[str], path: Path) -> None:
    """Speed next to plain by batch size."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(groups), figsize=(4.6 * len(groups), 3.4), squeeze=False, sharey=True
    )
    for axis, group in zip(axes[0], groups, strict=True):
        batches = run.values("end_to_end", "batch", group=group)
        for method in run.values("end_to_end", "method", group=group):
            if method == "plain":
                continue
            known = [(batch, speedups(run, group, method, batch)) for batch in batches]
            known = [(batch, ratios) for batch, ratios in known if ratios]
            axis.plot(
                [batches.index(batch) for batch, _ in known],
                [median(ratios) for _, ratios in known],
                marker="o",
                label=method,
            )
        axis.axhline(1.0, color="gray", linewidth=0.8)
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.set_xlabel("requests at once")
        axis.set_title(TITLES.get(group, group), fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("tokens a second, next to plain")
    axes[0][-1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "gpu", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    run = Run(path)
    machine = run.of("machine")[-1]
    groups = run.values("end_to_end", "group")
    parts = [f"## End to end, {TITLES.get(group, group)}\n\n{end_to_end(run, group)}" for group in groups]
    if groups:
        plot(run, groups, path.with_suffix(".svg"))
        parts.insert(
            0, f"![tokens a second next to plain, by requests at once]({path.with_suffix('.svg').name})"
        )
    if run.of("correct"):
        parts.append(f"## Correctness\n\n{correctness(run)}")
    for stage, title, section in (
        ("cost", "What a step takes", costs),
        ("anatomy", "What a step is made of", anatomy),
    ):
        found = run.values(stage, "group")
        parts += [f"## {title}, {TITLES.get(group, group)}\n\n{section(run, group)}" for group in found]
    if run.of("kv crowd"):
        parts.append(f"## Kept blocks of long prompts\n\n{kept_kv(run)}")
    if run.of("kernel"):
        parts.append(f"## Kernels\n\n{kernels(run)}")
    if notes := run.of("note"):
        parts.insert(0, "\n".join(f"- {line['text']}" for line in notes))
    missing = [f"{line['what']} (no time was left)" for line in run.of("skipped")]
    missing += [f"{line['what']}: {line['error'].splitlines()[-1][:200]}" for line in run.of("failed")]
    if missing:
        parts.append("## Not measured\n\n" + "\n".join(f"- {what}" for what in missing))
    name, memory, driver, *_ = (part.strip() for part in [*machine["gpu"].split(","), "", "", ""])
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    page = PAGE.format(
        title=name,
        gpu=f"One {name}, {memory}, driver {driver}, {machine['cores']} CPU cores",
        versions=versions,
        commit=machine["commit"][:7],
        file=f"[{path.name}]({path.name})",
        body="\n\n".join(parts),
    )
    path.with_suffix(".md").write_text(page)
    print(f"{path.with_suffix('.md')}: {len(run.lines)} results")


if __name__ == "__main__":
    main()
