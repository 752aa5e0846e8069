# SPDX-License-Identifier: Apache-2.0
"""How soon answers under rule asap have the model's own law, with a real model and trees; plain masking beside it.

    .venv/bin/python scripts/asap_law.py --json asap.json [--answers 400]

SmolLM2-135M-Instruct in float32, temperature 1, is asked a question to which a regular expression allows three answers;
the likeliest first word leads to what the model would hardly say. Its own law, given that it obeys, is that of the
token sequences the grammar takes, each scored to its end. Beside it the shares of answers, by hundreds, and their total
variation distance from that law: half the sum of the differences.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.demo import embedded_model

QUESTION = "What is the capital of France? Answer in a few words."
ANSWERS = ("Paris.", "The capital is Rome.", "I am sure that it is Lyon.")
PART = 100  # answers to a share
LEAST = 1e-11  # probability of a beginning that is followed


def pattern() -> str:
    """The regular expression."""
    return "|".join(answer.replace(".", r"\.") for answer in ANSWERS)


def own_law(llm: Any, prompt: list[int]) -> dict[str, float]:
    """The model's probability of each answer, however it is spelled; spellings below `LEAST` are left out."""
    from vllm import SamplingParams

    from vllm_ext.data.model_files import ModelVocabulary
    from vllm_ext.samplers.grammar import Grammars

    tokenizer = llm.get_tokenizer()
    end = tokenizer.eos_token_id
    grammars = Grammars(ModelVocabulary.of(llm.llm_engine.model_config))
    own: dict[str, float] = defaultdict(float)
    beginnings: dict[tuple[int, ...], float] = {(): 1.0}
    while beginnings:
        ids = {}
        for prefix in beginnings:
            behind = grammars.behind("regex", pattern(), end, prefix)
            assert behind is not None
            ids[prefix] = behind.allowed().tolist()
        outputs = llm.generate(
            [{"prompt_token_ids": [*prompt, *prefix]} for prefix in ids],
            [SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=its) for its in ids.values()],
            use_tqdm=False,
        )
        longer: dict[tuple[int, ...], float] = {}
        for (prefix, its), output in zip(ids.items(), outputs, strict=True):
            found = output.outputs[0].logprobs[0]
            for token in its:
                p = beginnings[prefix] * float(np.exp(found[token].logprob))
                if token == end:
                    own[tokenizer.decode(prefix)] += p
                elif p > LEAST:
                    longer[(*prefix, token)] = p
        beginnings = longer
    return own


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

    llm = LLM(
        str(embedded_model.ensure_model()),
        speculative_config={"method": "token_recycling"},
        additional_config={"vllm_ext": {"rules": {"asap": {}}}},
        dtype="float32",
        max_model_len=512,
        max_num_seqs=arguments.batch_size,
        kv_cache_memory_bytes=1 << 28,
    )
    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    own = own_law(llm, prompt)
    obeys = sum(own.values())
    law = np.array([own[answer] / obeys for answer in ANSWERS])

    def ask(**given: Any) -> list[list[float]]:
        """Shares of the answers, by part."""
        params = [
            SamplingParams(temperature=1, max_tokens=32, seed=seed, **given)
            for seed in range(arguments.answers)
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        parts = [texts[begin : begin + PART] for begin in range(0, len(texts), PART)]
        return [[part.count(answer) / len(part) for answer in ANSWERS] for part in parts]

    shares = {
        "masking": ask(structured_outputs=StructuredOutputsParams(regex=pattern())),
        "asap": ask(extra_args={"asap_regex": pattern()}),
    }
    print(f"The model says one of them by itself with probability {obeys:.2e}")
    print(f"| | {' | '.join(ANSWERS)} | distance |")
    print(f"| --- |{' ---: |' * (len(ANSWERS) + 1)}")
    print(f"| the model's own law | {' | '.join(f'{share:.4f}' for share in law)} | |")
    for name, parts in shares.items():
        for number, part in enumerate(parts):
            distance = float(np.abs(np.array(part) - law).sum() / 2)
            label = f"{name}, answers {PART * number + 1} to {PART * (number + 1)}"
            print(f"| {label} | {' | '.join(f'{share:.2f}' for share in part)} | {distance:.3f} |")
    figures = {
        "question": QUESTION,
        "answers": ANSWERS,
        "obeys": obeys,
        "law": law.tolist(),
        "shares": shares,
    }
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
