#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/runners.md: what runs on which of vLLM's runners, by the registries, and how many tests passed there.

    RECORD=docs/benchmarks/exactness.jsonl scripts/matrix_v2.sh      # and scripts/matrix.sh: a line of each method
    python scripts/runner_page.py > docs/runners.md

`tests/test_docs.py` fails where the page is another, or an option names a test that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_ext.codecs.registry import CODECS, load_codec
from vllm_ext.proposers.registry import METHODS, load_method
from vllm_ext.samplers.registry import RULES, load_rule
from vllm_ext.samplers.steering import SteeringRule

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "benchmarks" / "exactness.jsonl"
V1, V2 = "V1, CPU", "V2, interpreter"
# By method: what records call it with more than its own options, and what that is.
WITH_MORE = {
    "hybrid": {
        "hybrid+eagle_tree": "`eagle_tree`",
        "hybrid+dyspec": "`dyspec`",
        "hybrid+layerskip": "`layerskip`",
        "hybrid+vllm:draft_model": "vLLM's `draft_model`",
    },
    "dyspec": {"dyspec+cascade": "`cascade`"},
}
V1_ALONE = {
    "hybrid+vllm:draft_model": "no: vLLM's proposers are the V1 runner's",
    "dyspec+cascade": "no: the draft model's own drafter is on the host",
}
HEAD = """# What runs on which runner

Made by `python scripts/runner_page.py`. vLLM has two model runners, V1 and V2, and
[ours differ](tuning.md#model-runners). What has no form on V2 runs on V1, and the log says why.

## Methods

In brackets: how many tests of exactness passed with the method, by `scripts/matrix.sh` (V1, the whole model, on a CPU)
and `scripts/matrix_v2.sh` (V2, two layers of it, in Triton's interpreter). They ask for greedy and seeded answers,
penalties, log-probabilities, min-p, biases, bad words, allowed tokens, thinking budgets, stop strings, grammars and
several answers, in mixed batches, with preemption, prefix hits, chunked prompts and aborts. On CUDA nothing of V2 has
been tested since [the run of 2026-11-26](tuning.md#on-a-gpu): `scripts/gpu` does it.
"""
KV_HEAD = """
## KV methods

On V1 by `scripts/kv_matrix.sh`. On V2 a method needs a form that leaves blocks as vLLM keeps them; the others are
refused there, and so on GPUs.
"""
# What else there is, where it was tested on each runner, and why not.
OPTIONS = (
    ("structured output", "test_structured", "test_v2_structured"),
    ("LoRA", "test_lora", "test_v2_lora"),
    ("models with M-RoPE, behind images", "test_zoo", "test_v2_mrope"),
    ("`state_dir`", "test_state_engine", "test_v2_state"),
    ("`export_dir`", "test_draft_reading", "no: drafts on the device do not see answers"),
    ("`online`", "test_online", "no: likewise"),
    ("`cascade`", "test_cascade_engine", "no: the draft model's own drafter is on the host"),
    ("`budget`: `goodput`", "test_stress", "test_v2_scheduling"),
    ("`stand` with `branches`: `drawn`", "test_stand_engine", "no: its branches are the probable ones"),
    ("`budget`: `shared`", "test_stress", "test_v2_graphs"),
    (
        "`scheduler_cls`",
        "yes, without our scheduler's parts; draft models and early exits refuse it",
        "test_v2_processors",
    ),
    (
        "KV connectors: `ExampleConnector`, `OffloadingConnector`, `NixlConnector` (V1), next to methods without "
        "passes",
        "test_connectors",
        "test_v2_connectors",
    ),
    ("vLLM's own proposers in `hybrid`", "test_vllm_drafter", "no: they are the V1 runner's"),
    ("logits processors of V1's interface", "test_sampling_rules", "test_v2_processors"),
    ("logits processors of V2's interface", "no: vLLM's V1 runner has none", "test_v2_request_states"),
    (
        "`verify`: `typical`",
        "test_typical",
        "no: V2 verifies on the device, exactly; requests that ask for it get 400",
    ),
    ("`verify`: `entropy`", "test_entropy", "no: likewise"),
    ("`verify`: `reflective`", "test_reflective", "no: likewise"),
    ("recurrent layers (Mamba-2, gated delta nets)", "test_zoo", "test_v2_recurrent"),
    ("tensor parallelism", "test_tensor_parallel", "no test: the interpreter runs in one process"),
)


def records() -> dict[tuple[str, str], dict[str, Any]]:
    """The last line of each method and runner."""
    found = {}
    for line in RECORD.read_text().splitlines():
        entry = json.loads(line)
        found[entry["method"], entry["runner"]] = entry
    return found


def cell(entry: dict[str, Any] | None) -> str:
    """What a record says."""
    if entry is None:
        return "yes (no record)"
    wrong = entry["failed"] + entry["error"]
    return f"yes ({entry['passed']}{f', {wrong} failed' if wrong else ''}; vLLM {entry['vllm']}, {entry['date']})"


def rules() -> Iterator[str]:
    """A line for those whose tests are the same, and for each that does not run on V2, why."""
    by_tests: dict[tuple[str, str], list[str]] = {}
    for name in RULES:
        rule, tests = load_rule(name), ("test_sampling_rules", "test_v2_rules")
        if issubclass(rule, SteeringRule):
            tests = ("test_steering", "test_v2_pairs" if rule.has_pairs else "test_v2_steering")
        on_v1, on_v2 = (f"`{test}.py`" for test in tests)
        cells = on_v1, on_v2 if rule.why_v1 is None else f"no: it {rule.why_v1}"
        by_tests.setdefault(cells, []).append(f"`{name}`")
    for (on_v1, on_v2), names in by_tests.items():
        yield f"| rule{'s' * (len(names) > 1)} {', '.join(names)} | {on_v1} | {on_v2} |"


def page() -> Iterator[str]:
    """Its lines."""
    known = records()
    yield HEAD
    yield f"| method | {V1} | {V2} | drafts there |"
    yield "| --- | --- | --- | --- |"
    for name in METHODS:
        place = load_method(name).on_v2
        on_v2 = cell(known.get((name, V2))) if place else f"no: it {load_method(name).why_v1}"
        where = {
            "device": "on the device, no step waits",
            "host": "on the host, a step waits once",
            None: "",
        }[place]
        yield f"| `{name}` | {cell(known.get((name, V1)))} | {on_v2} | {where} |"
        for whole, more in WITH_MORE.get(name, {}).items():
            of_v2 = V1_ALONE.get(whole) or cell(known.get((whole, V2)))
            on_v1, drafts = cell(known.get((whole, V1))), "" if whole in V1_ALONE else where
            yield f"| `{name}` with {more} | {on_v1} | {of_v2} | {drafts} |"
    yield "\n## Options and features\n\nWhere they are tested: files of `tests/engine/`.\n"
    yield "| | V1 | V2 |"
    yield "| --- | --- | --- |"
    for name, on_v1, on_v2 in OPTIONS:
        cells = (f"`{test}.py`" if test.startswith("test_") else test for test in (on_v1, on_v2))
        yield f"| {name} | {' | '.join(cells)} |"
    closing = "`test_bounded_whitespace.py` | `test_v2_closing.py`"
    yield f"| `max_whitespace` of structured output | {closing} |"
    yield from rules()
    yield KV_HEAD
    yield "| KV method | V1, CPU | V1, CUDA | V2, interpreter | V2, CUDA |"
    yield "| --- | --- | --- | --- | --- |"
    for name in CODECS:
        why = load_codec(name).WHY_V1
        there = (f"no: it {why}", "no") if why else ("`test_v2_kv.py`", "allowed, not run yet")
        on_v1 = "no: there it runs on V2" if not why else "no"
        yield f"| `{name}` | `test_kv_cache_engine.py` | {on_v1} | {' | '.join(there)} |"


if __name__ == "__main__":
    print("\n".join(page()))
