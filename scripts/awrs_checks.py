# SPDX-License-Identifier: Apache-2.0
"""How many tokens adaptive weighted rejection sampling asks a grammar about, on JSONSchemaBench with a real model.

    .venv/bin/python scripts/awrs_checks.py SCHEMAS.jsonl --each 2 --json awrs.json

SmolLM2-135M-Instruct in float32 answers the first schemas of each category, at temperature 1, each token drawn by
`samplers/awrs.py` under the rule's own grammar. Beside it the mask of the same row, in which the token must be. Times
are of a token: of the draw with its checks, and of the mask, filled and applied.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.demo import embedded_model
from vllm_ext.kernels.chance import RandomChance
from vllm_ext.samplers import awrs
from vllm_ext.samplers.base import allows
from vllm_ext.samplers.grammar import Grammars


def answer(
    model: Any, prompt: list[int], grammars: Grammars, schema: str, end: int, most: int, chance: RandomChance
) -> list[dict[str, float]]:
    """Figures of each token of one answer."""
    rows: list[dict[str, float]] = []
    output: list[int] = []
    tokens, cache = prompt, None
    while len(rows) < most:
        with torch.inference_mode():
            result = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache, logits = result.past_key_values, result.logits[0, -1:].clone()
        started = time.perf_counter()
        behind = grammars.behind("json", schema, end, output)
        assert behind is not None
        p = logits[0].double().softmax(0).numpy()
        draw = awrs.draw(p, functools.partial(allows, behind), chance, behind.allowed)
        drawn = time.perf_counter()
        inside = behind.allowed()
        masked = torch.full_like(logits, -torch.inf)
        masked[0, inside] = logits[0, inside]
        seconds = time.perf_counter() - drawn
        assert draw.token is not None, "the grammar allows nothing that the model could say"
        assert draw.token in inside, f"token {draw.token} is not in the mask"
        rows.append(
            {
                "checks": draw.checks,
                "weight": draw.weight,
                "mass": float(logits[0].double().softmax(0)[inside].sum()),
                "draw_seconds": drawn - started,
                "mask_seconds": seconds,
            }
        )
        if draw.token == end:
            break
        tokens = [draw.token]
        output.append(draw.token)
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

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    folder = str(embedded_model.ensure_model())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocabulary = ModelVocabulary(folder, None, "auto", False, model.config.vocab_size)
    grammars = Grammars(vocabulary)
    chance = RandomChance(np.random.default_rng(0))
    seen: Counter[str] = Counter()
    rows: list[dict[str, float]] = []
    answers = 0
    for line in arguments.schemas.read_text().splitlines():
        entry = json.loads(line)
        if seen[entry["category"]] >= arguments.each:
            continue
        schema = json.dumps(entry["schema"])
        try:
            validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
            grammars.behind("json", schema, tokenizer.eos_token_id, [])
        except (VLLMValidationError, RuntimeError):
            continue
        seen[entry["category"]] += 1
        text = f"Give an example of JSON that obeys this schema:\n{json.dumps(entry['schema'])[:1500]}"
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        rows += answer(model, prompt, grammars, schema, tokenizer.eos_token_id, arguments.max_tokens, chance)
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
        "vocabulary": vocabulary.size,
        "checks": quantiles("checks"),
        "checks, percent of the vocabulary": quantiles("checks", 100 / vocabulary.size),
        "probability that the grammar allows": quantiles("mass"),
        "mean weight beside mean of that": [round(float(weights.mean()), 4), quantiles("mass")["mean"]],
        "draw, us": quantiles("draw_seconds", 1e6),
        "mask, us": quantiles("mask_seconds", 1e6),
    }
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
