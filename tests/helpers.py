# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests: prompts, and the comparison that decides whether a method is lossless."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.bench.stats import first_difference
from vllm_ext.samplers.base import Asked

# Of a request that asks for nothing else, to sampling rules.
ASKED = Asked(temperature=0.7)
MAX_MODEL_LEN = 1024  # of the shared engines: room for the longest prompt tested, and no more
OWN_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
SHARED_DATA = Path(os.environ.get("VLLM_EXT_DATA", Path(__file__).parents[2] / "shared" / "data"))


def own_prompts() -> list[str]:
    """The repository's own prompts."""
    return [json.loads(line)["prompt"] for line in OWN_PROMPTS.read_text().splitlines()]


def shared_prompts(count: int) -> list[str]:
    """``count`` prompts spread evenly over the shared prompt files; skips the test where they are not."""
    prompts = []
    for name, field in (("spec_bench", "turns"), ("human_eval", "prompt"), ("gsm8k", "question")):
        file = SHARED_DATA / f"{name}.jsonl"
        if not file.exists():
            pytest.skip(f"{file} is not there; set VLLM_EXT_DATA to a folder with {file.name}")
        values = [json.loads(line)[field] for line in file.read_text().splitlines()]
        prompts += [value[0] if isinstance(value, list) else value for value in values]
    return [prompts[i * len(prompts) // count] for i in range(count)]


def assert_same_outputs(expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]]) -> None:
    """Token ids equal, request by request; the message says where the first difference is."""
    assert len(expected) == len(actual)
    for number, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if list(a) != list(b):
            position = next(
                (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
                min(len(a), len(b)),
            )
            raise AssertionError(
                f"request {number} differs at token {position}: expected {list(a[position : position + 5])}, "
                f"got {list(b[position : position + 5])}; lengths {len(a)} and {len(b)}"
            )


def assert_same_logprobs(expected: Any, actual: Any) -> None:
    """Of vLLM's ``logprobs`` or ``prompt_logprobs``, None or by place: the same values to 1e-3, the own token's first.

    Of two candidates that are all but equal either may be listed, and before the other.
    """
    assert (expected is None) == (actual is None)
    for left, right in zip(expected or [], actual or [], strict=True):
        if left is None or right is None:
            assert left is right
            continue
        token = next(iter(left))
        assert token == next(iter(right))
        assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-3)
        assert left[token].rank == pytest.approx(right[token].rank, rel=1e-2, abs=1)
        values = [sorted((entry.logprob for entry in side.values()), reverse=True) for side in (left, right)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


def first_gaps(expected: list[Any], actual: list[Any]) -> list[float]:
    """How much less likely plain has the other token, where an answer first parts from plain's; of those that do.

    Args:
        expected: completions with log-probabilities.
        actual: completions.
    """
    gaps = []
    for plain, answer in zip(expected, actual, strict=True):
        place = first_difference(plain.token_ids, answer.token_ids)
        if place is not None:
            known = plain.logprobs[place]
            assert answer.token_ids[place] in known
            ids = plain.token_ids[place], answer.token_ids[place]
            gaps.append(known[ids[0]].logprob - known[ids[1]].logprob)
    return gaps


def what_failed(done: subprocess.CompletedProcess[str]) -> str:
    """Why a script with an engine ended badly: its processes' errors, wherever they stand, and the last of the rest."""
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    errors = [line for line in lines if "ERROR" in line or "Error" in line]
    return "\n".join([f"exit status {done.returncode}", *errors[:80], "...", done.stderr[-1500:]])


def long_and_short_prompts(llm: Any, count: int) -> list[list[int]]:
    """Token ids of ``count`` different chats, some long enough to be computed in several chunks."""
    tokenizer = llm.get_tokenizer()
    texts = [own_prompts()[i % 8] * (1 + 3 * (i % 4 == 3)) + " " * (i // 8) for i in range(count)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def generate(llm: Any, inputs: list[list[int]], params: list[Any]) -> list[list[int]]:
    """Token ids of the answers to prompts of token ids, all at once."""
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in inputs], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def counted(llm: Any, inputs: list[list[int]], params: list[Any]) -> tuple[list[list[int]], dict[str, int]]:
    """Answers, and what the counters have grown by."""
    (before,) = llm.collective_rpc("vllm_ext_counters")
    found = generate(llm, inputs, params)
    (after,) = llm.collective_rpc("vllm_ext_counters")
    return found, {name: after[name] - before[name] for name in after}


def preemptions(llm: Any) -> int:
    """How often requests were preempted so far."""
    (metric,) = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    value: int = metric.value
    return value


def seen(worker: Any) -> dict[str, int]:
    """For ``collective_rpc``: what a test has a worker count in ``worker.seen``, since it was last asked."""
    counts = dict(worker.seen)
    worker.seen.update(dict.fromkeys(counts, 0))
    return counts


def loading(llm: Any) -> list[int]:
    """Grows by how many tokens the connector brings for a request, as often as it brings some."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    inner, found = connector.update_state_after_alloc, []

    def update(request: Any, blocks: Any, num_external_tokens: int) -> None:
        found.extend([num_external_tokens] * bool(num_external_tokens))
        inner(request, blocks, num_external_tokens)

    connector.update_state_after_alloc = update
    return found
