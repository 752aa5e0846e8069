# SPDX-License-Identifier: Apache-2.0
"""Requests of the V2 runner's tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers import preemptions
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Token ids, some repeating themselves, some longer than a step's tokens."""
    draw = random.Random(seed)
    texts = []
    for number in range(count):
        words = [draw.randrange(20, 1000) for _ in range(draw.choice((3, 9, 21)))]
        texts.append(words * (4 if number % 3 == 2 else 1))
    return texts


def generate(llm: Any, texts: list[list[int]], params: Any) -> list[Any]:
    """All at once."""
    return [
        output.outputs[0]
        for output in llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    ]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def counters(llm: Any) -> dict[str, int]:
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **values})


def watch_parents(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """By row, the parents of each tree that is made from now on; -1 for roots and padding."""
    speculator = llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator
    propose, parents = speculator.propose, []

    def watching(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(input_batch, *args, **kwargs)
        parents.extend(speculator.trees.parents[input_batch.idx_mapping].tolist())
        return drafts

    monkeypatch.setattr(speculator, "propose", watching)
    return parents


@contextmanager
def on_v1(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that are made have vLLM's V1 runner; those after it V2 again."""
    from vllm import envs

    envs.disable_envs_cache()
    try:
        with monkeypatch.context() as patch:
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
            yield
    finally:
        envs.disable_envs_cache()


@contextmanager
def preempted(llm: Any) -> Iterator[None]:
    """Requests of an engine are, and leave nothing behind."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free, before = pool.get_num_free_blocks(), preemptions(llm)
    yield
    assert preemptions(llm) > before
    assert pool.get_num_free_blocks() == free
    assert not scheduler.requests


class NoEcho(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """A user's own: no token is one of the two before it, of requests that ask for it; it takes rows for a chain."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        self._asked: set[int] = set()

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        asked = bool((sampling_params.extra_args or {}).get("no_echo"))
        (self._asked.add if asked else self._asked.discard)(req_idx)
        return asked

    def apply(self, logits: Any, ctx: Any) -> Any:
        if self._asked.isdisjoint(ctx.idx_mapping_np.tolist()):
            return logits  # without asking the device for anything
        slots, places = ctx.expanded_idx_mapping.tolist(), ctx.expanded_local_pos.tolist()
        for row, (slot, place) in enumerate(zip(slots, places, strict=True)):
            if slot in self._asked:
                end = int(self._states.total_len.gpu[slot])
                text = self._states.all_token_ids.gpu[slot, max(0, end - 2) : end].tolist()
                text += ctx.input_ids[row - place + 1 : row + 1].tolist()
                logits[row, [token for token in text[-2:] if token >= 0]] = -float("inf")
        return logits
