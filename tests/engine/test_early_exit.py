# SPDX-License-Identifier: Apache-2.0
"""Early exits in an engine: nothing is computed twice, and nothing is computed wrong.

The whole matrix of exactness is `scripts/matrix.sh layerskip del unified_skip`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slices
import torch
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from vllm import SamplingParams

from vllm_ext.engine.models import exit_heads

pytestmark = pytest.mark.engine

LAYERS = 6


@pytest.fixture(scope="module")
def deep_dir(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six layers whose last four change little: what layers two and three say is often what the model says."""
    target = tmp_path_factory.mktemp("deep")
    return slices.write(Path(model_dir), target, layers=LAYERS, vocabulary=None, quiet_from=2)


@pytest.fixture(scope="module")
def plain(deep_dir: str) -> Iterator[Any]:
    yield from engine(deep_dir)


def exits_of(worker: Any) -> Any:
    drafter = worker.model_runner.drafter
    return (drafter.model_drafts or drafter.fused).early_exit


def watch(worker: Any) -> None:
    """Count the target's steps, those that began behind the exit, and the layers that ran in them."""
    runner = worker.model_runner
    worker.seen = {"steps": 0, "behind": 0, "layers": 0}
    forward = runner._model_forward
    for number, layer in enumerate(runner.model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: worker.ran.add(number))
    worker.ran = set()

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        worker.ran.clear()
        result = forward(*args, **kwargs)
        worker.seen["steps"] += 1
        if exits_of(worker).began_behind is not None:
            worker.seen["behind"] += 1
            worker.seen["layers"] += len(worker.ran)
        return result

    runner._model_forward = model_forward


def seen(worker: Any) -> dict[str, int]:
    return dict(worker.seen)


def counters(llm: Any) -> dict[str, int]:
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    assert totals["fallbacks:proposer_error"] == 0
    return dict(totals)


def check_same(plain: Any, llm: Any, crowded: bool) -> None:
    """Greedy, seeded and penalised answers; of many requests until some are preempted, then over cached prefixes."""
    count = 16 if crowded else 5
    inputs = long_and_short_prompts(plain, count)
    params = [
        SamplingParams(temperature=0, max_tokens=60 + 15 * (i % 7), ignore_eos=True) for i in range(count)
    ]
    expected, before = generate(plain, inputs, params), preemptions(llm)
    assert_same_outputs(expected, generate(llm, inputs, params))
    if crowded:
        assert preemptions(llm) > before
        longer = [tokens + answer for tokens, answer in zip(inputs[:4], expected[:4], strict=True)]
        assert_same_outputs(generate(plain, longer, params[:4]), generate(llm, longer, params[:4]))
    for param in (
        SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, seed=6, max_tokens=40, repetition_penalty=1.1),
        SamplingParams(temperature=0, max_tokens=40, presence_penalty=0.5),
    ):
        assert_same_outputs(generate(plain, inputs[:1], [param]), generate(llm, inputs[:1], [param]))


def identity_heads(file: Path, model: str, exits: list[int]) -> str:
    """Heads that change what the exit says, if little."""
    size = 576
    turned = torch.eye(size) + 0.01 * torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    exit_heads.save(file, {number: (turned, torch.zeros(size)) for number in exits}, Path(model))
    return str(file)


def spoil(worker: Any) -> None:
    """The mutation: what the exit has handed out is mixed up between rows."""
    exits = exits_of(worker)
    rows = exits._rows
    exits._rows = lambda *args: None if (found := rows(*args)) is None else found[::-1]


@pytest.mark.parametrize(
    ("method", "headed", "compiled"),
    [
        pytest.param(
            {"method": "layerskip", "exit_layer": 3, "num_speculative_tokens": 5},
            False,
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 9, "width": 3},
            True,
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "method": "hybrid",
                "drafters": ["token_recycling", "suffix_tree", {"method": "layerskip", "exit_layer": 3}],
                "num_speculative_tokens": 9,
            },
            False,
            False,
            marks=pytest.mark.slow,
        ),
        ({"method": "del", "exits": [1, 2, 4], "num_speculative_tokens": 6, "watch_every": 2}, True, False),
        pytest.param(
            {"method": "unified_skip", "speedup": 2.0, "num_speculative_tokens": 6, "width": 2},
            False,
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["chain", "tree", "fused", "del", "skip"],
)
def test_same_as_plain(
    plain: Any, deep_dir: str, tmp_path: Path, method: dict[str, Any], headed: bool, compiled: bool
) -> None:
    name = method["method"]
    # By the clock where what is drafted may depend on one.
    given = {**method, "budget": "goodput" if name == "del" else "fixed"}
    if headed:
        exits = method.get("exits") or [method["exit_layer"]]
        given["heads"] = identity_heads(tmp_path / "heads.safetensors", deep_dir, exits)
    engines = engine(
        deep_dir,
        given,
        num_gpu_blocks_override=17,
        max_num_batched_tokens=192,
        enforce_eager=not compiled,
    )
    llm = next(engines)
    try:
        if name != "unified_skip":
            llm.collective_rpc(watch)
        crowded = name in ("layerskip", "hybrid") and not compiled
        check_same(plain, llm, crowded)
        totals = counters(llm)
        # A clock may find that little pays; at first it always looks.
        assert totals["spec_accepted_tokens"] > (20 if given["budget"] == "fixed" else 0)
        if name in ("layerskip", "hybrid"):
            fused = name == "hybrid"
            assert totals["spec_accepted_tokens"] > (0.1 if fused else 0.3) * totals["spec_draft_tokens"]
            (counts,) = llm.collective_rpc(seen)
            assert counts["behind"] > (0.2 if fused else 0.5) * counts["steps"]
            if not compiled:
                # No layer below the exit runs again.
                exit_layer = 3 if fused else given["exit_layer"]
                assert counts["layers"] == counts["behind"] * (LAYERS - exit_layer)
                llm.collective_rpc(spoil)
                inputs = long_and_short_prompts(plain, 2)
                params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 2
                assert generate(plain, inputs, params) != generate(llm, inputs, params)
    finally:
        next(engines, None)
