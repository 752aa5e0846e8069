# SPDX-License-Identifier: Apache-2.0
"""Tokens a step where each problem is sampled several times at once, without seeds; they depend on no clock.

    .venv/bin/python scripts/bench_samples.py --prompts gsm8k.jsonl:20 --samples 8 --temperature 0.7 \
        --json samples.json --methods stand token_recycling '{"method": "stand", "branches": "drawn"}'

An engine for each method, with ``budget="fixed"`` unless it says otherwise. All have the same problems one after the
other; what a method learns of one stays for those that follow, as on a server. The error is the standard error of the
mean over problems; sampled texts differ from method to method.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_PLUGINS", "vllm_ext")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np

from vllm_ext.demo import embedded_model

ASKED = ("samples", "temperature", "max_tokens", "dtype", "seed")  # options that the figures hold for


def questions(source: str) -> list[str]:
    """The first so many of a file, given as FILE:NUMBER."""
    name, _, count = source.rpartition(":")
    lines = Path(name).read_text().splitlines()[: int(count)]
    return [json.loads(line)["question"] for line in lines]


def measure(
    model: str, method: dict[str, Any], prompts: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """One method's figures."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        speculative_config={"budget": "fixed", **method},
        max_model_len=1024,
        max_num_seqs=options.samples,
        enforce_eager=True,
        disable_log_stats=False,
        dtype=options.dtype,
        distributed_executor_backend="mp",
        seed=options.seed,
    )
    params = SamplingParams(temperature=options.temperature, n=options.samples, max_tokens=options.max_tokens)
    names = ("spec_emitted_tokens", "spec_steps", "spec_draft_tokens")
    before, each = dict.fromkeys(names, 0), []
    for prompt in prompts:
        llm.chat([[{"role": "user", "content": prompt}]], params, use_tqdm=False)
        (totals,) = llm.collective_rpc("vllm_ext_counters")
        each.append([totals[name] - before[name] for name in names])
        before = totals
    llm.llm_engine.engine_core.shutdown(timeout=30)
    emitted, steps, drafts = np.array(each).T
    by_problem = emitted / steps
    return {
        "method": method,
        "asked": {**{name: getattr(options, name) for name in ASKED}, "prompts": Path(options.prompts).name},
        "tokens_a_step": float(emitted.sum() / steps.sum()),
        "standard_error": float(by_problem.std(ddof=1) / len(each) ** 0.5),
        "drafts_a_step": float(drafts.sum() / steps.sum()),
        "tokens": int(emitted.sum()),
        "by_problem": by_problem.round(3).tolist(),
    }


def keep(file: Path, figures: dict[str, Any]) -> None:
    """Add to the figures of a file."""
    kept = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*kept, figures], indent=1) + "\n")


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of the target; none: the demo's")
    parser.add_argument("--prompts", required=True, help="FILE:NUMBER, JSON lines with a question each")
    parser.add_argument(
        "--methods", nargs="+", required=True, help="names, or objects of --speculative-config"
    )
    parser.add_argument("--samples", type=int, default=8, help="answers of each problem, side by side")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the engine")
    parser.add_argument("--json", type=Path, help="a file to whose figures these are added")
    options = parser.parse_args()
    model = options.model or str(embedded_model.ensure_model())
    prompts = questions(options.prompts)
    for given in options.methods:
        method = json.loads(given) if given.startswith("{") else {"method": given}
        now = measure(model, method, prompts, options)
        print(
            f"{json.dumps(method)}: {now['tokens_a_step']:.3f} ± {now['standard_error']:.3f} tokens a step, "
            f"{now['drafts_a_step']:.1f} drafts",
            flush=True,
        )
        if options.json:
            keep(options.json, now)


if __name__ == "__main__":
    main()
