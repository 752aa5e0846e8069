# SPDX-License-Identifier: Apache-2.0
"""The goodput budget under load: plain, goodput and fixed budgets side by side at several batch sizes, in one run.

Two engines, plain and Token Recycling, take turns on the same prompts, as many as the batch has; the second one's
budget is switched between turns, and its memory is put back to what it was after a warm-up on other prompts, so that
no turn profits from an earlier one. Figures are medians over rounds of the ratio to the same round's plain. The best
fixed budget is chosen on one half of the rounds and compared on the other, and the other way round: the best of
several noisy figures is too good on the rounds that made it the best.

    .venv/bin/python scripts/bench_load.py --model MODEL --prompts FILE.jsonl --json OUT.json
    .venv/bin/vllm-ext report OUT.json --html OUT.html
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def save_memory(worker: Any) -> None:
    """Keep a copy of what the proposer knows."""
    worker.saved_proposer = copy.deepcopy(worker.model_runner.drafter.proposer)


def set_budget(worker: Any, fixed_nodes: int | None) -> None:
    """The goodput budget as it was, or so many nodes a request; and the proposer's memory as it was."""
    drafter = worker.model_runner.drafter
    if not hasattr(worker, "goodput_budget"):
        worker.goodput_budget = drafter.budget
        worker.ceiling = worker.goodput_budget.ceiling
    drafter.proposer = copy.deepcopy(worker.saved_proposer)
    drafter.budget = worker.goodput_budget if fixed_nodes is None else None
    drafter.num_nodes = worker.ceiling if fixed_nodes is None else fixed_nodes


def rounds_at(batch_size: int, rounds: int) -> int:
    """Small batches are short and noisy, so they get more rounds."""
    return max(rounds, -(-24 // batch_size))


def best_fixed(rates: dict[Any, list[float]], rounds: range) -> Any:
    """The kind other than goodput that was fastest beside plain in these rounds; "plain" is no drafts."""
    return max(
        (kind for kind in rates if kind is not None),
        key=lambda kind: statistics.median(rates[kind][i] / rates["plain"][i] for i in rounds),
    )


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns or prompt")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32")
    parser.add_argument("--fixed", default="1,2,4,8", help="fixed budgets to compare with")
    parser.add_argument("--rounds", type=int, default=6, help="at least; 24 at batch 1, 12 at 2, ...")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams

    lines = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    texts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    batch_sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    count = max(8, *batch_sizes)
    texts = [texts[i * len(texts) // (2 * count)] for i in range(2 * count)]
    warm_up, texts = texts[::2], texts[1::2]

    options: dict[str, Any] = {
        "dtype": arguments.dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(batch_sizes),
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    plain = LLM(arguments.model, **options)
    method = {"method": "token_recycling", "num_speculative_tokens": 16}
    trees = LLM(arguments.model, speculative_config=method, disable_log_stats=False, **options)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)

    def ask(llm: Any, prompts: list[str]) -> float:
        """Tokens per second from the requests to the last answer."""
        batch = [[{"role": "user", "content": text}] for text in prompts]
        started = time.perf_counter()
        llm.chat(batch, params, use_tqdm=False)
        return float(len(prompts) * arguments.max_tokens / (time.perf_counter() - started))

    for start in range(0, len(warm_up), 4):
        ask(trees, warm_up[start : start + 4])
    ask(plain, warm_up[:4])
    trees.collective_rpc(save_memory)
    kinds: list[Any] = ["plain", None, *(int(nodes) for nodes in arguments.fixed.split(","))]
    table = []
    for batch_size in batch_sizes:
        rates: dict[Any, list[float]] = {kind: [] for kind in kinds}
        nodes: dict[Any, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds_at(batch_size, arguments.rounds)):
            # All take turns on the same few prompts, in an order that rotates: the machine changes by the minute.
            first = number * batch_size % (len(texts) - batch_size + 1)
            turn = number % len(kinds)
            for kind in kinds[turn:] + kinds[:turn]:
                time.sleep(1.2)  # vLLM's CPU workers spin for a second after their last message
                if kind == "plain":
                    rates[kind].append(ask(plain, texts[first : first + batch_size]))
                    continue
                trees.collective_rpc(set_budget, args=(kind,))
                before = trees.collective_rpc("vllm_ext_counters")[0]
                rates[kind].append(ask(trees, texts[first : first + batch_size]))
                after = trees.collective_rpc("vllm_ext_counters")[0]
                new = {name: after[name] - before[name] for name in after}
                nodes[kind].append(new["spec_draft_tokens"] / new["spec_steps"])
        row: dict[str, Any] = {
            "batch_size": batch_size,
            "plain_tokens_per_s": statistics.median(rates["plain"]),
            "plain_tokens_per_s_rounds": rates["plain"],
        }
        for kind in kinds[1:]:
            ratios = [rate / base for rate, base in zip(rates[kind], rates["plain"], strict=True)]
            name = "goodput" if kind is None else f"fixed {kind}"
            row[name] = {
                "speedup": statistics.median(ratios),
                "rounds": ratios,
                "tokens_per_s": statistics.median(rates[kind]),
                "tokens_per_s_rounds": rates[kind],
                "nodes_per_step": statistics.median(nodes[kind]),
            }
        pairs, chosen = [], []
        everything = range(len(rates["plain"]))
        for half in (0, 1):
            chosen.append(best_fixed(rates, everything[1 - half :: 2]))
            pairs += [rates[None][i] / rates[chosen[-1]][i] for i in everything[half::2]]
        row["best_fixed"] = [f"fixed {kind}" if isinstance(kind, int) else "none" for kind in chosen]
        row["goodput_over_best_fixed"] = statistics.median(pairs)
        table.append(row)
        cells = ", ".join(
            f"{name} {value['speedup']:.2f}" for name, value in row.items() if isinstance(value, dict)
        )
        chosen_names = " / ".join(row["best_fixed"])
        print(
            f"batch {batch_size}: plain {row['plain_tokens_per_s']:.1f} tok/s; {cells}; goodput "
            f"{row['goodput']['nodes_per_step']:.1f} nodes a step, "
            f"{row['goodput_over_best_fixed']:.2f} of {chosen_names}",
            flush=True,
        )
    if arguments.json:
        machine = {"platform": platform.platform(), "cpus": os.cpu_count()}
        arguments.json.write_text(
            json.dumps(
                {
                    "options": vars(arguments)
                    | {"prompts": arguments.prompts.name, "json": None, "model": Path(arguments.model).name}
                    | {"command_line": sys.argv},
                    "machine": machine,
                    "rows": table,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
