# SPDX-License-Identifier: Apache-2.0
"""How soon answers under rule asap have the model's own law, with a real model and trees; plain masking beside it.

    .venv/bin/python scripts/asap_law.py --json asap.json [--answers 400]

SmolLM2-135M-Instruct in float32, temperature 1, is asked a question to which a regular expression allows three answers;
the likeliest first word leads to what the model would hardly say. Its own law, given that it obeys, is that of all
token sequences the grammar takes, each scored whole. Beside it the shares of answers, by hundreds, and their total
variation distance from that law: half the sum of the differences.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext import demo_model

QUESTION = "What is the capital of France? Answer in a few words."
ANSWERS = ("Paris.", "The capital is Rome.", "I am sure that it is Lyon.")
PART = 100  # answers to a share


def sequences(vocabulary: Any, end: int) -> list[tuple[int, ...]]:
    """All token sequences of the answers, with the end token."""
    from vllm_ext.samplers.grammar import Grammars

    grammars, found, open_prefixes = Grammars(vocabulary), [], [()]
    while open_prefixes:
        prefix: tuple[int, ...] = open_prefixes.pop()
        behind = grammars.behind("regex", pattern(), end, prefix)
        assert behind is not None
        for token in behind.allowed().tolist():
            (found if token == end else open_prefixes).append((*prefix, token))
    return found


def pattern() -> str:
    """The regular expression."""
    return "|".join(answer.replace(".", r"\.") for answer in ANSWERS)


def main() -> None:
    """Score, ask, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_ext.vocabulary import ModelVocabulary

    llm = LLM(
        str(demo_model.ensure_model()),
        speculative_config={"method": "token_recycling"},
        additional_config={"vllm_ext": {"rules": {"asap": {}}}},
        dtype="float32",
        max_model_len=512,
        max_num_seqs=arguments.batch_size,
        kv_cache_memory_bytes=1 << 28,
    )
    tokenizer = llm.get_tokenizer()
    end = tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    whole = sequences(ModelVocabulary.of(llm.llm_engine.model_config), end)
    scored = llm.generate(
        [{"prompt_token_ids": [*prompt, *tokens]} for tokens in whole],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    own: Counter[str] = Counter()
    for tokens, output in zip(whole, scored, strict=True):
        rows = output.prompt_logprobs[len(prompt) :]
        log_p = sum(row[token].logprob for row, token in zip(rows, tokens, strict=True))
        own[tokenizer.decode(tokens[:-1])] += float(np.exp(log_p))
    obeys = sum(own.values())
    law = np.array([own[answer] / obeys for answer in ANSWERS])

    def ask(**given: Any) -> list[list[float]]:
        """Shares of the answers, by part."""
        params = [
            SamplingParams(temperature=1, max_tokens=32, seed=seed, **given) for seed in range(arguments.answers)
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        parts = [texts[begin : begin + PART] for begin in range(0, len(texts), PART)]
        return [[part.count(answer) / len(part) for answer in ANSWERS] for part in parts]

    shares = {
        "masking": ask(structured_outputs=StructuredOutputsParams(regex=pattern())),
        "asap": ask(extra_args={"asap_regex": pattern()}),
    }
    print(f"{len(whole)} token sequences; the model says one of them with probability {obeys:.2e}")
    print(f"| | {' | '.join(ANSWERS)} | distance |")
    print(f"| --- |{' ---: |' * (len(ANSWERS) + 1)}")
    print(f"| the model's own law | {' | '.join(f'{share:.4f}' for share in law)} | |")
    for name, parts in shares.items():
        for number, part in enumerate(parts):
            distance = float(np.abs(np.array(part) - law).sum() / 2)
            label = f"{name}, answers {PART * number + 1} to {PART * (number + 1)}"
            print(f"| {label} | {' | '.join(f'{share:.2f}' for share in part)} | {distance:.3f} |")
    figures = {"question": QUESTION, "answers": ANSWERS, "obeys": obeys, "law": law.tolist(), "shares": shares}
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
