# SPDX-License-Identifier: Apache-2.0
"""Draft models and early exits on vLLM's V2 runner: the same tokens as without, and drafts as good as their model.

The draft here is the target itself, all of its layers: what it thinks likely is, what is drawn from it is accepted. A
node read at another position, behind another parent or by another request's text would not be. Exactness with a draft
that errs is tested where all drafters of V2 are (`v2_either`), laws in `proposers/test_sampled_device_law`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from conftest import v2_engine
from helpers import assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens

pytestmark = pytest.mark.v2
NODES = 6
# By method its options, and how deep each drawn tree is below its first child, where that is always the same.
METHODS: dict[str, tuple[dict[str, Any], int | None]] = {
    "dyspec": ({}, None),
    "rsd_c": ({"branching": [2, 1, 1]}, 3),
    "rsd_s": ({"width": 2}, None),
    "spectr": ({"drafts": 2}, 3),
    "static_tree": ({"branching": [1, 1, 1, 1]}, 4),
}
OWN_LAYERS = {
    "unified_skip": {"speedup": 1.0},
    "layerskip": {"exit_layer": 1, "width": 2, "least_sure": 0.05},
}
_engines: dict[str, Any] = {}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.quick] * (name == "dyspec")) for name in METHODS]
)
def v2_same(request: pytest.FixtureRequest, v2_dir: str, v2_plain: Any) -> tuple[str, Any]:
    """A method, and an engine whose draft model is the target."""
    return request.param, engine(
        request.param, v2_dir, model="self", self_layers=2, **METHODS[request.param][0]
    )


def engine(name: str, v2_dir: str, **options: Any) -> Any:
    if name not in _engines:
        method = {"method": name, "num_speculative_tokens": NODES, "budget": "fixed", **options}
        _engines[name] = v2_engine(v2_dir, method)
    return _engines[name]


def per_step(llm: Any, before: dict[str, int]) -> float:
    new = {name: total - before[name] for name, total in counters(llm).items()}
    assert new["spec_draft_tokens"] <= NODES * new["spec_steps"]
    return new["spec_accepted_tokens"] / new["spec_steps"]


def test_greedy_and_seeded_requests(v2_plain: Any, v2_same: tuple[str, Any]) -> None:
    name, llm = v2_same
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    kinds = [
        sampling(),
        sampling(temperature=0.8, seed=5),
        sampling(temperature=0.9, seed=6, top_p=0.9, top_k=50),
        sampling(repetition_penalty=1.3, logprobs=2),
    ]
    texts = prompts(len(kinds))
    expected = generate(v2_plain, texts, kinds)
    actual = generate(llm, texts, kinds)
    assert_same_outputs(tokens(expected), tokens(actual))
    before = counters(llm)
    generate(llm, texts, sampling())
    # The likeliest path is in the tree, as deep as it goes.
    if name == "static_tree":  # a chain
        assert counters(llm)["spec_steps"] - before["spec_steps"] == 4 * (1 + math.ceil(19 / 5))
    assert per_step(llm, before) > 1.4


def test_requests_that_sample(v2_same: tuple[str, Any]) -> None:
    """Found: distributions of another row, of another temperature, of tokens in another order."""
    name, llm = v2_same
    before = counters(llm)
    kinds = [sampling(temperature=t, top_k=20) for t in (0.7, 1.0, 1.3, 1.0)]
    found = tokens(generate(llm, prompts(4), kinds))
    depth = METHODS[name][1]
    if depth is None:
        assert per_step(llm, before) > 1.2
    else:  # the first of 20 tokens comes with the prompt, and all that is drawn is accepted
        steps = counters(llm)["spec_steps"] - before["spec_steps"]
        assert steps == 4 * (1 + math.ceil(19 / (1 + depth)))
    # Each time another draw.
    assert found[:2] != tokens(generate(llm, prompts(4)[:2], kinds[:2]))


def test_drawn_trees_beside_others(v2_plain: Any, v2_same: tuple[str, Any]) -> None:
    _, llm = v2_same
    kinds = [
        sampling(),
        sampling(temperature=1.0, top_k=20),
        sampling(temperature=0.9, seed=3),
        sampling(temperature=1.2),
    ]
    texts = prompts(len(kinds), seed=4)
    before = counters(llm)
    expected, actual = tokens(generate(v2_plain, texts, kinds)), tokens(generate(llm, texts, kinds))
    for place in (0, 2):
        assert_same_outputs([expected[place]], [actual[place]])
    assert per_step(llm, before) > 1.0


def test_the_models_own_layers(v2_plain: Any, v2_dir: str) -> None:
    """Found: KV of nodes in slots of the request before, where each has one node."""
    kinds = [
        sampling(),
        sampling(temperature=0.8, seed=5),
        sampling(temperature=0.9, seed=6, top_p=0.9, top_k=50),
        sampling(repetition_penalty=1.3, logprobs=2),
    ]
    texts = prompts(len(kinds))
    expected = tokens(generate(v2_plain, texts, kinds))
    for name, options in OWN_LAYERS.items():
        llm = engine(name, v2_dir, **options)
        assert llm.llm_engine.vllm_config.use_v2_model_runner
        assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
        before = counters(llm)
        generate(llm, texts, sampling())
        if name == "unified_skip":  # a chain of all layers
            steps = counters(llm)["spec_steps"] - before["spec_steps"]
            assert steps == 4 * (1 + math.ceil(19 / (1 + NODES)))
        else:
            assert per_step(llm, before) > 0.3
        # Nothing is drawn: noise is vLLM's own.
        generate(llm, texts, sampling(temperature=0.8))
