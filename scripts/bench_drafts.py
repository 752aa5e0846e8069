# SPDX-License-Identifier: Apache-2.0
"""Trees of one draft model with the same number of nodes: dynamic, static, drawn, and vLLM's own chain.

    .venv/bin/python scripts/bench_drafts.py DRAFT --prompts spec_bench.jsonl:4 --prompts human_eval.jsonl:8 \
        --json drafts.json [--nodes 8,16,32] [--temperatures 0,1] [--only 'dyspec|rsd']

Tokens per step depend on no clock, so the trees take turns in one engine, which holds the draft model once, and
another program may run beside it. vLLM's `draft_model` has an engine for each length, which is the number of nodes.
Greedy answers are the same for all; others are drawn, ``--samples`` for each prompt. Behind the figures: 95 % of
resamplings of the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function is sent to the worker
os.environ.setdefault("VLLM_PLUGINS", "vllm_ext")

from vllm_ext.bench import side_by_side
from vllm_ext.bench.engine import EncodedPrompt, Engine
from vllm_ext.bench.settings import Method, Settings
from vllm_ext.bench.stats import Answer
from vllm_ext.demo import embedded_model

# By nodes: the shapes of `static_tree`, as many nodes as there may be, and of `rsd_c`, the first three and the chain;
# the drafts of `spectr`; the widths of `rsd_s`.
SHAPES: dict[int, list[list[int]]] = {
    8: [[2, 1, 1, 1], [3, 1, 1], [4, 1], [1] * 8],
    16: [[4, 1, 1, 1], [3, 2, 1], [2, 2, 1, 1], [8, 1], [1] * 8],
    32: [[8, 1, 1, 1], [4, 2, 1, 1], [3, 2, 1, 1, 1], [5, 2, 1], [1] * 8],
}
DRAFTS = {8: [2, 4], 16: [2, 4], 32: [4, 8]}
WIDTHS = {8: [2, 3], 16: [3, 4], 32: [4, 6]}
RESAMPLINGS = 2000


@dataclass(frozen=True)
class Row:
    """One method's figures."""

    nodes: int
    temperature: float
    method: str
    tokens_per_step: float
    low: float  # of 95 % of the resamplings
    high: float
    drafts_per_step: float
    steps: int


def trees_of(nodes: int, temperature: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Methods and their own options."""
    yield "dyspec", {}
    if temperature == 0.0:
        for shape in SHAPES[nodes]:
            yield "static_tree", {"branching": shape}
        return
    for shape in (*SHAPES[nodes][:3], SHAPES[nodes][-1]):
        yield "rsd_c", {"branching": shape}
    for drafts in DRAFTS[nodes]:
        yield "spectr", {"drafts": drafts}
    for width in WIDTHS[nodes]:
        yield "rsd_s", {"width": width}


def use(worker: Any, method: str, options: dict[str, Any]) -> None:
    """Another method instead of the worker's, over the draft model that is loaded."""
    from vllm_ext.proposers import registry
    from vllm_ext.proposers.draft_model import DraftModelProposer

    drafter, vocab_size = worker.model_runner.drafter, worker.model_runner.model_config.get_vocab_size()
    proposer_class = registry.load_method(method)
    proposer = proposer_class.from_options(proposer_class.Options.model_validate(options), vocab_size)
    assert isinstance(proposer, DraftModelProposer)
    drafts = drafter.model_drafts
    proposer.draft = drafts.passes
    drafter.proposer = drafts.proposer = proposer
    drafter.num_nodes = options["num_speculative_tokens"]


def resampled(counts: Any) -> tuple[float, float]:
    """Between what tokens a step are in 95 % of resamplings of the prompts.

    Args:
        counts: ``[num_prompts, 2]``, tokens and steps of each.
    """
    chosen = np.random.default_rng(0).integers(len(counts), size=(RESAMPLINGS, len(counts)))
    sums = counts[chosen].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975]).tolist()
    return low, high


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Of a script that asks about one draft model."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", help="folder or hub name of the draft model, or 'self'")
    parser.add_argument("--model", help="the target; none: the demo's")
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    return parser


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the engine is made with."""
    return Settings(
        model=arguments.model or str(embedded_model.ensure_model()),
        prompt_files=tuple(arguments.prompts),
        methods=(),
        max_tokens=arguments.max_tokens,
        dtype=arguments.dtype,
        kv_cache_memory_bytes=1 << 29,
    )


def row(nodes: int, temperature: float, method: str, answers: Sequence[Answer], drafts: int) -> Row:
    """The figures of some answers; each prompt's stay together when prompts are resampled."""
    counts = np.zeros((1 + max(answer.prompt for answer in answers), 2))
    for answer in answers:
        counts[answer.prompt] += answer.decode_tokens, answer.decode_steps
    counts = counts[counts[:, 1] > 0]
    low, high = resampled(counts)
    tokens, steps = counts.sum(axis=0).tolist()
    return Row(nodes, temperature, method, tokens / steps, low, high, drafts / steps, int(steps))


def measure(
    engine: Engine, prompts: Sequence[EncodedPrompt], nodes: int, temperature: float, name: str, samples: int
) -> Row:
    """Answer all prompts, more than once if answers are drawn."""
    engine.temperature = temperature
    answers, drafts = [], 0
    for _ in range(1 if temperature == 0.0 else samples):
        engine.begin_round()
        engine.answer(list(enumerate(prompts)))
        finished = engine.rounds.pop()
        answers += finished.answers
        drafts += finished.num_draft_tokens
    result = row(nodes, temperature, name, answers, drafts)
    print(
        f"| {nodes} | {temperature:g} | {name} | {result.tokens_per_step:.3f} "
        f"({result.low:.2f} to {result.high:.2f}) | {result.drafts_per_step:.1f} |",
        flush=True,
    )
    return result


def main() -> None:
    """Read the arguments and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--nodes", default="8,16,32")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--only", default="", help="a regular expression: trees of such names, and no chain")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16", help="float32 is faster on a CPU without AVX-512")
    arguments = parser.parse_args()
    all_nodes = [int(nodes) for nodes in arguments.nodes.split(",")]
    temperatures = [float(temperature) for temperature in arguments.temperatures.split(",")]
    if unknown := sorted(set(all_nodes) - set(SHAPES)):
        parser.error(
            f"--nodes={arguments.nodes}: no shapes for {unknown}; {', '.join(map(str, SHAPES))} have some"
        )
    settings = settings_of(arguments)
    side_by_side.set_environment(verbose=False)
    prompts = side_by_side.encode_prompts(settings, [])
    rows: list[Row] = []
    common = {"model": arguments.draft, "budget": "fixed"}
    print("| nodes | temperature | method | tokens/step (95 %) | drafts/step |")
    print("| ---: | ---: | --- | ---: | ---: |")

    def save() -> None:
        figures = [asdict(row) for row in rows]
        arguments.json.write_text(
            json.dumps({"arguments": vars(arguments), "rows": figures}, default=str, indent=1)
        )

    engine = Engine(
        settings,
        Method("dyspec", {**common, "num_speculative_tokens": max(all_nodes)}, "trees"),
        arguments.batch_size,
    )
    try:
        for nodes in all_nodes:
            for temperature in temperatures:
                for method, own in trees_of(nodes, temperature):
                    name = method + "".join(f" {value}" for value in own.values())
                    if not re.search(arguments.only, name):
                        continue
                    options = {**common, "num_speculative_tokens": nodes, **own}
                    engine.call(use, method, options)
                    rows.append(measure(engine, prompts, nodes, temperature, name, arguments.samples))
                    save()
    finally:
        engine.shutdown()
    if arguments.draft == "self" or arguments.only:
        return  # vLLM cannot draft with some of the target's layers
    for nodes in all_nodes:
        chain = Method("draft_model", {"model": arguments.draft, "num_speculative_tokens": nodes}, "chain")
        engine = Engine(settings, chain, arguments.batch_size)
        try:
            for temperature in temperatures:
                rows.append(
                    measure(engine, prompts, nodes, temperature, "draft_model (vLLM)", arguments.samples)
                )
                save()
        finally:
            engine.shutdown()


if __name__ == "__main__":
    main()
