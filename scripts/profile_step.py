# SPDX-License-Identifier: Apache-2.0
"""What tree speculation costs a step beside the forward pass, part by part, in a real engine, scheduler and worker.

.venv/bin/python scripts/profile_step.py --model MODEL [--method JSON] [--nodes 16] [--batch-size 1]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is in this process
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

    from vllm_ext.engine.tree_layout import StepTrees

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


def clock_scheduler(llm: Any) -> dict[str, list[float]]:
    """Time the scheduler's two calls of a step."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    times: dict[str, list[float]] = {}

    def clock(name: str) -> None:
        inner = getattr(scheduler, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            times.setdefault(f"scheduler: {name}", []).append(time.perf_counter() - started)
            return result

        setattr(scheduler, name, timed)

    clock("schedule")
    clock("update_from_output")
    return times


def read_clocks(worker: Any) -> dict[str, list[float]]:
    """The seconds of each call by part, and start again."""
    times: dict[str, list[float]] = {label: list(values) for label, values in worker.times.items()}
    for values in worker.times.values():
        values.clear()
    return times


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", type=json.loads, default={"method": "token_recycling", "budget": "fixed"})
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams

    method = arguments.method | {"num_speculative_tokens": arguments.nodes}
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
    of_scheduler = clock_scheduler(llm)
    llm.chat(messages, params, use_tqdm=False)
    (times,) = llm.collective_rpc(read_clocks)
    steps = len(times["forward"])
    print(
        f"{steps} steps, batch {arguments.batch_size}, up to {arguments.nodes} nodes a request, milliseconds a step"
    )
    total = 0.0
    for label, values in (times | of_scheduler).items():
        mean = 1e3 * sum(values) / steps
        if label != "forward":
            total += mean
        print(
            f"  {label:29} mean {mean:6.3f}   median of its {len(values)} calls {1e3 * statistics.median(values):6.3f}"
        )
    print(f"  all but the forward           mean {total:6.3f}")


if __name__ == "__main__":
    main()
