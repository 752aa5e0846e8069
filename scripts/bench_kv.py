# SPDX-License-Identifier: Apache-2.0
"""What an encoded KV cache holds, what it costs in quality, and how fast it is read, beside vLLM's own.

    .venv/bin/python scripts/bench_kv.py TEXT --context 4096 --kv '{"method": "kivi"}' --json kv.json

TEXT is any text of a few thousand words. One engine has vLLM's cache, one the encoded one, both in the same memory.
Perplexity is that of TEXT in windows of ``--context`` tokens, read as prompts; a token is the same where both engines
find the same one likeliest. Decoding: ``--batch`` requests behind that many tokens each, in rounds that take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from vllm_ext import demo_model


def windows(llm: Any, text: str, context: int, most: int) -> list[list[int]]:
    """Token ids, ``context`` each."""
    tokens = llm.get_tokenizer().encode(text)
    found = [tokens[start : start + context] for start in range(0, len(tokens) - context + 1, context)]
    if not found:
        raise SystemExit(
            f"TEXT has {len(tokens)} tokens, fewer than --context {context}; give more or ask for less"
        )
    return found[:most]


def read(llm: Any, prompts: list[list[int]]) -> tuple[list[float], list[int]]:
    """Of each token behind the first, the log-probability in nats, and which one was likeliest."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    log_probs, best = [], []
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        for token, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            log_probs.append(found[token].logprob)
            best.append(next(each for each, value in found.items() if value.rank == 1))
    return log_probs, best


def decode_seconds(llm: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """Of so many steps, the reading of the prompts left out."""
    from vllm import SamplingParams

    seconds = []
    for max_tokens in (1, 1 + num_tokens):  # once for the prompts, which are cached then
        asked = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return seconds[1]


def capacity(llm: Any) -> int:
    """Tokens, as vLLM reports them at start-up."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.kv_cache_size_tokens)


def main() -> None:
    """See the module."""
    from vllm import LLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--kv", type=json.loads, action="append", required=True, help="what is measured")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--decode-context", type=int, default=7168)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default=None, help="the demo model")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    model = arguments.model or str(demo_model.ensure_model())

    def make(kv: dict[str, Any] | None) -> Any:
        return LLM(
            model,
            dtype=arguments.dtype,
            max_model_len=8192,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 30,
            additional_config={} if kv is None else {"vllm_ext": {"kv": kv}},
        )

    plain = make(None)
    text = arguments.text.read_text()
    prompts = windows(plain, text, arguments.context, arguments.windows)
    long = (windows(plain, text, arguments.decode_context, arguments.batch) * arguments.batch)[
        : arguments.batch
    ]
    long = [[*each[i:], *each[:i]] for i, each in enumerate(long)]  # all different
    expected, likeliest = read(plain, prompts)
    rows = []
    for kv in arguments.kv:
        encoded = make(kv)
        found, best = read(encoded, prompts)
        ratios, steps = [], []
        for round_ in range(arguments.rounds + 1):
            own, ours = (decode_seconds(llm, long, arguments.decode_tokens) for llm in (plain, encoded))
            if round_:  # the first warms up
                ratios.append(own / ours)
                steps.append(1e3 * own / arguments.decode_tokens)
        rows.append(
            {
                "kv": kv,
                "capacity": capacity(encoded) / capacity(plain),
                "capacity_tokens": capacity(encoded),
                "perplexity": math.exp(-statistics.fmean(found)),
                "perplexity_plain": math.exp(-statistics.fmean(expected)),
                "log_prob_change": statistics.fmean(abs(a - b) for a, b in zip(found, expected, strict=True)),
                "same_likeliest": statistics.fmean(a == b for a, b in zip(best, likeliest, strict=True)),
                "decode_speed": statistics.median(ratios),
                "decode_speed_rounds": ratios,
                "plain_step_ms": statistics.median(steps),
            }
        )
        print(rows[-1], flush=True)
        del encoded
    saved = {
        key: value for key, value in vars(arguments).items() if key not in ("json", "text", "model", "kv")
    }
    saved |= {"model": "SmolLM2-135M-Instruct" if arguments.model is None else arguments.model, "rows": rows}
    arguments.json.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
