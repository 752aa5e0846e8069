# SPDX-License-Identifier: Apache-2.0
"""Chains of one draft model that stop, of fixed length, and its dynamic tree: tokens a step, and passes for each token.

    .venv/bin/python scripts/bench_chains.py DRAFT --prompts gsm8k.jsonl:6 --prompts human_eval.jsonl:6

Neither depends on a clock: the methods take turns in one engine, and another program may run beside it. A chain of
fixed length is what vLLM's `draft_model` drafts. The first turn of `specdec_pp` teaches its predictor, and is not
counted.
"""

from __future__ import annotations

from typing import Any

from bench_drafts import measure, parser_of, settings_of, use

from vllm_ext.bench import side_by_side
from vllm_ext.bench.engine import Engine
from vllm_ext.bench.settings import Method

NODES = 20
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("static_tree", {"branching": [1] * 3}),
    ("static_tree", {"branching": [1] * 5}),
    ("static_tree", {"branching": [1] * 8}),
    ("dyspec", {}),
    ("specdec_pp", {"stop_threshold": 0.3}),
    ("specdec_pp", {"stop_threshold": 0.5}),
    ("specdec_pp", {"stop_threshold": 0.7}),
)


def count_passes(worker: Any) -> None:
    """Of the draft from now on; `passes_of` says how many."""
    passes = worker.model_runner.drafter.model_drafts.passes
    worker.counted = 0
    if hasattr(passes, "_uncounted"):
        return
    passes._uncounted = passes.roots, passes.nodes

    def counting(asked: Any) -> Any:
        def call(*args: Any) -> Any:
            worker.counted += 1
            return asked(*args)

        return call

    passes.roots, passes.nodes = map(counting, passes._uncounted)


def passes_of(worker: Any) -> int:
    """See above."""
    counted: int = worker.counted
    return counted


def main() -> None:
    """Read the arguments and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", help="float32 is faster on a CPU without AVX-512")
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    side_by_side.set_environment(verbose=False)
    prompts = side_by_side.encode_prompts(settings, [])
    common = {"model": arguments.draft, "budget": "fixed", "num_speculative_tokens": NODES}
    engine = Engine(settings, Method("dyspec", common, "trees"), 1)
    try:
        for temperature in map(float, arguments.temperatures.split(",")):
            for method, own in METHODS:
                engine.call(use, method, {**common, **own})
                name = method + "".join(f" {value}" for value in own.values())
                if method == "specdec_pp":
                    measure(engine, prompts, NODES, temperature, f"(learning) {name}", 1)
                engine.call(count_passes)
                found = measure(engine, prompts, NODES, temperature, name, 1)
                tokens = found.tokens_per_step * found.steps
                print(f"    passes for each token: {engine.call(passes_of)[0] / tokens:.3f}", flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
