# SPDX-License-Identifier: Apache-2.0
"""Preemptions and tokens a second where KV blocks are short: plain, drafts that give way, and drafts in vLLM's way.

Two engines with equally few blocks take turns on the same requests, all at once; of the one with a method drafts give
way in one turn (`scheduler.draft_blocks`) and do not in the next.

    .venv/bin/python scripts/bench_preemptions.py --model MODEL --prompts FILE.jsonl --blocks 40
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is asked for what it did

WAYS = ("plain", "drafts give way", "vLLM's way")


def preempted(llm: Any) -> int:
    """How often requests were, so far."""
    (metric,) = [each for each in llm.get_metrics() if each.name == "vllm:num_preemptions"]
    count: int = metric.value
    return count


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, as of vllm-ext bench")
    parser.add_argument("--method", default="token_recycling")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree; all are verified")
    parser.add_argument("--blocks", type=int, required=True, help="of the KV cache")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    from vllm_ext.data.prompts import load_prompts

    common: dict[str, Any] = {
        "model": options.model,
        "max_model_len": 1024,
        "max_num_seqs": options.requests,
        "block_size": options.block_size,
        "num_gpu_blocks_override": options.blocks,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
    }
    method = {"method": options.method, "num_speculative_tokens": options.nodes, "budget": "fixed"}
    engines = {
        "plain": LLM(**common),
        "drafts": LLM(**common, speculative_config=method, distributed_executor_backend="mp"),
    }
    scheduler = engines["drafts"].llm_engine.engine_core.engine_core.scheduler
    prompts = [prompt.messages for prompt in load_prompts([options.prompts])[: options.requests]]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    counts: dict[str, list[int]] = {way: [] for way in WAYS}
    for turn in range(1 + options.rounds):
        for way in WAYS:
            llm = engines["plain" if way == "plain" else "drafts"]
            scheduler._is_known = way != WAYS[2]
            before, started = preempted(llm), time.perf_counter()
            llm.chat(prompts, params, use_tqdm=False)
            if turn:  # the first compiles, and fills tables
                rates[way].append(len(prompts) * options.max_tokens / (time.perf_counter() - started))
                counts[way].append(preempted(llm) - before)
    print("| | preemptions | tokens/s | beside plain |\n| --- | ---: | ---: | ---: |")
    for way in WAYS:
        beside = statistics.median(a / b for a, b in zip(rates[way], rates["plain"], strict=True))
        rate = statistics.median(rates[way])
        print(f"| {way} | {statistics.median(counts[way]):g} | {rate:.0f} | {beside:.2f}x |")


if __name__ == "__main__":
    main()
