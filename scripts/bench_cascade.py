# SPDX-License-Identifier: Apache-2.0
"""A draft model with a drafter of its own, and without: passes of the draft, tokens a step, time.

    .venv/bin/python scripts/bench_cascade.py DRAFT --prompts spec_bench.jsonl:20

The two take turns in one engine, prompt by prompt; the last prompt comes first, and is not counted. Passes and tokens
depend on no clock. In float32 greedy answers must be the same.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from bench_drafts import parser_of, settings_of, use

from vllm_ext.bench import side_by_side
from vllm_ext.bench.engine import Engine
from vllm_ext.bench.settings import Method

NODES = 20
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("specdec_pp", {"stop_threshold": 0.3}),
    ("specdec_pp", {"stop_threshold": 0.7}),
    ("static_tree", {"branching": [1] * 5}),
    ("static_tree", {"branching": [1] * 8}),
    ("dyspec", {}),
)
COUNTERS = ("spec_draft_passes", "spec_accepted_tokens", "spec_emitted_tokens", "spec_steps")


def read_ahead(worker: Any, guesses: int) -> None:
    """Of each request in each pass from now on. Each number has tables of its own: answers come once for each."""
    from vllm_ext.proposers.cascade import Cascade

    drafts = worker.model_runner.drafter.model_drafts
    if guesses not in worker.cascades:
        vocab_size = worker.model_runner.model_config.get_vocab_size()
        worker.cascades[guesses] = Cascade(vocab_size, guesses, 2 * NODES, drafts.passes._places_left)
    drafts.passes.cascade = worker.cascades[guesses]


def begin(worker: Any) -> None:
    """Another method, which answers the same prompts: nothing is known of the answers."""
    worker.cascades = {}


def counted(worker: Any) -> list[int]:
    """Since the start."""
    totals = worker.model_runner.drafter.counters()
    return [totals[name] for name in COUNTERS]


def main() -> None:
    """Read the arguments and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--guesses", default="6", help="that a pass reads ahead; several with commas")
    parser.add_argument("--methods", default="0,1,2,3,4", help="which of METHODS")
    parser.add_argument("--budget", default="fixed")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", help="float32 is faster on a CPU without AVX-512")
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    side_by_side.set_environment(verbose=False)
    prompts = side_by_side.encode_prompts(settings, [])
    common = {
        "model": arguments.draft,
        "budget": arguments.budget,
        "num_speculative_tokens": NODES,
        "cascade": "token_recycling",
    }
    turns = [0, *map(int, arguments.guesses.split(","))]
    engine = Engine(settings, Method("dyspec", common, "trees"), 1)
    engine.temperature = arguments.temperature
    print(
        "| method | read ahead | passes / accepted | tokens / step | seconds | passes spared | time ratio |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    try:
        for method, own in (METHODS[int(place)] for place in arguments.methods.split(",")):
            engine.call(use, method, {**common, **own})
            engine.call(begin)
            seconds = np.zeros((len(turns), len(prompts) - 1))
            counts = np.zeros((len(turns), len(COUNTERS)))
            texts: list[list[Any]] = [[] for _ in turns]
            for number, prompt in enumerate([prompts[-1], *prompts[:-1]]):
                for turn in range(len(turns)):
                    turn = (turn + number) % len(turns)
                    engine.call(read_ahead, turns[turn])
                    engine.begin_round()
                    before = np.array(engine.call(counted)[0])
                    started = time.perf_counter()
                    engine.answer([(0, prompt)])
                    taken = time.perf_counter() - started
                    answers = engine.rounds.pop().answers
                    if number:
                        seconds[turn, number - 1] = taken
                        counts[turn] += np.array(engine.call(counted)[0]) - before
                        texts[turn] += [answer.token_ids for answer in answers]
            name = method + "".join(f" {value}" for value in own.values())
            for turn, guesses in enumerate(turns):
                passes, accepted, emitted, steps = counts[turn]
                spared = counts[0, 0] / counts[0, 1] / (passes / accepted)
                ratio = np.median(seconds[0] / seconds[turn])
                same = sum(one == other for one, other in zip(texts[0], texts[turn], strict=True))
                print(
                    f"| {name} | {guesses} | {passes / accepted:.3f} | {emitted / steps:.3f} | "
                    f"{seconds[turn].sum():.1f} | {spared:.2f}x | {ratio:.3f}x | "
                    f"{same} of {len(prompts) - 1} answers the same",
                    flush=True,
                )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
