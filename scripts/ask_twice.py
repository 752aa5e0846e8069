# SPDX-License-Identifier: Apache-2.0
"""How much of an answer comes again when its prompt is asked a second time, greedily, in one engine, one at a time.

In float32 all of it does. In bfloat16 a row's rounding depends on how many rows are computed beside it, that is on what
was drafted, and decides between near tokens.

    .venv/bin/python scripts/ask_twice.py --model MODEL --prompts FILE.jsonl:4 \
        --method '{"method": "hybrid", "num_speculative_tokens": 16}'
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def common(first: list[int], second: list[int]) -> int:
    """Tokens that two answers have in common from their start."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--method", required=True, help="a --speculative-config")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams

    from vllm_ext.data.prompts import load_prompts

    chats = [prompt.messages for prompt in load_prompts(arguments.prompts)]
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,  # the second prompt is computed as the first was
        speculative_config=json.loads(arguments.method),
    )
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    turns: list[list[list[int]]] = []
    for turn in ("first", "second"):
        started = time.perf_counter()
        answers = [list(o.outputs[0].token_ids) for o in llm.chat(chats, params, use_tqdm=False)]
        seconds = time.perf_counter() - started
        turns.append(answers)
        print(f"{turn} time: {sum(map(len, answers)) / seconds:.1f} tokens/s, prompts counted in the time")
    same = sum(a == b for a, b in zip(*turns, strict=True))
    shared = sum(common(a, b) for a, b in zip(*turns, strict=True)) / sum(map(len, turns[0]))
    print(f"{same} of {len(chats)} answers came again; {100 * shared:.0f} % of their tokens, from the start")


if __name__ == "__main__":
    main()
