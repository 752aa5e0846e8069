# SPDX-License-Identifier: Apache-2.0
"""What drafting while the target verifies (PEARL, arXiv 2408.11850) could bring on a CPU of two cores: an upper bound.

    .venv/bin/python scripts/pearl_bound.py DRAFT --prompts spec_bench.jsonl:4 --prompts human_eval.jsonl:10 \
        --json pearl.json

PEARL gives each model a core of its own; a chain that is drafted first has both cores for both models in turn. What
a step of the target's and a pass of the draft's take is measured in engines bound to one core and to two, where the
draft is right is found on the target's greedy answers, and the steps are counted through these by both rules.
It is a bound: two models at work at once wait for the same memory, and nothing is charged for handing tokens over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function is sent to the worker
os.environ.setdefault("VLLM_PLUGINS", "vllm_ext")

MOST = 8  # drafts of a step
CONTEXT = 300  # tokens
MAX_TOKENS = 128
FOUND = "found: "


def costs(worker: Any) -> dict[str, list[float]]:
    """Seconds of a step of the target's, and of a pass of the draft's, by their rows, as the budget has learnt them."""
    budget = worker.model_runner.drafter.model_drafts.budget
    rows = np.arange(1, MOST + 2)
    return {
        "target": budget.cost.seconds(rows, 1, CONTEXT).tolist(),
        "draft": budget.pass_cost.seconds(rows, 1, CONTEXT).tolist(),
    }


def run_engine(target: str, draft: str, chats: list[Any]) -> None:
    """In a process of its own: print these costs, and the prompts' and answers' tokens."""
    from vllm import LLM, SamplingParams

    method = {"method": "dyspec", "model": draft, "num_speculative_tokens": MOST}
    llm = LLM(target, enforce_eager=True, max_model_len=2048, dtype="bfloat16", speculative_config=method)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    answers = [llm.chat([chat], params, use_tqdm=False)[0] for chat in chats]
    pairs = [[each.prompt_token_ids, list(each.outputs[0].token_ids)] for each in answers]
    print(FOUND + json.dumps([llm.collective_rpc(costs)[0], pairs]), flush=True)


def on_cores(cores: str, count: int, *given: Any) -> tuple[dict[str, list[float]], list[Any]]:
    """What `run_engine` prints, bound to these cores."""
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(count)}
    run = ["taskset", "-c", cores, sys.executable, __file__, "--engine", json.dumps(given)]
    out = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    (found,) = (line for line in out.splitlines() if line.startswith(FOUND))  # others are logged
    seconds, pairs = json.loads(found.removeprefix(FOUND))
    for model, by_rows in seconds.items():
        print(f"{model} on {count}:", *(f"{1e3 * value:.1f}" for value in by_rows), "ms by rows")
    return seconds, pairs


def agreement(draft: str, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[bool]]:
    """Of each answer's tokens whether the draft, greedy, has it after those before it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16)
    right = []
    for prompt, answer in pairs:
        with torch.inference_mode():
            said = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        right.append([a == b for a, b in zip(said, answer, strict=True)])
    return right


def run_of(right: Sequence[bool], start: int, most: int) -> int:
    """How many from one place on are right, at most so many."""
    count = 0
    while count < most and start + count < len(right) and right[start + count]:
        count += 1
    return count


def chain(right: Sequence[bool], num_drafts: int, step: float) -> float:
    """Seconds of an answer whose steps draft so many tokens first, and then verify them with one more."""
    at, seconds = 0, 0.0
    while at < len(right):
        at += run_of(right, at, num_drafts) + 1
        seconds += step
    return seconds


def pearl(right: Sequence[bool], num_drafts: int, before: float, after: float) -> float:
    """The same where the next tokens are drafted while these are verified, by its algorithm of two modes.

    Args:
        right: of each token, whether the draft has it.
        num_drafts: of a step.
        before: seconds of a step whose verification is of one row (pre-verify).
        after: of one that has the drafts of the step before as rows (post-verify).
    """
    at, pending, seconds = 0, False, 0.0
    while at < len(right):
        if pending:
            seconds += after
            count = run_of(right, at, num_drafts)
            pending = count == num_drafts
            at += count + (not pending)  # no token of the target's own behind a chain that was right
        else:
            seconds += before
            pending = right[at]
            at += not pending
    return seconds


def main() -> None:
    """Measure, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", nargs="?")
    parser.add_argument("--prompts", action="append", type=Path, default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(*json.loads(options.engine))
        return
    from vllm_ext.data.prompts import load_prompts
    from vllm_ext.demo.embedded_model import ensure_model

    given = str(ensure_model()), options.draft, [prompt.messages for prompt in load_prompts(options.prompts)]
    two, pairs = on_cores("0-1", 2, *given)
    one, _ = on_cores("0", 1, *given[:2], given[2][::4])
    right = agreement(options.draft, pairs)
    shares = [round(0.1 * tenths, 1) for tenths in range(4, 10)]
    found: dict[str, Any] = {
        "tokens": sum(map(len, right)),
        "draft_is_right": sum(map(sum, right)) / sum(map(len, right)),
        "seconds_on_2_cores": two,
        "seconds_on_1_core": one,
        "times_plain": times_plain(right, two, one),
        "times_plain_by_share": {share: times_plain(by_chance(share), two, one) for share in shares},
    }
    for row in found["times_plain"]:
        print("{drafts} drafts: a chain {chain:.2f}x, PEARL at most {pearl:.2f}x of plain".format(**row))
    for share, rows in found["times_plain_by_share"].items():
        chains, pearls = (max(row[kind] for row in rows) for kind in ("chain", "pearl"))
        print(f"right in {share} of places, by chance: a chain {chains:.2f}x, PEARL at most {pearls:.2f}x")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def by_chance(share: float) -> list[list[bool]]:
    """Answers whose tokens the draft has that often, each by itself."""
    draw = np.random.default_rng(0)
    return [(draw.random(MAX_TOKENS) < share).tolist() for _ in range(200)]


def times_plain(
    right: Sequence[Sequence[bool]], two: Mapping[str, list[float]], one: Mapping[str, list[float]]
) -> list[dict[str, float]]:
    """How much faster than plain decoding on two cores both are, by drafts of a step.

    Args:
        right: of each answer, as in `pearl`.
        two: seconds on two cores of ``target`` and ``draft``, by rows.
        one: likewise on one.
    """
    plain = sum(map(len, right)) * two["target"][0]
    found = []
    for n in range(1, MOST + 1):
        in_turn = n * two["draft"][0] + two["target"][n]
        drafting = n * one["draft"][0]
        at_once = max(drafting, one["target"][0]), max(drafting, one["target"][n - 1])
        chains = plain / sum(chain(each, n, in_turn) for each in right)
        pearls = plain / sum(pearl(each, n, *at_once) for each in right)
        found.append({"drafts": n, "chain": chains, "pearl": pearls})
    return found


if __name__ == "__main__":
    main()
