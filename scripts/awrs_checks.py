# SPDX-License-Identifier: Apache-2.0
"""How many tokens adaptive weighted rejection sampling asks a grammar about, on JSONSchemaBench with a real model.

    .venv/bin/python scripts/awrs_checks.py SCHEMAS.jsonl --each 2 --json awrs.json

SmolLM2-135M-Instruct in float32 answers the first schemas of each category, at temperature 1, each token drawn by
`samplers/awrs.py`, whose constraint is vLLM's xgrammar matcher. Beside it the mask of the same row: the token must be
in it, and where it leaves all of the probability no token may have been rejected. Times are medians a token: of the
draw with its checks, and of the mask, filled and applied.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ext import demo_model
from vllm_ext.grammars import Grammar
from vllm_ext.kernels.chance import RandomChance
from vllm_ext.kernels.token_mask import mask_rows
from vllm_ext.samplers import awrs


def answer(
    model: Any,
    prompt: list[int],
    grammar: Grammar,
    bitmask: Any,
    most: int,
    chance: RandomChance,
    ends: set[int],
) -> list[dict[str, float]]:
    """Figures of each token of one answer."""
    rows: list[dict[str, float]] = []
    tokens, cache = prompt, None
    while len(rows) < most:
        with torch.inference_mode():
            output = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1:].clone()
        p = logits[0].double().softmax(0).numpy()

        def allowed(token: int) -> bool:
            if token in ends:
                grammar.fill(bitmask, 0)
                return bool(int(bitmask[0, token // 32]) >> (token % 32) & 1)
            taken = grammar.accept(token)
            if taken:
                grammar.rollback(1)
            return taken

        started = time.perf_counter()
        draw = awrs.draw(p, allowed, chance)
        drawn = time.perf_counter()
        grammar.fill(bitmask, 0)
        mask_rows(logits, [0], bitmask)
        masked = time.perf_counter()
        inside = torch.isfinite(logits[0])
        assert draw.token is not None, "the grammar allows nothing that the model could say"
        assert bool(inside[draw.token]), f"token {draw.token} is not in the mask"
        rows.append(
            {
                "checks": draw.checks,
                "weight": draw.weight,
                "mass": float(p[inside.numpy()].sum()),
                "draw_seconds": drawn - started,
                "mask_seconds": masked - drawn,
            }
        )
        if draw.token in ends:
            break
        assert grammar.accept(draw.token)
        tokens = [draw.token]
    return rows


def main() -> None:
    """Read the arguments, answer, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--each", type=int, default=2, help="schemas of each category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()

    from transformers import AutoModelForCausalLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    folder = str(demo_model.ensure_model())
    config = EngineArgs(model=folder, max_model_len=2048).create_engine_config()
    tokenizer = cached_tokenizer_from_config(config.model_config)
    vocab_size = config.model_config.get_vocab_size()
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=vocab_size)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bitmask = backend.allocate_token_bitmask(1)
    chance = RandomChance(np.random.default_rng(0))
    seen: Counter[str] = Counter()
    rows: list[dict[str, float]] = []
    answers = 0
    for line in arguments.schemas.read_text().splitlines():
        entry = json.loads(line)
        if seen[entry["category"]] >= arguments.each:
            continue
        try:
            compiled = backend.compile_grammar(StructuredOutputOptions.JSON, json.dumps(entry["schema"]))
        except RuntimeError:
            continue
        seen[entry["category"]] += 1
        text = f"Give an example of JSON that obeys this schema:\n{json.dumps(entry['schema'])[:1500]}"
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        ends = {tokenizer.eos_token_id}
        rows += answer(model, prompt, Grammar(compiled), bitmask, arguments.max_tokens, chance, ends)
        answers += 1

    def quantiles(name: str, scale: float = 1.0) -> dict[str, float]:
        values = np.array([row[name] for row in rows]) * scale
        return {
            "mean": round(float(values.mean()), 3),
            **{f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 95, 99, 100)},
        }

    weights = np.array([row["weight"] for row in rows])
    figures = {
        "schemas": answers,
        "tokens": len(rows),
        "vocabulary": vocab_size,
        "checks": quantiles("checks"),
        "checks, percent of the vocabulary": quantiles("checks", 100 / vocab_size),
        "probability that the grammar allows": quantiles("mass"),
        "mean weight beside mean of that": [round(float(weights.mean()), 4), quantiles("mass")["mean"]],
        "draw, us": quantiles("draw_seconds", 1e6),
        "mask, us": quantiles("mask_seconds", 1e6),
    }
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
