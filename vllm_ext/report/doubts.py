# SPDX-License-Identifier: Apache-2.0
"""Which figures of a bench of engines are not to be believed, and why."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from vllm_ext.bench.settings import PLAIN
from vllm_ext.report.saved_runs import Run

# A step of a method takes at least about what plain's takes, so it is faster by its tokens a step at most. A little
# more comes from kernels that are faster than vLLM's, 1.17 on a core of an AMD Zen 4; much more comes from the machine.
MOST_ABOVE_TOKENS = 1.20
MOST_BETWEEN_ROUNDS = 1.20
WAY_OUT = "ask again where nothing else runs, with more --rounds"


def is_doubtful(run: Run) -> bool:
    """Whether a speed-up is more than the tokens a step can explain, in the round in the middle."""
    rounds = [
        speedup / tokens
        for speedup, tokens in zip(run.speedup_vs_plain_rounds, run.tokens_per_step_rounds, strict=False)
        if speedup is not None and tokens
    ]
    if not rounds and run.speedup_vs_plain is not None and run.tokens_per_step:
        rounds = [run.speedup_vs_plain / run.tokens_per_step]
    return bool(rounds) and median(rounds) > MOST_ABOVE_TOKENS


def doubts(runs: Sequence[Run]) -> list[str]:
    """A line for each: what does not fit, and the way out."""
    found = []
    for run in runs:
        where = f"batch size {run.batch_size}, {run.label}"
        rounds = [value for value in run.tokens_per_s_rounds if value]
        if run.label == PLAIN and rounds and max(rounds) > MOST_BETWEEN_ROUNDS * min(rounds):
            found.append(
                f"{where}: its rounds differ by {max(rounds) / min(rounds) - 1:.0%} ({min(rounds):.1f} to "
                f"{max(rounds):.1f} tokens/s), and every speed-up is measured against it; {WAY_OUT}"
            )
        if run.label != PLAIN and is_doubtful(run):
            found.append(
                f"{where}: {run.speedup_vs_plain:.2f}x at {run.tokens_per_step:.2f} tokens a step is more than drafts "
                f"can do, so plain or the machine was slow meanwhile; {WAY_OUT}"
            )
    return found
