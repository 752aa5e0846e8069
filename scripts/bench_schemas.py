# SPDX-License-Identifier: Apache-2.0
"""Structured output with trees beside vLLM's own: the same tokens, in how many steps, and whether they are valid.

    .venv/bin/python scripts/bench_schemas.py SCHEMAS.jsonl --json schemas.json [--each 4] [--max-tokens 256] \
        [--methods '["plain", {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "hybrid"]'] \
        [--strict] [--close]

A line of the file is one of JSONSchemaBench's: ``category``, ``schema`` and ``tests``. Each method has an engine of its
own, one after the other; answers are greedy, and the first method's are what the others are compared with. Tokens per
step depend on no clock: budgets are fixed. There is one grammar backend: what that refuses is counted, and with
--strict what is refused because it would be enforced only in part, by category and by what of a schema it is. With
--close rule close_by_max_tokens is there, and what it refuses because no ending fits is counted as refused.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext.config import structured_outputs
from vllm_ext.demo import embedded_model
from vllm_ext.samplers.strict_schema import first_problem

SHOWN = 1200  # characters of a schema that the prompt has
QUESTION = "Answer with one JSON value that this JSON schema describes, and with nothing else.\n\n{}"


@dataclass(frozen=True)
class Answer:
    """What became of one schema."""

    tokens: tuple[int, ...]
    text: str
    finished: bool  # and not cut off
    refused: str  # why; empty where it was not
    is_strict: bool = False  # it was refused for what it would not enforce


def _ours(arguments: Any) -> dict[str, Any]:
    """Of the engine's ``additional_config``."""
    strict = {"structured_outputs": {"strict": True}} if arguments.strict else {}
    return strict | ({"rules": {"close_by_max_tokens": {"always": True}}} if arguments.close else {})


def method_of(given: str | dict[str, Any]) -> dict[str, Any] | None:
    """A speculative config; of ours with a fixed budget."""
    if given == "plain":
        return None
    method: dict[str, Any] = {"method": given} if isinstance(given, str) else dict(given)
    if method["method"] not in ("ngram", "suffix"):
        method = {"num_speculative_tokens": 16, "budget": "fixed", **method}
    return method


def answers_of(
    model: str, method: dict[str, Any] | None, entries: Sequence[dict[str, Any]], arguments: Any
) -> tuple[list[Answer], dict[str, float]]:
    """One engine's answers, in the order of the entries, and its counts."""
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        model,
        speculative_config=method,
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=arguments.batch_size,
        disable_log_stats=False,
        structured_outputs_config={"backend": arguments.backend},
        additional_config={"vllm_ext": ours} if (ours := _ours(arguments)) else {},
        kv_cache_memory_bytes=1 << 29,
    )
    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    refused: dict[int, str] = {}
    for number, entry in enumerate(entries):
        text = QUESTION.format(json.dumps(entry["schema"])[:SHOWN])
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        params = SamplingParams(
            temperature=0,
            max_tokens=arguments.max_tokens,
            structured_outputs=StructuredOutputsParams(json=json.dumps(entry["schema"])),
        )
        try:
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        except VLLMValidationError as error:
            refused[number] = str(error).splitlines()[0]
    done: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output for output in engine.step() if output.finished}
    counts = {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num") and hasattr(metric, "value")
    }
    llm.llm_engine.engine_core.shutdown(timeout=30)
    result = []
    for number in range(len(entries)):
        if number in refused:
            result.append(
                Answer((), "", False, refused[number], structured_outputs.IN_PART in refused[number])
            )
            continue
        completion = done[number].outputs[0]
        failed = "" if completion.finish_reason in ("stop", "length") else str(completion.finish_reason)
        result.append(
            Answer(tuple(completion.token_ids), completion.text, completion.finish_reason == "stop", failed)
        )
    return result, counts


def is_valid(text: str, schema: Any) -> bool:
    """Whether a text is JSON that the schema describes, by the library of that name."""
    from jsonschema.validators import validator_for

    try:
        return bool(validator_for(schema)(schema).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


def summary(
    entries: Sequence[dict[str, Any]],
    answers: Sequence[Answer],
    expected: Sequence[Answer],
    counts: dict[str, float],
) -> dict[str, Any]:
    """Figures of one method, the numbers of schemas by category among them."""
    categories: dict[str, Counter[str]] = defaultdict(Counter)
    keywords: Counter[str] = Counter()
    invalid, different = [], []
    for entry, answer, plain in zip(entries, answers, expected, strict=True):
        count = categories[entry["category"]]
        count["schemas"] += 1
        count["refused"] += bool(answer.refused) and not answer.is_strict
        if answer.is_strict:
            count["refused by strict"] += 1
            problem = first_problem(entry["schema"])
            assert problem is not None
            keywords[problem.keyword] += 1
        count["finished"] += answer.finished
        count["whole"] += is_valid(answer.text, entry["schema"])
        if answer.finished and not is_valid(answer.text, entry["schema"]):
            count["invalid"] += 1
            invalid.append(entry["name"])
        if answer.tokens != plain.tokens:
            different.append(entry["name"])
    tokens = sum(len(answer.tokens) for answer in answers)
    steps = tokens - counts.get("spec_decode_num_accepted_tokens", 0.0)
    return {
        "tokens": tokens,
        "tokens_per_step": tokens / steps,
        "invalid": invalid,
        "different": different,
        "categories": categories,
        "strict": dict(keywords.most_common()),
        **counts,
    }


def first_of(file: Path, each: int) -> list[dict[str, Any]]:
    """The first so many lines of each category."""
    taken: Counter[str] = Counter()
    entries = []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        taken[entry["category"]] += 1
        if taken[entry["category"]] <= each:
            entries.append(entry)
    return entries


def main() -> None:
    """Read the arguments, ask, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--methods",
        type=json.loads,
        default=["plain", {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "hybrid"],
    )
    parser.add_argument("--each", type=int, default=1000, help="schemas of each category")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="xgrammar")
    parser.add_argument("--strict", action="store_true", help="refuse schemas that are enforced only in part")
    parser.add_argument("--close", action="store_true", help="bring answers to an end within --max-tokens")
    arguments = parser.parse_args()
    model = str(embedded_model.ensure_model())
    entries = first_of(arguments.schemas, arguments.each)
    found: list[dict[str, Any]] = []
    expected: list[Answer] = []
    print(
        "| method | tokens/step | tokens | other answers | refused | by strict | finished "
        "| of them invalid | whole and valid |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for given in arguments.methods:
        answers, counts = answers_of(model, method_of(given), entries, arguments)
        expected = expected or answers
        figures = summary(entries, answers, expected, counts)
        found.append({"method": given, **figures})
        if len(found) == 1:
            found[0]["texts"] = [answer.text for answer in answers]
        sums: Counter[str] = sum(figures["categories"].values(), Counter())
        print(
            f"| {given if isinstance(given, str) else given['method']} | {figures['tokens_per_step']:.3f} "
            f"| {figures['tokens']} | {len(figures['different'])} | {sums['refused']} | {sums['refused by strict']} "
            f"| {sums['finished']} | {len(figures['invalid'])} | {sums['whole']} |",
            flush=True,
        )
        arguments.json.write_text(
            json.dumps({"arguments": vars(arguments), "methods": found}, default=str, indent=1)
        )
    if arguments.strict:
        first = found[0]
        print(
            "\n| category | schemas | refused | by strict | finished |\n| --- | ---: | ---: | ---: | ---: |"
        )
        for name, count in first["categories"].items():
            columns = ("schemas", "refused", "refused by strict", "finished")
            print(f"| {name} | {' | '.join(str(count[column]) for column in columns)} |")
        print("By strict:", ", ".join(f"{keyword} {count}" for keyword, count in first["strict"].items()))


if __name__ == "__main__":
    main()
