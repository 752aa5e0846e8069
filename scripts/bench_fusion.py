# SPDX-License-Identifier: Apache-2.0
"""A draft model, retrieval, and both fused as `rasd` and as `hybrid` fuse them: tokens a step and the draft's passes.

    .venv/bin/python scripts/bench_fusion.py DRAFT --prompts spec_bench.jsonl:12 --prompts human_eval.jsonl:20 \
        --categories summarization,rag,human_eval [--datastore STORE --of human_eval] --json fusion.json

Neither depends on a clock: the budget is fixed, trees take turns in one engine, and another program may run beside it.
Answers are greedy; how many are the first method's to the letter is in the JSON. All parts begin cold, and learn from
one prompt of a category to the next. A pass of the draft is
one for each request and depth, the one that reads what was committed among them. Of prompts that ``--of`` names what is
retrieved comes from the datastore too. In brackets: 95 % of resamplings of the prompts.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_drafts import parser_of, resampled, settings_of

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
os.environ.setdefault("VLLM_PLUGINS", "vllm_ext")

from vllm_ext.bench import side_by_side
from vllm_ext.bench.engine import Engine
from vllm_ext.bench.settings import Method
from vllm_ext.bench.stats import Answer, Round


def use(worker: Any, method: str, given: dict[str, Any]) -> None:
    """Another fusion instead of the worker's, over the draft model that is loaded.

    Args:
        worker: vLLM's.
        method: "draft", "retrieval", "hybrid" or "rasd".
        given: options of `rasd`.
    """
    from vllm_ext.proposers.draft_model import DraftModelProposer
    from vllm_ext.proposers.hybrid import Hybrid
    from vllm_ext.proposers.rasd import Rasd, RasdOptions

    drafter = worker.model_runner.drafter
    if not hasattr(worker, "fused"):
        worker.fused = drafter.fused
    made: Hybrid = Rasd.from_options(RasdOptions(**given), worker.model_runner.model_config.get_vocab_size())
    draft, *retrieval = made.drafters
    assert isinstance(draft, DraftModelProposer)
    if method == "draft":
        made = Rasd([draft])  # without retrieval it is the draft's tree: tests/proposers/test_rasd.py
    elif method != "rasd":
        made = Hybrid([draft, *retrieval] if method == "hybrid" else retrieval)
    made.warm_up()
    drafter.fused = None if method == "retrieval" else worker.fused
    drafter.proposer, worker.draft, worker.passes = made, draft, 0
    propose = made.propose

    def counted(requests: Any) -> Any:
        draft.reached = {}
        trees = propose(requests)
        worker.passes += sum(1 + len(rounds) for rounds in draft.reached.values())
        return trees

    made.propose = counted  # type: ignore[method-assign]


def take_passes(worker: Any) -> int:
    """Of the draft since `use`."""
    passes: int = worker.passes
    return passes


def figures(answers: Sequence[Answer], drafts: int, passes: int) -> dict[str, float]:
    """Of one method's answers; each prompt's stay together when prompts are resampled."""
    counts = np.array([(each.decode_tokens, each.decode_steps) for each in answers if each.decode_steps])
    low, high = resampled(counts)
    tokens, steps = counts.sum(axis=0).tolist()
    return {
        "tokens_per_step": tokens / steps,
        "low": low,
        "high": high,
        "drafts_per_step": drafts / steps,
        "passes_per_step": passes / steps,
        "steps": steps,
        "prompts": len(counts),
    }


def rows_of(methods: str, first_k: str) -> Iterator[tuple[str, dict[str, int | None]]]:
    """Methods, and what they prune by."""
    for method in methods.split(","):
        if method != "rasd":
            yield method, {}
            continue
        for given in first_k.split(","):
            yield method, {"first_k": None if given == "none" else int(given)}


def main() -> None:
    """Read the arguments and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--categories", required=True, help="of the prompts, one table row after the other")
    parser.add_argument("--datastore", help="a store for the categories of --of")
    parser.add_argument("--of", default="", help="categories")
    parser.add_argument("--methods", default="draft,retrieval,rasd,hybrid")
    parser.add_argument("--first-k", default="32,10,none", help="of rasd, a row each")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    side_by_side.set_environment(verbose=False)
    prompts = side_by_side.encode_prompts(settings, [])
    common = {
        "model": arguments.draft,
        "num_speculative_tokens": arguments.nodes,
        "budget": "fixed",
    }
    rows: list[dict[str, Any]] = []
    first: dict[str, list[tuple[int, list[int]]]] = {}  # by category, the first method's answers
    engine = Engine(settings, Method("rasd", common, "trees"), arguments.batch_size)
    print("| prompts | method | tokens/step (95 %) | drafts/step | passes/step |")
    print("| --- | --- | ---: | ---: | ---: |")
    try:
        for category in arguments.categories.split(","):
            asked = [prompt for prompt in prompts if prompt.category == category]
            store = {"datastore": arguments.datastore} if category in arguments.of.split(",") else {}
            for method, pruning in rows_of(arguments.methods, arguments.first_k):
                engine.call(use, method, {**common, **store, **pruning})
                engine.rounds.append(Round([], 0.0, 0, None))  # prompts that were read stay so
                engine.answer(list(enumerate(asked)))
                done = engine.rounds.pop()
                (passes,) = engine.call(take_passes)
                found = figures(done.answers, done.num_draft_tokens, passes)
                method += "".join(f", {name}={value}" for name, value in pruning.items())
                rows.append({"category": category, "method": method, **found})
                texts = sorted((answer.prompt, answer.token_ids) for answer in done.answers)
                first.setdefault(category, texts)
                rows[-1]["same_answers"] = sum(map(operator.eq, texts, first[category]))
                print(
                    f"| {category} | {method} | {found['tokens_per_step']:.3f} ({found['low']:.2f} to "
                    f"{found['high']:.2f}) | {found['drafts_per_step']:.1f} | {found['passes_per_step']:.2f} |",
                    flush=True,
                )
                arguments.json.write_text(
                    json.dumps({"arguments": vars(arguments), "rows": rows}, default=str, indent=1)
                )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
