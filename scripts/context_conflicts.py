# SPDX-License-Identifier: Apache-2.0
"""Whether answers go by the context they are given or by what the model knew before, under rule cad.

    .venv/bin/python scripts/context_conflicts.py --json conflicts.json

Sentences that put each of 40 countries' capitals into the next country of the list, and the question for it: after
NQ-Swap (arXiv 2109.05052), whose passages are such swaps. Greedy answers; those count that name the context's city, and
those that name the one the model has learnt. Without a draft, as drafts change nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_ext.demo import embedded_model

CAPITALS = (
    "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Greece Athens, Austria Vienna, Poland "
    "Warsaw, Hungary Budapest, Sweden Stockholm, Norway Oslo, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, "
    "Russia Moscow, Turkey Ankara, Egypt Cairo, Kenya Nairobi, Nigeria Abuja, Ghana Accra, Morocco Rabat, Japan Tokyo, "
    "China Beijing, India Delhi, Thailand Bangkok, Vietnam Hanoi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Cuba "
    "Havana, Canada Ottawa, Peru Lima, Chile Santiago, Colombia Bogota, Ecuador Quito, Australia Canberra, Ukraine "
    "Kiev, Belgium Brussels, Jordan Amman, Syria Damascus"
)
ALPHAS = (0.0, 0.5, 1.0, 2.0)


def main() -> None:
    """See the module."""
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    llm = LLM(
        str(embedded_model.ensure_model()),
        dtype=arguments.dtype,
        max_model_len=512,
        additional_config={"vllm_ext": {"rules": {"cad": {}}}},
        kv_cache_memory_bytes=1 << 29,
    )
    pairs = [tuple(each.rsplit(" ", 1)) for each in CAPITALS.split(", ")]
    given: list[tuple[str, list[dict[str, str]], str, str]] = []
    for index, (country, known) in enumerate(pairs):
        told = pairs[(index + 1) % len(pairs)][1]
        context = f"In the year 2080 the government of {country} moved. Since then the capital of {country} is {told}."
        question = f"Q: In 2085, what is the capital of {country}? Answer with the name of the city.\nA:"
        given.append((context, [{"role": "user", "content": f"{context}\n\n{question}"}], told, known))
    rows: list[dict[str, Any]] = []
    for alpha in ALPHAS:
        params = [
            SamplingParams(
                temperature=0, max_tokens=16, extra_args={"cad_context": each[0], "cad_alpha": alpha}
            )
            for each in given
        ]
        outputs = llm.chat([each[1] for each in given], params, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        rows.append(
            {
                "alpha": alpha,
                "questions": len(given),
                "context": sum(each[2] in text for each, text in zip(given, texts, strict=True)),
                "learnt": sum(each[3] in text for each, text in zip(given, texts, strict=True)),
                "examples": texts[:4],
            }
        )
        print(rows[-1], flush=True)
    arguments.json.write_text(json.dumps({"dtype": arguments.dtype, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
