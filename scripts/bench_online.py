#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Live distillation by the clock of its prompts: a stream of one kind of questions, then of another, to one engine.

    python scripts/bench_online.py MODEL DRAFT DATA --mode off --json FILE
    python scripts/bench_online.py MODEL DRAFT DATA --mode on --json FILE

DATA has gsm8k.jsonl and human_eval.jsonl. Answers are greedy, some at once, and come in windows; between windows the
engine rests until the trainer has learnt from what it was given, as long as the pause says at most. A call adds one run
to the file: tokens a step and the share of accepted drafts, by window. Runs are to take turns, off and on.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.5
PARTS = (("gsm8k", "question"), ("human_eval", "prompt"))
COUNTED = ("spec_emitted_tokens", "spec_steps", "spec_draft_tokens", "spec_accepted_tokens")


def stream(data: Path, counts: list[int]) -> list[tuple[str, str]]:
    """Kinds and prompts, in their order."""
    found = []
    for (name, field), count in zip(PARTS, counts, strict=True):
        lines = (data / f"{name}.jsonl").read_text().splitlines()
        if count > len(lines):
            raise SystemExit(f"--prompts: {name} has {len(lines)}, and not {count}")
        found += [(name, json.loads(line)[field]) for line in lines[:count]]
    return found


def version_of(worker: Any) -> tuple[int, float]:
    """That the draft of a worker has, and the seconds that steps have waited for all versions so far."""
    learning = worker.model_runner.drafter.passes.online
    return (0, 0.0) if learning is None else (learning.version, learning.copy_seconds)


def trainer_of(worker: Any) -> int:
    """The trainer's process."""
    return int(worker.model_runner.drafter.passes.online._trainer.pid)


def as_everybody(process: int) -> None:
    """Give a process the usual priority: on a machine that others use it gets nothing else."""
    for task in Path(f"/proc/{process}/task").iterdir():
        os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, int(task.name), 0)


def rest(log: Path, windows: int, pause: float) -> float:
    """Wait until the trainer has learnt from so many windows, and what came of it is taken over; seconds.

    The last requests of a window are known to have ended in the first step of the next one.
    """
    began = time.monotonic()
    while time.monotonic() - began < pause:
        reported = log.read_text().count('"wrong"')
        if reported >= windows:
            break
        time.sleep(0.25)
    time.sleep(2 * LOOK_SECONDS)  # the worker looks for versions so often
    return time.monotonic() - began


def run(given: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """One run, saved after each window."""
    from vllm import LLM, SamplingParams

    method: dict[str, Any] = {
        "method": "dyspec",
        "model": given.draft,
        "num_speculative_tokens": given.nodes,
        "max_depth": given.depth,
        "budget": "fixed",
    }
    folder = Path(tempfile.mkdtemp(prefix="bench-online-"))
    own = folder / "0"
    if given.mode == "on":
        method["online"] = {"dir": str(folder), "update_interval": given.at_once, **json.loads(given.online)}
    elif given.keep is not None:
        method["export_dir"] = str(given.keep)
    llm = LLM(
        given.model,
        speculative_config=method,
        max_num_seqs=given.at_once,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens)
    prompts = stream(given.data, given.prompts)
    windows: list[dict[str, Any]] = []
    before = dict.fromkeys(COUNTED, 0)
    if given.mode == "on":
        while '"ready"' not in (own / "trainer.log").read_text():
            time.sleep(0.5)
        if given.usual_priority:
            as_everybody(llm.collective_rpc(trainer_of)[0])
    asked_at = time.monotonic()
    for start in range(0, len(prompts), given.at_once):
        part = prompts[start : start + given.at_once]
        began = time.monotonic()
        llm.chat([[{"role": "user", "content": text}] for _, text in part], params, use_tqdm=False)
        seconds = time.monotonic() - began
        paused = rest(own / "trainer.log", len(windows), given.pause) if given.mode == "on" else 0.0
        (totals,) = llm.collective_rpc("vllm_ext_counters")
        ((version, copying),) = llm.collective_rpc(version_of)
        windows.append(
            {
                "kind": part[0][0],
                "prompts": len(part),
                "seconds": round(seconds, 2),
                "paused": round(paused, 2),
                "version": version,
                "copying": round(copying, 4),
                **{name: totals[name] - before[name] for name in COUNTED},
            }
        )
        print(json.dumps(windows[-1]), flush=True)
        before = totals
        found = {
            "mode": given.mode,
            "method": {key: value for key, value in method.items() if key not in ("model", "export_dir")},
            "max_tokens": given.max_tokens,
            "usual_priority": given.usual_priority,
            "seconds": round(time.monotonic() - asked_at, 1),
            "windows": windows,
        }
        if given.mode == "on":
            found["method"]["online"] = {k: v for k, v in method["online"].items() if k != "dir"}
            lines = (own / "trainer.log").read_text().splitlines()
            found["trainer"] = [json.loads(line) for line in lines if line.startswith("{")]
        save(found)
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("data", type=Path)
    parser.add_argument("--mode", choices=("off", "on"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="file that a run is added to")
    parser.add_argument("--prompts", type=int, nargs=2, default=[64, 80], help="of gsm8k and of human_eval")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=8, help="prompts of a window")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument(
        "--pause", type=float, default=30.0, help="most seconds between windows, with --mode on"
    )
    parser.add_argument("--usual-priority", action="store_true", help="of the trainer, instead of the lowest")
    parser.add_argument("--online", default="{}", help="options of online, as JSON")
    parser.add_argument("--keep", type=Path, help="with --mode off: folder for export_dir")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    runs = json.loads(given.json.read_text()) if given.json.exists() else []

    def save(found: dict[str, Any]) -> None:
        given.json.write_text(json.dumps([*runs, found], indent=1))

    run(given, save)


if __name__ == "__main__":
    main()
