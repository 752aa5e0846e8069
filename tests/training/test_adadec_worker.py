# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-ext adadec learn`` keeps in the worker, beside all logits of the texts at once: chunks, batches, rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.samplers.adadec import entropy_of
from vllm_ext.training.adadec_worker import ASKED, ROWS, EntropyReader

HIDDEN, VOCABULARY = 8, 50
HEAD = torch.randn(HIDDEN, VOCABULARY, generator=torch.Generator().manual_seed(1))


class Runner:
    """What of vLLM's the reader looks at; hidden states of a token are its own and its position's."""

    def __init__(self, texts: Mapping[str, tuple[list[int], Any]], has_logits: bool = True) -> None:
        self.requests = {
            name: SimpleNamespace(
                prompt_token_ids=tokens,
                num_computed_tokens=0,
                sampling_params=SimpleNamespace(extra_args=extra),
            )
            for name, (tokens, extra) in texts.items()
        }
        self.rows: list[int] = []  # of each product with the head
        self.looked_up = 0
        self.model = SimpleNamespace(compute_logits=self.compute_logits if has_logits else lambda _: None)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return (3 * hidden @ HEAD).bfloat16()

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: Any) -> dict[str, Any]:
        self.looked_up += 1
        return {}

    def step(self, **scheduled: int) -> None:
        starts = np.cumsum([0, *scheduled.values()])
        self.query_start_loc = SimpleNamespace(np=starts)
        self.input_batch = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(scheduled)})
        parts = []
        for name, count in scheduled.items():
            at = self.requests[name].num_computed_tokens
            parts.append(states(self.requests[name].prompt_token_ids)[at : at + count])
        assert self._get_prompt_logprobs_dict(torch.cat(parts), scheduled) == {}
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count


def states(tokens: list[int]) -> torch.Tensor:
    draw = torch.randn(VOCABULARY + 1000, HIDDEN, generator=torch.Generator().manual_seed(2))
    return draw[torch.tensor(tokens)] + draw[VOCABULARY + torch.arange(len(tokens))]


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(tokens: list[int], counts_from: int) -> tuple[Any, list[bool]]:
    log_p = (3 * states(tokens) @ HEAD).bfloat16().float().log_softmax(1)
    own = log_p.argmax(1)[:-1] == torch.tensor(tokens[1:])
    return pytest.approx(entropy_of(log_p)[counts_from - 1 : -1].tolist(), abs=1e-5), own[
        counts_from - 1 :
    ].tolist()


def test_chunks_of_several_texts_are_put_together() -> None:
    long, short, other = tokens_of(400, 3), tokens_of(30, 4), tokens_of(20, 5)
    runner = Runner({"a": (long, {ASKED: ["0", 1]}), "b": (short, {ASKED: ["1", 25]}), "c": (other, None)})
    worker: Any = SimpleNamespace(model_runner=runner)
    assert EntropyReader.vllm_ext_adadec_read(worker) == {}
    runner.step(c=20, a=300)
    runner.step(b=7, a=99)
    runner.step(a=1, b=20)
    runner.step(b=3)
    found = EntropyReader.vllm_ext_adadec_read(worker)
    assert found == {"0": expected(long, 1), "1": expected(short, 25)}
    assert any(found["0"][1])
    assert runner.looked_up == 4  # vLLM's own look-up goes on
    assert max(runner.rows) == ROWS
    assert sum(runner.rows) == 399 + 5  # and no row that does not count
    assert EntropyReader.vllm_ext_adadec_read(worker) == {}


def test_a_text_that_is_computed_twice_counts_once() -> None:
    tokens = tokens_of(40, 6)
    runner = Runner({"a": (tokens, {ASKED: ["0", 1]})})
    worker: Any = SimpleNamespace(model_runner=runner)
    EntropyReader.vllm_ext_adadec_read(worker)
    runner.step(a=25)
    runner.requests["a"].num_computed_tokens = 0  # it was preempted
    runner.step(a=40)
    assert EntropyReader.vllm_ext_adadec_read(worker) == {"0": expected(tokens, 1)}


def test_a_rank_without_logits_has_nothing() -> None:
    runner = Runner({"a": (tokens_of(9, 7), {ASKED: ["0", 1]})}, has_logits=False)
    worker: Any = SimpleNamespace(model_runner=runner)
    EntropyReader.vllm_ext_adadec_read(worker)
    runner.step(a=9)
    assert EntropyReader.vllm_ext_adadec_read(worker) == {}
