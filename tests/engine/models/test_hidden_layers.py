# SPDX-License-Identifier: Apache-2.0
"""Layers that several read: one list says of all what the streams of a step are of. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from vllm_ext.engine.models import hidden_states
from vllm_ext.engine.models.hidden_states import HiddenStates


def test_who_asked_first_finds_its_layers_among_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "supports_eagle3", lambda model: True)
    asked: list[tuple[int, ...]] = []
    model = SimpleNamespace(model=SimpleNamespace(), set_aux_hidden_state_layers=asked.append)
    runner: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="m", get_total_num_hidden_layers=lambda: 8),
        get_model=lambda: model,
        aux_layers=(),
    )
    rules = HiddenStates.of_target(runner, [2, 4])
    head = HiddenStates.of_target(runner, [0, 4, 7])
    assert asked[-1] == (0, 2, 4, 7) == tuple(runner.aux_layers)
    streams = [torch.full((3, 2), float(layer)) for layer in runner.aux_layers]
    for reader in (rules, head):
        reader.hold(streams, torch.tensor([0, 2]))
        for layer in (0, 2, 4, 7):
            assert torch.equal(reader.of(layer), torch.full((2, 2), float(layer)))
