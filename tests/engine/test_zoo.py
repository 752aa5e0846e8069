# SPDX-License-Identifier: Apache-2.0
"""The architectures that people serve, as small checkpoints of random weights: trees or chains, and plain's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import zoo
import zoo_comparison
from helpers import assert_same_outputs
from zoo_comparison import METHODS, NODES, Plain, Zoo

from vllm_ext.doctor import model as doctor

pytestmark = pytest.mark.engine
QUICK = {"gpt_oss": "hybrid"}


@pytest.fixture(scope="module")
def models(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(model_dir, tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def plain(models: Zoo) -> Any:
    """What plain vLLM answers, by the model's name."""
    known: dict[str, Plain] = {}

    def of(name: str) -> Plain:
        if name not in known:
            known[name] = zoo_comparison.plain(models, name)
        return known[name]

    return of


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[pytest.mark.slow] * (QUICK.get(name) != method))
        for name in zoo.MODELS
        for method in METHODS
    ],
)
def test_a_model_of_the_zoo(models: Zoo, plain: Any, name: str, method: str) -> None:
    expected: Plain = plain(name)
    outcome = zoo_comparison.compare(models, name, method)
    told = doctor.answer(models.checkpoint(name), NODES, zoo.OPTIONS.get(name, {}).get("dtype", "float32"))
    assert told.got == outcome.got, (told.reason, outcome.reason)
    if outcome.got == "refused":
        return
    assert told.reason == outcome.reason
    assert outcome.accepted_enough, outcome.totals
    if expected.together == expected.alone:  # else nobody knows what is right
        for answers in outcome.rounds:
            assert_same_outputs(expected.together, answers)
