# SPDX-License-Identifier: Apache-2.0
"""Methods that choose what is kept, beside kvpress's of the same name: same model, prompts and part of the tokens kept.

kvpress needs another version of transformers than vLLM: it has an environment of its own, and this runs twice.

    .venv/bin/python scripts/beside_kvpress.py TEXT --model MODEL --json BOTH.json
    python -m venv KVPRESS && KVPRESS/bin/pip install torch kvpress==0.5.5
    KVPRESS/bin/python scripts/beside_kvpress.py --theirs BOTH.json

The protocol is that of the papers, and kvpress's with the question as the context's end: a prompt is read whole, then
cut, and the answer is read behind what is left. Answers are the last tokens of a window of the text, given, and pass
keys that the prompt has said. kvpress chooses tokens for each layer and head, ours blocks for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# By our method: which of kvpress's has the same rule, and with what.
PRESSES = {
    "streaming_llm": ("StreamingLLMPress", {}),
    "snapkv": ("SnapKVPress", {"window_size": 32}),
    "critic": (
        "ObservedAttentionPress",
        {},
    ),  # H2O's sums over all rows, as far as it goes: when the prompt ends
}
BLOCK = 32  # tokens: least that attention on a CPU takes


def budget_of(kept: float, context: int) -> int:
    """Tokens, in whole blocks."""
    return round(kept * context / BLOCK) * BLOCK


def our_methods(budget: int) -> list[dict[str, Any]]:
    """Each with so many tokens kept behind a prompt."""
    return [
        {"method": "streaming_llm", "window": budget - BLOCK, "sinks": BLOCK},
        {"method": "snapkv", "budget": budget, "sinks": BLOCK, "window": BLOCK},
        {"method": "critic", "budget": budget, "sinks": BLOCK, "window": BLOCK},
    ]


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was asked, and what our methods make of it."""
    from vllm_ext.bench import kv_quality

    context, kept = arguments.context, arguments.kept
    methods = [method for part in kept for method in our_methods(budget_of(part, context))]
    plan = kv_quality.Plan(
        arguments.model,
        arguments.text.read_text(),
        methods,
        context=context,
        windows=arguments.windows,
        answer=arguments.answer,
        keys=arguments.keys,
        decode_contexts=(),
        dtype="float32",
        block_size=BLOCK,
    )
    *_, report = kv_quality.measure(plan, print)
    report["model"], report["context"], report["answer"] = arguments.model, context, arguments.answer
    for entry, part in zip(report["methods"], [part for part in kept for _ in PRESSES], strict=True):
        entry["kept"] = part
    report["asked"] = kv_quality.asked_of(plan)
    return report


def read_behind(model: Any, press: Any, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, bool]:
    """The answer's log-probability in nats, and whether a greedy one would be the same."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        with press(model) if press is not None else contextlib.nullcontext():
            first = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits[0]
        positions = torch.arange(len(prompt), len(prompt) + len(answer) - 1)[None]
        rest = model(torch.tensor([answer[:-1]]), past_key_values=cache, position_ids=positions).logits[0]
    logs = torch.cat([first, rest]).float().log_softmax(-1)
    said = logs[torch.arange(len(answer)), torch.tensor(answer)]
    return float(said.sum()), bool((logs.argmax(-1) == torch.tensor(answer)).all())


def theirs(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same of kvpress: of the model alone, and by method."""
    import torch
    from transformers import AutoModelForCausalLM

    kvpress = importlib.import_module("kvpress")
    asked, size = report["asked"], report["answer"]
    for entry in ({"method": {"method": None}, "kept": 1.0}, *report["methods"]):
        press, name, kept = None, entry["method"]["method"], entry["kept"]
        attention = "eager" if name == "critic" else "sdpa"  # for what all rows attend to
        model = AutoModelForCausalLM.from_pretrained(
            report["model"], dtype=torch.float32, attn_implementation=attention
        )
        found = []
        for prompt, answer in asked["answers"] + [(each["prompt"], each["answer"]) for each in asked["keys"]]:
            if name is not None:
                kind, options = PRESSES[name]
                tokens = budget_of(kept, report["context"])
                press = getattr(kvpress, kind)(compression_ratio=1 - tokens / len(prompt), **options)
            found.append(read_behind(model, press, prompt, answer))
        num = len(asked["answers"])
        logs = [log / size for log, _ in found[:num]]
        yield {
            "method": name,
            "kept": kept,
            "perplexity": math.exp(-statistics.fmean(logs)),
            "log_prob_by_window": logs,
            "keys_found": statistics.fmean(said for _, said in found[num:]),
            "key_log_prob": statistics.fmean(log for log, _ in found[num:]),
        }


def table(report: dict[str, Any]) -> Iterator[str]:
    """As the docs have it."""
    plain, alone = report["plain"], report["kvpress"][0]
    base, their_base = plain["answers"]["perplexity"], alone["perplexity"]
    yield f"uncut: perplexity of answers {base:.3f} (vLLM), {their_base:.3f} (transformers)"
    both = "ours | kvpress's"
    yield f"| kept | method | perplexity, {both} | pass keys, {both} | log p of a key, {both} |"
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for own, other in zip(report["methods"], report["kvpress"][1:], strict=True):
        keys = own["keys"]
        found, log = (statistics.fmean(row[name] for row in keys) for name in ("found", "log_prob"))
        yield (
            f"| {own['kept']:.0%} | `{own['method']['method']}`, `{PRESSES[other['method']][0]}` "
            f"| {own['answers']['perplexity'] / base - 1:+.2%} | {other['perplexity'] / their_base - 1:+.2%} "
            f"| {found:.0%} | {other['keys_found']:.0%} | {log:.2f} | {other['key_log_prob']:.2f} |"
        )


def main() -> None:
    """Measure one side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--theirs", type=Path, help="what this has written: kvpress's side is added")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--keys", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.theirs:
        report = json.loads(arguments.theirs.read_text())
        report["kvpress"] = []
        for entry in theirs(report):
            report["kvpress"].append(entry)
            print(entry["method"], entry["kept"], entry["perplexity"], entry["keys_found"], flush=True)
        print(*table(report), sep="\n")
        arguments.theirs.write_text(json.dumps(report, indent=1))
    else:
        arguments.json.write_text(json.dumps(ours(arguments), indent=1))


if __name__ == "__main__":
    main()
