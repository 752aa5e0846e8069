# SPDX-License-Identifier: Apache-2.0
"""Early exits of one model: what reuse saves, and `del` beside every exit and length it chooses from.

    .venv/bin/python scripts/bench_exits.py --prompts spec_bench.jsonl:1 --json exits.json \
        [--exits 4,8,15,20] [--lengths 1,2,4,6] [--heads FILE] [--identity 0.02] [--dtype float32]

First the time of passes, in turns: the whole model, what is below an exit and what is behind it, without the head,
and the head. Then tokens per step of fixed choices and of `del`, which depend on no clock, by category; and tokens for
each layer that was loaded, which is what `del` goes by where there is no budget: ``d E + L`` for a chain of ``d``
tokens by the exit after ``E`` of ``L`` layers, as the paper counts.

``--identity F`` scales what the layers behind the first eight add to the residual stream by F: a model whose later
layers change little, as one trained for early exit. A mechanical test; nobody serves it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function is sent to the worker
os.environ.setdefault("VLLM_PLUGINS", "vllm_ext")

from vllm_ext.bench import side_by_side
from vllm_ext.bench.engine import EncodedPrompt, Engine
from vllm_ext.bench.settings import Method, Settings
from vllm_ext.demo import embedded_model

UNCHANGED = 8  # layers, with --identity


def passes(worker: Any, exits: Sequence[int], rows: Sequence[int], turns: int) -> list[dict[str, float]]:
    """Median milliseconds, by exit and rows."""
    runner = worker.model_runner
    early = runner.drafter.model_drafts.early_exit
    hidden, _ = runner._dummy_run(max(rows))
    runs: dict[str, Callable[[int], Any]] = {
        "whole": runner._dummy_run,
        "below": early.draft_pass,
        "behind": early.rest_pass,
        "head": lambda count: runner.model.compute_logits(hidden[:count]),
    }
    figures = []
    for choice, exit_layer in enumerate(exits):
        early.choice = choice
        for count in rows:
            spent: dict[str, list[float]] = defaultdict(list)
            for _ in range(turns):
                for name, run in runs.items():
                    started = time.perf_counter()
                    run(count)
                    spent[name].append(1e3 * (time.perf_counter() - started))
            medians = {name: sorted(values)[len(values) // 2] for name, values in spent.items()}
            figures.append({"exit": exit_layer, "rows": count, **medians})
    early.choice = 0
    return figures


def fix(worker: Any, choice: int, length: int) -> None:
    """One exit and length for all steps; a negative choice gives it back to the method."""
    drafts = worker.model_runner.drafter.model_drafts
    drafts.__dict__.pop("plan", None)
    if choice >= 0:
        own = drafts.plan

        def plan(request_ids: Any, context_tokens: int, most: int) -> int:
            own(request_ids, context_tokens, most)
            drafts.early_exit.choice = choice
            drafts.proposer.least_worth = 0.0
            return min(length, most)

        drafts.plan = plan


def layers_loaded(worker: Any) -> int:
    """By the drafts since the last call: passes below an exit times its layers, and all layers of each step."""
    drafts = worker.model_runner.drafter.model_drafts
    if "vllm_ext_loaded" not in worker.__dict__:
        worker.vllm_ext_loaded = 0
        exits, propose = drafts.early_exit, drafts.propose

        def counted(*args: Any) -> Any:
            trees = propose(*args)
            deepest = max((len(tree) for tree in trees), default=0)
            worker.vllm_ext_loaded += deepest * exits.exits[exits.choice]
            worker.vllm_ext_loaded += len(worker.model_runner.model.model.layers)
            return trees

        drafts.propose = counted
    loaded: int = worker.vllm_ext_loaded
    worker.vllm_ext_loaded = 0
    return loaded


def answer(engine: Engine, prompts: Sequence[EncodedPrompt]) -> dict[str, dict[str, float]]:
    """Tokens per step and per layer loaded, by category and of all."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for index, prompt in enumerate(prompts):
        engine.begin_round()
        engine.call(layers_loaded)
        engine.answer([(index, prompt)])
        (loaded,) = engine.call(layers_loaded)
        for given in engine.rounds.pop().answers:
            for name in (prompt.category, "all"):
                for place, value in enumerate((given.decode_tokens, given.decode_steps, loaded)):
                    totals[name][place] += value
    return {
        name: {"tokens_per_step": tokens / steps, "tokens_per_layer": tokens / loaded}
        for name, (tokens, steps, loaded) in totals.items()
    }


def near_identity(model: Path, factor: float, folder: Path) -> Path:
    """The model with layers behind the first few that change little."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) >= UNCHANGED and parts[4] in ("o_proj", "down_proj"):
            weights[name] = weights[name] * factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    """Read the arguments and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of the model; none: the demo's")
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--exits", default="4,8,15,20")
    parser.add_argument("--lengths", default="1,2,4,6")
    parser.add_argument("--heads")
    parser.add_argument("--identity", type=float)
    parser.add_argument("--keep", type=Path, help="folder for the model of --identity; none: it is deleted")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=31, help="of each pass that is timed")
    parser.add_argument("--dtype", default="bfloat16", help="float32 is faster on a CPU without AVX-512")
    arguments = parser.parse_args()
    exits, lengths = ([int(n) for n in given.split(",")] for given in (arguments.exits, arguments.lengths))
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(embedded_model.ensure_model())
        if arguments.identity is not None:
            model = near_identity(model, arguments.identity, arguments.keep or Path(folder))
        settings = Settings(
            model=str(model),
            prompt_files=tuple(arguments.prompts),
            methods=(),
            max_tokens=arguments.max_tokens,
            dtype=arguments.dtype,
            kv_cache_memory_bytes=1 << 28,
        )
        side_by_side.set_environment(verbose=False)
        prompts = side_by_side.encode_prompts(settings, [])
        options = {"budget": "fixed", "exits": exits, "num_speculative_tokens": max(lengths)}
        if arguments.heads:
            options["heads"] = arguments.heads
        engine = Engine(settings, Method("del", options, "del"), 1)
        try:
            engine.warm_up()
            (timed,) = engine.call(passes, exits, [1, 1 + max(lengths)], arguments.turns)
            print(
                "| exit after | rows | whole, ms | below | behind | behind / whole | below / whole | head, ms |"
            )
            print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
            for row in timed:
                ratios = [f"{row[name] / row['whole']:.3f}" for name in ("behind", "below")]
                times = [f"{row[name]:.2f}" for name in ("whole", "below", "behind")]
                print(f"| {row['exit']} | {row['rows']} | {' | '.join(times + ratios)} | {row['head']:.2f} |")
            choices = [(choice, length) for choice in range(len(exits)) for length in lengths]
            found: list[tuple[str, dict[str, dict[str, float]]]] = []
            for choice, length in [*choices, (-1, 0)]:
                engine.call(fix, choice, length)
                name = "del" if choice < 0 else f"exit {exits[choice]}, {length} tokens"
                found.append((name, answer(engine, prompts)))
                figures = found[-1][1]["all"]
                print(
                    f"{name}: {figures['tokens_per_step']:.3f} tokens/step, {figures['tokens_per_layer']:.5f}/layer",
                    flush=True,
                )
        finally:
            engine.shutdown()
    print("| category | best fixed choice | tokens/layer | `del` | beside it |")
    print("| --- | --- | ---: | ---: | ---: |")
    for category, own in found[-1][1].items():
        name, best = max(
            ((name, figures[category]["tokens_per_layer"]) for name, figures in found[:-1]),
            key=lambda choice: choice[1],
        )
        ours = own["tokens_per_layer"]
        print(f"| {category} | {name} | {best:.5f} | {ours:.5f} | {ours / best:.3f} |")
    choices_found = [{"choice": name, "categories": figures} for name, figures in found]
    arguments.json.write_text(
        json.dumps(
            {"arguments": vars(arguments), "passes": timed, "choices": choices_found}, default=str, indent=1
        )
    )


if __name__ == "__main__":
    main()
