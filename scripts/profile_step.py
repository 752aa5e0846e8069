# SPDX-License-Identifier: Apache-2.0
"""What tree speculation costs a step, in a real engine.

Beside the forward pass, part by part; and in it: the forward pass of trees (our attention kernel) beside that of
chains (vLLM's), of equally many nodes, taking turns step by step, by tokens of context.

    .venv/bin/python scripts/profile_step.py --model MODEL [--nodes 16] [--batch-size 1] [--contexts 60,1900]
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a Python function that merges two sorted lists.",
    "Summarize the story of Robinson Crusoe in ten sentences.",
    "List the planets of the solar system with one fact each.",
)


def start_clocks(worker: Any) -> None:
    """Time every part of a step; calls inside calls are subtracted from the outer one by the caller."""
    runner = worker.model_runner
    times: dict[str, list[float]] = {}
    worker.times = times

    def clock(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                times.setdefault(label, []).append(time.perf_counter() - started)

        setattr(owner, name, timed)

    from vllm_ext.v1_trees import StepTrees

    inner = StepTrees.from_step

    def from_step(*args: Any) -> Any:
        started = time.perf_counter()
        trees = inner(*args)
        times.setdefault("rows", []).append(time.perf_counter() - started)
        return trees

    StepTrees.from_step = from_step  # type: ignore[assignment, method-assign]
    clock(runner, "execute_model", "forward")
    clock(runner, "_tree_metadata", "metadata")
    clock(runner.drafter, "tap", "tap")
    clock(runner.rejection_sampler, "forward", "walk")
    clock(runner, "_move_kv", "compaction")
    clock(runner.drafter, "step", "update and proposal")


def read_clocks(worker: Any) -> dict[str, list[float]]:
    """The seconds of each call by part, and start again."""
    times: dict[str, list[float]] = {label: list(values) for label, values in worker.times.items()}
    for values in worker.times.values():
        values.clear()
    return times


def alternate_shapes(worker: Any, nodes: int) -> None:
    """Draft a binary tree and a chain of ``nodes`` unlikely tokens in turn, and time the forward pass of each."""
    import numpy as np

    from vllm_ext.proposers.tree import DraftTree

    runner = worker.model_runner
    random = np.random.default_rng(0)
    index = np.arange(nodes, dtype=np.int32)
    shapes = (index + 1) // 2 - 1, index - 1
    falling = np.linspace(0.9, 0.1, nodes).astype(np.float32)
    turn = 0

    def propose(requests: Any) -> list[DraftTree]:
        nonlocal turn
        turn += 1
        runner.drafter.chain_reason = None if turn % 2 == 0 else "for vLLM's own kernel"
        vocab = runner.drafter.proposer.vocab_size
        drafts = random.choice(vocab, (len(requests), nodes), replace=False).astype(np.int32)
        return [DraftTree(tokens, shapes[turn % 2].astype(np.int32), falling) for tokens in drafts]

    runner.drafter.proposer.propose = propose
    runner.drafter.proposer.observe = lambda rows: None
    inner = runner.execute_model
    worker.times = {}

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = inner(*args, **kwargs)
        trees = runner.step_trees
        if trees is not None and int(trees.row_start[-1]) == len(trees.context) * (1 + nodes):
            name = "trees" if trees.branching else "chains"
            worker.times.setdefault(name, []).append(time.perf_counter() - started)
        return result

    runner.execute_model = timed


def compare_shapes(llm: Any, nodes: int, batch_size: int, contexts: list[int]) -> None:
    """The table of trees beside chains."""
    from vllm import SamplingParams

    llm.collective_rpc(alternate_shapes, args=(nodes,))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    print(f"forward pass, batch {batch_size}, {nodes} nodes a request, median milliseconds")
    for context in contexts:
        prompts = [{"prompt_token_ids": [1000 + i, *range(2000, 1999 + context)]} for i in range(batch_size)]
        llm.generate(prompts, params, use_tqdm=False)
        llm.collective_rpc(read_clocks)
        llm.generate(prompts, params, use_tqdm=False)
        (times,) = llm.collective_rpc(read_clocks)
        trees, chains = (1e3 * statistics.median(times[name]) for name in ("trees", "chains"))
        print(
            f"  context {context:5}: trees {trees:6.2f}, chains {chains:6.2f}, ratio {trees / chains:.3f} "
            f"({len(times['trees'])} and {len(times['chains'])} steps)"
        )


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--contexts", default="60,1900")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams

    method = {"method": "token_recycling", "num_speculative_tokens": arguments.nodes, "budget": "fixed"}
    llm = LLM(
        arguments.model,
        speculative_config=method,
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=arguments.batch_size,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    llm.chat(messages, params, use_tqdm=False)
    llm.collective_rpc(start_clocks)
    llm.chat(messages, params, use_tqdm=False)
    (times,) = llm.collective_rpc(read_clocks)
    steps = len(times["forward"])
    print(
        f"{steps} steps, batch {arguments.batch_size}, up to {arguments.nodes} nodes a request, milliseconds a step"
    )
    total = 0.0
    for label, values in times.items():
        mean = 1e3 * sum(values) / steps
        if label != "forward":
            total += mean
        print(
            f"  {label:20} mean {mean:6.3f}   median of its {len(values)} calls {1e3 * statistics.median(values):6.3f}"
        )
    print(f"  all but the forward  mean {total:6.3f}")
    contexts = [int(context) for context in arguments.contexts.split(",")]
    compare_shapes(llm, arguments.nodes, arguments.batch_size, contexts)


if __name__ == "__main__":
    main()
