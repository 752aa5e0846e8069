# SPDX-License-Identifier: Apache-2.0
"""Counters of the V2 runner: all that was added arrives, a step later; what warm-up counted does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.engine.v2.speculators import counters
from vllm_ext.engine.v2.speculators.counters import ON_DEVICE, Counts


def test_counts_arrive_a_step_later_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    counts = Counts(config, torch.device("cpu"))
    monkeypatch.setattr(counters, "COPY_SECONDS", 0.0)
    counts.begin_step()
    counts.on_device += torch.tensor([3, 2, 4, 2])
    counts.begin_step()
    assert not counts.take_new()  # copied, not yet taken
    counts.begin_step()
    assert counts.take_new() == {
        "spec_draft_tokens": 3,
        "spec_accepted_tokens": 2,
        "spec_emitted_tokens": 4,
        "spec_steps": 2,
    }
    monkeypatch.setattr(counters, "COPY_SECONDS", 60.0)
    counts.on_device += torch.tensor([0, 0, 1, 1])
    counts.begin_step()
    counts.begin_step()
    assert not counts.take_new()  # not so soon
    counts.begin_step(idle=True)
    assert counts.take_new() == {"spec_emitted_tokens": 1, "spec_steps": 1}
    counts.on_device += torch.tensor([0, 0, 1, 1])
    counts.count("fallbacks:model_chain", 2)
    totals = counts.totals()
    assert [totals[name] for name in ON_DEVICE] == [3, 2, 6, 4]
    assert counts.take_new() == {"spec_emitted_tokens": 1, "spec_steps": 1, "fallbacks:model_chain": 2}
    counts.reset()
    counts.on_device += torch.tensor([3, 1, 2, 1])
    totals = counts.totals()
    assert [totals[name] for name in ON_DEVICE] == [3, 1, 2, 1]


def test_other_ranks_count_nothing() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=1))
    counts = Counts(config, torch.device("cpu"))
    counts.begin_step()
    counts.on_device += 1
    counts.count("fallbacks:model_chain")
    assert counts.totals() == {}
    assert counts.take_new() == {}
