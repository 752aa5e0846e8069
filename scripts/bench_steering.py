# SPDX-License-Identifier: Apache-2.0
"""What rules that steer cost, whether budgets hold, and what greedy answers repeat.

    .venv/bin/python scripts/bench_steering.py DRAFT --prompts spec_bench.jsonl:4 --json steering.json

DRAFT is a companion model, say one of `vllm-ext train draft`. One engine without speculation has all rules; each
round asks the same prompts for the same number of tokens free and under each rule, so that a rule's cost is a ratio of
steps that take turns. Then 200 sampled answers under rule anchored: what they have spent, beside k nats a token. Then
greedy answers free and under rule momentum: rep-n is the part of n-grams that were there before in the same answer, and
distinct-n that of different ones among all answers' n-grams.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from vllm_ext.data.prompts import load_prompts
from vllm_ext.demo import embedded_model

RULES: dict[str, dict[str, Any]] = {
    "contrastive": {},
    "anchored": {},
    "entropy_adaptive": {},
    "lol": {},
    "dola": {},
    "momentum": {},
    "cad": {},
}
COMPANION = ("contrastive", "anchored", "entropy_adaptive", "lol")
ANSWERS, K = 200, 0.15


def asking(rule: str, text: str) -> dict[str, Any] | None:
    """What a request says; the context of cad is how its prompt begins."""
    if rule == "cad":
        return {"cad_context": text[: min(len(text) // 2, 400)]}
    return None if rule == "free" else {rule: True}


def timed(llm: Any, prompts: list[Any], params: Any) -> float:
    """Seconds of all their tokens."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == params[0].max_tokens for output in outputs)
    return seconds


def costs(llm: Any, prompts: list[Any], arguments: Any) -> list[dict[str, Any]]:
    """Ratios to free requests' time, by rule and batch size."""
    from vllm import SamplingParams

    rows = []
    for batch_size in (1, 8):
        seconds: dict[str, list[float]] = {}
        for round_ in range(arguments.rounds + 1):
            start = round_ * batch_size
            batch = [prompts[(start + i) % len(prompts)] for i in range(batch_size)]
            for max_tokens in (1, arguments.max_tokens):  # once for the prompts, which are cached then
                for rule in ("free", *arguments.rules):
                    params = [
                        SamplingParams(
                            temperature=0,
                            max_tokens=max_tokens,
                            ignore_eos=True,
                            extra_args=asking(rule, text),
                        )
                        for _, text in batch
                    ]
                    spent = timed(llm, [prompt for prompt, _ in batch], params)
                    if round_ and max_tokens > 1:  # the first round warms up
                        seconds.setdefault(rule, []).append(spent)
        free = seconds["free"]
        for rule in arguments.rules:
            ratios = [mine / other for mine, other in zip(seconds[rule], free, strict=True)]
            rows.append(
                {
                    "rule": rule,
                    "batch_size": batch_size,
                    "cost": statistics.median(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                    "free_ms": 1e3 * statistics.median(free) / arguments.max_tokens,
                }
            )
            print(rows[-1], flush=True)
    return rows


def budget(llm: Any, prompts: list[Any]) -> dict[str, Any]:
    """What sampled answers have spent, as parts of what they may."""
    from vllm import SamplingParams

    given = [
        SamplingParams(temperature=1.0, max_tokens=64, extra_args={"anchored_k": K}) for _ in range(ANSWERS)
    ]
    asked = [prompts[i % len(prompts)][0] for i in range(ANSWERS)]
    shares = []
    for output in llm.generate(asked, given, use_tqdm=False):
        spent = output.kv_transfer_params["vllm_ext"]["anchored_kl"]
        shares.append(spent / (K * len(output.outputs[0].token_ids)))
    found = {"answers": ANSWERS, "k": K, "most": max(shares), "median": statistics.median(shares)}
    print(found, flush=True)
    return found


def repetition(llm: Any, prompts: list[Any]) -> list[dict[str, Any]]:
    """Of greedy answers, free and under rule momentum."""
    from vllm import SamplingParams

    rows = []
    for rule in ("free", "momentum"):
        asked = None if rule == "free" else {rule: True}
        params = SamplingParams(temperature=0, max_tokens=256, extra_args=asked)
        grams: list[list[tuple[int, ...]]] = []
        for output in llm.generate([prompt for prompt, _ in prompts[:40]], params, use_tqdm=False):
            tokens = output.outputs[0].token_ids
            grams.append([tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)])
        every = [gram for each in grams for gram in each]
        rows.append(
            {
                "answers": rule,
                "prompts": len(grams),
                "rep_4": statistics.mean(1 - len(set(each)) / len(each) for each in grams if each),
                "distinct_4": len(set(every)) / len(every),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """See the module."""
    from vllm import LLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("companion", type=Path)
    parser.add_argument("--prompts", action="append", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rules", type=json.loads, default=RULES, help="and their options, as a JSON object")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rules = {
        name: {**options, **({"model": str(arguments.companion)} if name in COMPANION else {})}
        for name, options in arguments.rules.items()
    }
    llm = LLM(
        str(embedded_model.ensure_model()),
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=32,
        additional_config={"vllm_ext": {"rules": rules}},
        kv_cache_memory_bytes=1 << 29,
    )
    tokenizer = llm.get_tokenizer()
    prompts = []
    for prompt in load_prompts(arguments.prompts):
        tokens = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        prompts.append(({"prompt_token_ids": tokens[:256]}, str(prompt.messages[-1]["content"])))
    found: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "dtype": arguments.dtype,
        "max_tokens": arguments.max_tokens,
        "rounds": arguments.rounds,
        "rules": arguments.rules,
        "cost": costs(llm, prompts, arguments),
    }
    if "anchored" in rules:
        found["budget"] = budget(llm, prompts)
    if "momentum" in rules:
        found["repetition"] = repetition(llm, prompts)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
