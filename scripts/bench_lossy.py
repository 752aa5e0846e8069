#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What lossy verification brings and costs: tokens a step, right answers, and how likely the answers are to the target.

    .venv/bin/python scripts/bench_lossy.py --prompts gsm8k.jsonl:100 --temperature 0.7 --json lossy.json \
        --method hybrid --verify exact 0.25 0.09 0.01

An engine for each verification, so that no table has learnt an answer before; a number is a ``verify_threshold`` of
typical acceptance. No figure depends on a clock. Log p is the mean over an answer's tokens of their log-probability
under the target at the request's temperature: answers that follow the target's law have minus its entropy. Behind ±
stand standard errors over problems; of right answers, 95 % by Wilson.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_PLUGINS", "vllm_ext")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from bench_samples import keep

from vllm_ext.demo import embedded_model

EXACT = "exact"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ASKED = (
    "samples",
    "temperature",
    "max_tokens",
    "dtype",
    "nodes",
    "seed",
)  # options that the figures hold for


def problems(source: str) -> list[tuple[str, str]]:
    """Questions and their numbers: the first so many of a file, given as FILE:NUMBER."""
    name, _, count = source.rpartition(":")
    entries = [json.loads(line) for line in Path(name).read_text().splitlines()[: int(count)]]
    return [(entry["question"], entry["answer"].rpartition("####")[2]) for entry in entries]


def is_right(text: str, wanted: str) -> bool:
    """Whether the last number of an answer is the one that is wanted."""
    found = NUMBER.findall(text)
    return bool(found) and float(found[-1].replace(",", "")) == float(wanted.replace(",", ""))


def repeated(tokens: list[int]) -> float:
    """The share of an answer's runs of four tokens that were there before: loops."""
    runs = [tuple(tokens[place : place + 4]) for place in range(len(tokens) - 3)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % of a share."""
    z = 1.96
    middle, width = right + z * z / 2, z * math.sqrt(right * (count - right) / count + z * z / 4)
    return (middle - width) / (count + z * z), (middle + width) / (count + z * z)


def measure(verify: str, asked: list[tuple[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    """One verification's figures."""
    from vllm import LLM, SamplingParams

    method = json.loads(options.method) if options.method.startswith("{") else {"method": options.method}
    lossy = {} if verify == EXACT else {"verify": "typical", "verify_threshold": float(verify)}
    llm = LLM(
        options.model or str(embedded_model.ensure_model()),
        speculative_config={
            "budget": "fixed",
            "num_speculative_tokens": options.nodes,
            **method,
            **lossy,
        },
        max_model_len=1024,
        max_num_seqs=options.samples,
        enforce_eager=True,
        disable_log_stats=False,
        dtype=options.dtype,
        distributed_executor_backend="mp",
        logprobs_mode="processed_logprobs",
        seed=options.seed,
    )
    params = SamplingParams(
        temperature=options.temperature, n=options.samples, max_tokens=options.max_tokens, logprobs=0
    )
    names = ("spec_emitted_tokens", "spec_steps", "spec_typical_tokens")
    before, counts, log_p, loops, right = dict.fromkeys(names, 0), [], [], [], 0
    for question, wanted in asked:
        (output,) = llm.chat([[{"role": "user", "content": question}]], params, use_tqdm=False)
        (totals,) = llm.collective_rpc("vllm_ext_counters")
        counts.append([totals[name] - before[name] for name in names])
        before = totals
        of_tokens = [
            next(iter(each.values())).logprob for answer in output.outputs for each in answer.logprobs
        ]
        log_p.append(float(np.mean(of_tokens)))
        loops.append(float(np.mean([repeated(list(answer.token_ids)) for answer in output.outputs])))
        right += sum(is_right(answer.text, wanted) for answer in output.outputs)
    llm.llm_engine.engine_core.shutdown(timeout=30)
    emitted, steps, typical = np.array(counts).T

    def mean(values: Any) -> list[float]:
        return [float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)]

    answers = len(asked) * options.samples
    return {
        "verify": verify,
        "method": method,
        "asked": {**{name: getattr(options, name) for name in ASKED}, "prompts": Path(options.prompts).name},
        "tokens": int(emitted.sum()),
        "tokens_a_step": [float(emitted.sum() / steps.sum()), mean(emitted / steps)[1]],
        "kept_without_a_draw": float(typical.sum() / emitted.sum()),
        "right": right,
        "answers": answers,
        "right_95": wilson(right, answers),
        "log_p": mean(log_p),
        "repeated": mean(loops),
    }


def row(now: dict[str, Any]) -> str:
    """One line of the printed table: a method and a verification, and what came of them."""
    low, high = now["right_95"]
    shown = [f"{now[name][0]:.3f} ± {now[name][1]:.3f}" for name in ("tokens_a_step", "log_p", "repeated")]
    share = now["right"] / now["answers"]
    return (
        f"| {now['method']['method']}, {now['verify']} | {shown[0]} | {now['kept_without_a_draw']:.0%} "
        f"| {share:.1%} ({low:.1%} to {high:.1%}) | {shown[1]} | {shown[2]} |"
    )


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of the target; none: the demo's")
    parser.add_argument(
        "--prompts", required=True, help="FILE:NUMBER, JSON lines with a question and an answer"
    )
    parser.add_argument("--method", default="hybrid", help="a name, or an object of --speculative-config")
    parser.add_argument(
        "--verify", nargs="+", default=[EXACT, "0.25", "0.09", "0.01"], help="exact, or thresholds"
    )
    parser.add_argument("--samples", type=int, default=4, help="answers of each problem, side by side")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the engine")
    parser.add_argument("--json", type=Path, help="a file to whose figures these are added")
    options = parser.parse_args()
    asked = problems(options.prompts)
    print(
        "| verification | tokens a step | kept without a draw | right | log p of a token | repeated 4-grams |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for verify in options.verify:
        now = measure(verify, asked, options)
        print(row(now), flush=True)
        if options.json:
            keep(options.json, now)


if __name__ == "__main__":
    main()
