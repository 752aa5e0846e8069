#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What lossy verification brings and costs: tokens a step, right answers, and how likely the answers are to the target.

    .venv/bin/python scripts/bench_lossy.py --prompts gsm8k.jsonl:100 --temperature 0.7 --json lossy.json \
        --method hybrid --verify exact 0.25 0.09 0.01

An engine for each verification, so that no table has learnt an answer before; a number is a ``verify_threshold`` of
typical acceptance, ``entropy:NATS`` a ``verify_entropy``, ``reflective:WEIGHT`` a ``verify_weight``. With
``--one-engine`` requests ask for it instead, which is right for methods that learn nothing of answers: draft models.
Then ``plain`` is without drafts, and of greedy answers it is counted how many are the same as those of ``plain``, if
that comes first. No figure depends on a clock. Log p is the mean over an answer's tokens of their log-probability under
the target at the request's temperature, of ``reflective`` under its mixture: answers that follow the target's law have
minus its entropy. Behind ± stand standard errors over problems, of tokens a step over those asked together; of right
answers, 95 % by Wilson.
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

EXACT, PLAIN = "exact", "plain"
OPTION = {"entropy": "verify_entropy", "reflective": "verify_weight"}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ASKED = (
    "samples",
    "together",
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


def asking(verify: str) -> dict[str, Any]:
    """The options that a verification is."""
    if verify in (EXACT, PLAIN):
        return {}
    name, _, value = verify.rpartition(":")
    if name:
        return {"verify": name, OPTION[name]: float(value)}
    return {"verify": "typical", "verify_threshold": float(value)}


def method_of(options: argparse.Namespace) -> dict[str, Any]:
    """Of all rows."""
    method: dict[str, Any] = (
        json.loads(options.method) if options.method.startswith("{") else {"method": options.method}
    )
    return method


def make_engine(lossy: dict[str, Any], options: argparse.Namespace) -> Any:
    """With these options of verification beside the method's."""
    from vllm import LLM

    return LLM(
        options.model or str(embedded_model.ensure_model()),
        speculative_config={
            "budget": "fixed",
            "num_speculative_tokens": options.nodes,
            **method_of(options),
            **lossy,
        },
        max_model_len=1024,
        max_num_seqs=options.samples * options.together,
        enforce_eager=True,
        disable_log_stats=False,
        dtype=options.dtype,
        distributed_executor_backend="mp",
        logprobs_mode="processed_logprobs",
        seed=options.seed,
    )


def measure(
    llm: Any, verify: str, asked: list[tuple[str, str]], options: argparse.Namespace, plain: list[list[int]]
) -> tuple[dict[str, Any], list[list[int]]]:
    """One verification's figures, and its answers.

    Args:
        llm: the engine.
        verify: see `asking`.
        asked: questions and their numbers.
        options: the script's.
        plain: the answers without drafts, where they are known.
    """
    from vllm import SamplingParams

    of_request = {"speculation": False} if verify == PLAIN else asking(verify)
    params = SamplingParams(
        temperature=options.temperature,
        n=options.samples,
        max_tokens=options.max_tokens,
        logprobs=0,
        extra_args=of_request if options.one_engine else None,
    )
    names = ("spec_emitted_tokens", "spec_steps", "spec_typical_tokens", "spec_entropy_tokens")
    (before,) = llm.collective_rpc("vllm_ext_counters")
    answers: list[list[int]] = []
    counts, log_p, loops, right = [], [], [], 0
    for start in range(0, len(asked), options.together):
        problems_now = asked[start : start + options.together]
        messages = [[{"role": "user", "content": question}] for question, _ in problems_now]
        outputs = llm.chat(messages, params, use_tqdm=False)
        (totals,) = llm.collective_rpc("vllm_ext_counters")
        counts.append([totals[name] - before[name] for name in names])
        before = totals
        for (_, wanted), output in zip(problems_now, outputs, strict=True):
            of_tokens = [
                next(iter(each.values())).logprob for answer in output.outputs for each in answer.logprobs
            ]
            log_p.append(float(np.mean(of_tokens)))
            loops.append(float(np.mean([repeated(list(answer.token_ids)) for answer in output.outputs])))
            right += sum(is_right(answer.text, wanted) for answer in output.outputs)
            answers += [list(answer.token_ids) for answer in output.outputs]
    emitted, steps, typical, entropy = np.array(counts).T
    if verify == PLAIN:  # such requests are not counted
        emitted = steps = np.array([len(answer) for answer in answers])  # each a step

    def mean(values: Any) -> list[float]:
        return [float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)]

    figures = {
        "verify": verify,
        "method": {
            name: Path(value).name if name == "model" else value for name, value in method_of(options).items()
        },
        "asked": {**{name: getattr(options, name) for name in ASKED}, "prompts": Path(options.prompts).name},
        "tokens": int(emitted.sum()),
        "tokens_a_step": [float(emitted.sum() / steps.sum()), mean(emitted / steps)[1]],
        "target_passes_a_token": float(steps.sum() / emitted.sum()),
        "kept_without_a_draw": float((typical + entropy).sum() / emitted.sum()),
        "right": right,
        "answers": len(answers),
        "right_95": wilson(right, len(answers)),
        "log_p": mean(log_p),
        "repeated": mean(loops),
    }
    if plain and options.temperature == 0.0:
        figures["as_plain"] = sum(a == b for a, b in zip(answers, plain, strict=True))
    return figures, answers


def row(now: dict[str, Any]) -> str:
    """One line of the printed table: a method and a verification, and what came of them."""
    low, high = now["right_95"]
    shown = [f"{now[name][0]:.3f} ± {now[name][1]:.3f}" for name in ("tokens_a_step", "log_p", "repeated")]
    share = now["right"] / now["answers"]
    same = f"{now['as_plain']} of {now['answers']}" if "as_plain" in now else ""
    kept = f"{now['kept_without_a_draw']:.0%}"
    return (
        f"| {now['method']['method']}, {now['verify']} | {shown[0]} | {now['target_passes_a_token']:.3f} | {kept} "
        f"| {share:.1%} ({low:.1%} to {high:.1%}) | {same} | {shown[1]} | {shown[2]} |"
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
        "--verify",
        nargs="+",
        default=[EXACT, "0.25", "0.09", "0.01"],
        help="exact, thresholds of typical acceptance, entropy:NATS or reflective:WEIGHT; with --one-engine plain",
    )
    parser.add_argument(
        "--one-engine", action="store_true", help="for all rows: what is kept is asked for by requests"
    )
    parser.add_argument("--samples", type=int, default=4, help="answers of each problem, side by side")
    parser.add_argument("--together", type=int, default=1, help="problems at once")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the engine")
    parser.add_argument("--json", type=Path, help="a file to whose figures these are added")
    options = parser.parse_args()
    if PLAIN in options.verify and not options.one_engine:
        parser.error("--verify plain needs --one-engine: a request of its engine is without drafts")
    asked = problems(options.prompts)
    print(
        "| verification | tokens a step | target passes a token | kept without a draw | right | as plain "
        "| log p of a token | repeated 4-grams |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    plain: list[list[int]] = []
    llm = make_engine({}, options) if options.one_engine else None
    for verify in options.verify:
        own = llm or make_engine(asking(verify), options)
        now, answers = measure(own, verify, asked, options, plain)
        if verify == PLAIN:
            plain = answers
        print(row(now), flush=True)
        if options.json:
            keep(options.json, now)
        if llm is None:
            own.llm_engine.engine_core.shutdown(timeout=30)
    if llm is not None:
        llm.llm_engine.engine_core.shutdown(timeout=30)


if __name__ == "__main__":
    main()
