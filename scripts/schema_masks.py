# SPDX-License-Identifier: Apache-2.0
"""Masks of the worker's grammars beside their matchers, over the instances of JSONSchemaBench; no model runs.

    .venv/bin/python scripts/schema_masks.py SCHEMAS.jsonl --json masks.json [--strict]

Each instance is written in two ways, with spaces and without, and goes through its schema's grammar token by token:
at every prefix the mask must allow the next token exactly if the matcher takes it. The table counts, by category,
schemas that vLLM's xgrammar backend refuses, and instances it takes and ought to (or not). With --strict schemas are
left out that a strict server refuses: then no invalid instance may be taken.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from vllm_ext.demo import embedded_model
from vllm_ext.engine.structured_output.grammar import Grammar
from vllm_ext.samplers.strict_schema import first_problem

COLUMNS = ("schemas", "refused", "by strict", "valid", "valid, taken", "invalid", "invalid, taken")


def takes(grammar: Grammar, tokens: list[int], bitmask: Any) -> bool:
    """Whether a grammar takes an answer whole; leaves it as it was.

    Raises:
        AssertionError: a mask is not what the matcher says.
    """
    taken = 0
    for token in tokens:
        grammar.fill(bitmask, 0)
        allowed = bool(int(bitmask[0, token // 32]) >> (token % 32) & 1)
        accepted = grammar.accept(token)
        assert allowed == accepted, (
            f"token {token} behind {tokens[:taken]}: mask {allowed}, matcher {accepted}"
        )
        if not accepted:
            break
        taken += 1
    grammar.rollback(taken)
    return taken == len(tokens)


def main() -> None:
    """Read the arguments, compile, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--strict", action="store_true", help="leave out schemas that are enforced only in part"
    )
    arguments = parser.parse_args()

    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar

    config = EngineArgs(model=str(embedded_model.ensure_model()), max_model_len=2048).create_engine_config()
    tokenizer = cached_tokenizer_from_config(config.model_config)
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())
    bitmask = backend.allocate_token_bitmask(1)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    keywords: Counter[str] = Counter()
    prefixes, seconds = 0, []
    for line in arguments.schemas.read_text().splitlines():
        entry = json.loads(line)
        count = counts[entry["category"]]
        count["schemas"] += 1
        schema = json.dumps(entry["schema"])
        started = time.perf_counter()
        try:
            validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
            grammar = Grammar(backend.compile_grammar(StructuredOutputOptions.JSON, schema, {2}))
        except (VLLMValidationError, RuntimeError):
            count["refused"] += 1
            continue
        seconds.append(time.perf_counter() - started)
        if arguments.strict and (problem := first_problem(entry["schema"])) is not None:
            count["by strict"] += 1
            keywords[problem.keyword] += 1
            continue
        for test in entry["tests"]:
            name = "valid" if test["valid"] else "invalid"
            for separators in ((", ", ": "), (",", ":")):
                text = json.dumps(test["data"], separators=separators, ensure_ascii=False)
                tokens = [*tokenizer.encode(text, add_special_tokens=False), 2]
                prefixes += len(tokens)
                count[name] += 1
                count[f"{name}, taken"] += takes(grammar, tokens, bitmask)
    print(f"| category | {' | '.join(COLUMNS)} |")
    print(f"| --- |{' ---: |' * len(COLUMNS)}")
    rows = [*counts.items(), ("all", sum(counts.values(), Counter()))]
    for category, count in rows:
        print(f"| {category} | {' | '.join(str(count[column]) for column in COLUMNS)} |")
    seconds.sort()
    print(
        f"{prefixes} tokens, masks and matchers agree at each; compiling took {seconds[len(seconds) // 2]:.3f} s "
        f"in the median, {seconds[len(seconds) * 9 // 10]:.3f} at the ninth decile, {seconds[-1]:.3f} at most"
    )
    if arguments.strict:
        print("By strict:", ", ".join(f"{keyword} {count}" for keyword, count in keywords.most_common()))
        taken = sum(count["invalid, taken"] for count in counts.values())
        assert not taken, f"{taken} invalid instances are taken of schemas that are let through"
    found = {"categories": counts, "strict": keywords, "compile_seconds": seconds}
    arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
