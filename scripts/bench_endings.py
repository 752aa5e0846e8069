# SPDX-License-Identifier: Apache-2.0
"""How many structured answers are whole at their limit: as they are, with bounded whitespace, closed, and both.

    .venv/bin/python scripts/bench_endings.py SCHEMAS.jsonl --json endings.json [--each 3] [--max-tokens 64 128 256]

A line of the file is one of JSONSchemaBench's. One engine answers all, greedily; `max_whitespace` and rule
close_by_max_tokens are asked for by request. What vLLM refuses is left out of all columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_schemas import QUESTION, SHOWN, first_of, is_valid

from vllm_ext.demo import embedded_model

CLOSE = {"close_by_max_tokens": True}


def is_json(text: str) -> bool:
    """Whether a text is whole, whatever it should be."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def answers_of(
    llm: Any, schemas: Sequence[Any], max_tokens: int, extra: dict[str, Any]
) -> list[dict[str, Any]]:
    """One way's answers, in the order of the schemas."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    found: dict[int, dict[str, Any]] = {}
    for number, schema in enumerate(schemas):
        text = QUESTION.format(json.dumps(schema)[:SHOWN])
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
            extra_args=extra or None,
        )
        try:
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        except VLLMValidationError as error:
            found[number] = {"refused": str(error).splitlines()[0]}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (answer,) = output.outputs
                found[int(output.request_id)] = {
                    "text": answer.text,
                    "tokens": len(answer.token_ids),
                    "ended": answer.finish_reason,
                    "why": answer.stop_reason,
                }
    return [found[number] for number in range(len(schemas))]


def main() -> None:
    """Read the arguments, ask, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--each", type=int, default=3, help="schemas of each category")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--max-whitespace", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    from vllm import LLM

    llm = LLM(
        str(embedded_model.ensure_model()),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=arguments.batch_size,
        enforce_eager=True,
        structured_outputs_config={"backend": "xgrammar"},
        additional_config={"vllm_ext": {"structured_outputs": {}, "rules": {"close_by_max_tokens": {}}}},
        kv_cache_memory_bytes=1 << 29,
    )
    schemas = [entry["schema"] for entry in first_of(arguments.schemas, arguments.each)]
    bound = {"max_whitespace": arguments.max_whitespace}
    ways = {"neither": {}, "max_whitespace": bound, "close_by_max_tokens": CLOSE, "both": {**bound, **CLOSE}}
    found: list[dict[str, Any]] = []
    print("| `max_tokens` | with | answered | no ending fits | whole JSON | of them valid | tokens |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for max_tokens in arguments.max_tokens:
        for way, extra in ways.items():
            answers = answers_of(llm, schemas, max_tokens, extra)
            asked = [pair for pair in zip(answers, schemas, strict=True) if "refused" not in pair[0]]
            answered = [pair for pair in asked if pair[0]["ended"] in ("stop", "length")]
            whole = [pair for pair in answered if is_json(pair[0]["text"])]
            valid = sum(is_valid(answer["text"], schema) for answer, schema in whole)
            tokens = sum(answer["tokens"] for answer, _ in answered)
            found.append({"max_tokens": max_tokens, "with": way, "answers": answers})
            print(
                f"| {max_tokens} | {way} | {len(answered)} | {len(asked) - len(answered)} | {len(whole)} "
                f"| {valid} | {tokens} |",
                flush=True,
            )
            arguments.json.write_text(
                json.dumps({"arguments": vars(arguments), "runs": found}, default=str, indent=1)
            )


if __name__ == "__main__":
    main()
