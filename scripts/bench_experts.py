# SPDX-License-Identifier: Apache-2.0
"""What a row more costs a model of experts and a dense one of the same active width, and what the budget makes of it.

Rows of a step share the weights that are read; of experts they share less, as each row has its own. So a tree costs a
model of experts more, until a batch reads all of them anyhow: from there on a tree costs as little as a dense model's
(MoESD, arXiv 2505.19645, calls T(b) / T(b (1 + n)) the target efficiency of n drafts in a batch of b).

    .venv/bin/python scripts/bench_experts.py [--experts 32] [--json OUT.json]

Both models have random weights (`tests/zoo.py`), a few words that are ever likely, and so drafts that are accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("", "tests")]

BATCHES = (1, 2, 4, 8, 16, 32)
NODES = 4  # of the efficiency
MOST_NODES = 8
ROUNDS = 3
TOKENS = 64
WIDTH = {"hidden_size": 512, "num_hidden_layers": 6, "head_dim": 64}
WIDTH |= {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 512**-0.5}
EXPERT = 768  # columns
PER_TOKEN = 2  # experts


def forward_ms(worker: Any, random_tokens: bool) -> dict[int, float]:
    """Sent to the worker: milliseconds of a forward pass by its rows, timed as the engine does it at start-up."""
    from vllm_ext.engine.v1 import calibration

    runner = worker.model_runner

    def run(size: int) -> None:
        hidden, _ = runner._dummy_run(size, randomize_inputs=random_tokens)
        runner.model.compute_logits(hidden[:size])

    return {size: 1e3 * time_s for size, time_s in calibration.curve(128, run, None).seconds.items()}


def set_nodes(worker: Any, budget: bool) -> None:
    """Sent to the worker: let the budget choose, or draft nothing."""
    drafter = worker.model_runner.drafter
    if not hasattr(worker, "goodput_budget"):
        worker.goodput_budget = drafter.budget
    drafter.budget = worker.goodput_budget if budget else None
    drafter.num_nodes = MOST_NODES if budget else 0


def run(llm: Any, batch: int, seed: int) -> tuple[float, float]:
    """Tokens a second of a batch, and drafts a request's step."""
    import random

    import zoo
    from vllm import SamplingParams

    draw = random.Random(seed)
    prompts = [{"prompt_token_ids": draw.choices(range(3, zoo.LIKELY), k=32)} for _ in range(batch)]
    before = counters(llm)
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - started
    after = counters(llm)
    drafted = after["spec_draft_tokens"] - before["spec_draft_tokens"]
    return batch * TOKENS / seconds, drafted / max(after["spec_steps"] - before["spec_steps"], 1)


def counters(llm: Any) -> dict[str, int]:
    """The worker's."""
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result


def measure(folder: str) -> dict[str, Any]:
    """Curves of a model, and its batches with drafts and without, in turns."""
    from vllm import LLM

    method = {"method": "token_recycling", "num_speculative_tokens": MOST_NODES}
    llm = LLM(
        folder,
        speculative_config=method,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=max(BATCHES),
        enforce_eager=True,
        disable_log_stats=True,
    )
    (alike,) = llm.collective_rpc(forward_ms, args=(False,))
    (apart,) = llm.collective_rpc(forward_ms, args=(True,))
    llm.collective_rpc(set_nodes, args=(True,))
    run(llm, 4, 0)  # something to draft from
    batches = {}
    for batch in BATCHES:
        plain, drafting = [], []
        for seed in range(1, 1 + ROUNDS):
            llm.collective_rpc(set_nodes, args=(False,))
            plain.append(run(llm, batch, seed)[0])
            llm.collective_rpc(set_nodes, args=(True,))
            drafting.append(run(llm, batch, seed))
        ratios = [rate / base for (rate, _), base in zip(drafting, plain, strict=True)]
        batches[batch] = {
            "plain_tokens_per_s": statistics.median(plain),
            "beside_plain": statistics.median(ratios),
            "drafts_per_step": statistics.median(drafts for _, drafts in drafting),
        }
    return {"forward_ms": apart, "forward_ms_of_one_token": alike, "batches": batches}


def show(name: str, figures: dict[str, Any]) -> None:
    """As a table."""
    apart, alike = figures["forward_ms"], figures["forward_ms_of_one_token"]
    print(f"\n{name}\n  rows      ms   beside one row   the same token in all rows")
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        print(f"{size:6} {apart[size]:7.2f} {apart[size] / apart[1]:16.2f} {alike[size] / alike[1]:28.2f}")
    print(f" batch   efficiency of {NODES}   beside plain   drafts a step")
    for batch, line in figures["batches"].items():
        whole = batch * (1 + NODES)
        efficiency = apart[batch] / apart[whole] if whole in apart else float("nan")
        print(f"{batch:6} {efficiency:17.2f} {line['beside_plain']:14.2f} {line['drafts_per_step']:15.2f}")


def main() -> None:
    """Measure both models, one after the other."""
    import zoo

    from vllm_ext.demo import embedded_model

    parser = argparse.ArgumentParser(description="What a row more costs a model of experts, and a dense one.")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = embedded_model.ensure_model()
    experts = {"num_experts": args.experts, "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": EXPERT}
    models = {"qwen3": {"intermediate_size": PER_TOKEN * EXPERT}, "qwen3_moe": experts}
    found = {}
    for name, changed in models.items():
        with tempfile.TemporaryDirectory() as folder:
            zoo.write(name, tokenizer, Path(folder), **WIDTH, **changed)
            found[name] = measure(folder)
        show(name, found[name])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
