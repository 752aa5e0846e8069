# SPDX-License-Identifier: Apache-2.0
"""Which of a step's drafts the V2 runner verifies: the scheduler has said how many, the worker cuts the others off."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode

from vllm_ext.config import speculative
from vllm_ext.engine import step_extras
from vllm_ext.engine.v2.shares import are_shared, cut, problem

SURE, UNSURE = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.2, 0.1, 0.05]], np.float32)


def step(lengths: dict[str, int], drafts: dict[str, int], level: int | None) -> Any:
    """What of a SchedulerOutput is looked at."""
    made = SimpleNamespace(
        num_scheduled_tokens=dict(lengths),
        total_num_scheduled_tokens=sum(lengths.values()),
        scheduled_spec_decode_tokens={name: list(range(count)) for name, count in drafts.items()},
    )
    step_extras.set_of(made).budget = {"gain": 1.5}
    if level is not None:
        step_extras.set_of(made).level = level
    return made


class Graphs:
    """A ``CudaGraphManager`` with graphs of some numbers of rows: of uniform steps, of any, or none at all."""

    def __init__(self, uniform: list[int], varlen: list[int]) -> None:
        self._uniform, self._varlen = uniform, varlen

    def dispatch(self, requests: int, rows: int, uniform: int | None, loras: int, most: int) -> Any:
        sizes = self._varlen + (self._uniform if uniform is not None else [])
        fitting = [size for size in sizes if size >= rows]
        mode = CUDAGraphMode.FULL if fitting else CUDAGraphMode.NONE
        return SimpleNamespace(cg_mode=mode, num_tokens=min(fitting, default=rows))


NO_GRAPHS, ONE_LENGTH, ANY_LENGTHS = Graphs([], []), Graphs([6], []), Graphs([], [2, 4, 6, 8])


@pytest.mark.parametrize("graphs", [None, NO_GRAPHS, ANY_LENGTHS])
def test_the_likeliest_nodes_stay(graphs: Any) -> None:
    output = step({"a": 5, "b": 5}, {"a": 4, "b": 4}, level=2)
    made = cut(output, {"a": SURE, "b": UNSURE}, graphs)
    assert made.scheduled_spec_decode_tokens == {"a": [0, 1, 2, 3]}
    assert made.num_scheduled_tokens == {"a": 5, "b": 1}
    assert made.total_num_scheduled_tokens == 6
    assert step_extras.of(made).budget == {"gain": 1.5}
    # The scheduler's own is as it was.
    assert output.num_scheduled_tokens == {"a": 5, "b": 5}
    assert output.scheduled_spec_decode_tokens["b"] == [0, 1, 2, 3]
    assert output.total_num_scheduled_tokens == 10


def test_beside_pairs_all_have_as_many() -> None:
    """A pair, whose nodes' chances nobody knows, verifies what its primary does."""
    output = step({"a": 5, "a-pair": 5, "b": 5}, {"a": 4, "a-pair": 4, "b": 4}, level=2)
    made = cut(output, {"a": SURE, "b": UNSURE}, None, alike=True)
    assert made.num_scheduled_tokens == {"a": 3, "a-pair": 3, "b": 3}
    other = cut(output, {"a": SURE, "b": UNSURE}, None).num_scheduled_tokens
    assert other["a"] != other["a-pair"]


def test_a_step_keeps_its_graph() -> None:
    """With graphs of one length all have as many; of prompts there is none in any case."""
    chances = {"a": SURE, "b": UNSURE}
    made = cut(step({"a": 5, "b": 5}, {"a": 4, "b": 4}, level=2), chances, ONE_LENGTH)
    assert {name: len(drafts) for name, drafts in made.scheduled_spec_decode_tokens.items()} == {
        "a": 2,
        "b": 2,
    }
    made = cut(step({"a": 5, "b": 5, "prompt": 40}, {"a": 4, "b": 4}, level=2), chances, ONE_LENGTH)
    assert made.num_scheduled_tokens == {"a": 5, "b": 1, "prompt": 40}


def test_a_larger_graph_is_not_taken() -> None:
    """Graphs of any lengths, but only large ones beside those of one length."""
    made = cut(step({"a": 5, "b": 5}, {"a": 4, "b": 4}, 2), {"a": SURE, "b": UNSURE}, Graphs([6], [16]))
    assert made.num_scheduled_tokens == {"a": 3, "b": 3}


def test_trees_that_are_not_there_have_no_rows() -> None:
    """No padding: the step is smaller, and what is known of a tree is cut to what was scheduled of it."""
    drafts = {"a": 4, "b": 4, "c": 2}
    lengths = {name: 1 + count for name, count in drafts.items()}
    made = cut(step(lengths, drafts, level=3), {"a": SURE[:1], "c": SURE}, None)
    assert made.num_scheduled_tokens == {"a": 2, "b": 1, "c": 3}
    assert cut(step(lengths, drafts, level=3), {}, None).scheduled_spec_decode_tokens == {}


def test_other_steps_are_left_alone() -> None:
    for output in (
        step({"a": 5}, {"a": 4}, level=None),
        step({"a": 1}, {}, level=2),
    ):
        assert cut(output, {"a": SURE}, None) is output


@pytest.mark.parametrize(
    ("method", "budget", "ranks", "reason"),
    [
        ("suffix_tree", "shared", 1, None),
        ("suffix_tree", "goodput", 1, None),
        ("suffix_tree", "shared", 2, "ranks"),
        ("token_recycling", "shared", 1, "on the device"),
    ],
)
def test_who_shares(method: str, budget: str, ranks: int, reason: str | None) -> None:
    settings = speculative.parse({"method": method, "budget": budget})
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks, data_parallel_size=1))
    found = problem(vllm_config, settings)
    assert found is None if reason is None else reason in str(found)
    assert are_shared(vllm_config, settings) == (budget == "shared" and reason is None)


def a_runner(**changes: Any) -> Any:
    """What of one is asked before graphs are captured; on CUDA, and in order."""
    from vllm_ext.engine.v2.model_runner import SpeculativeRunner

    parts: dict[str, Any] = {
        "device": "cuda",
        "budget": "shared",
        "mode": CUDAGraphMode.FULL_AND_PIECEWISE,
        "chains": None,
        **changes,
    }
    runner: Any = object.__new__(
        type("Runner", (SpeculativeRunner,), {"_chain_reason": lambda _: parts["chains"]})
    )
    settings = speculative.parse({"method": "suffix_tree", "budget": parts["budget"]})
    runner.device = SimpleNamespace(type=parts["device"])
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
    runner.vllm_config = SimpleNamespace(parallel_config=parallel)
    runner.compilation_config = SimpleNamespace(cudagraph_mode=parts["mode"])
    runner.speculator = SimpleNamespace(settings=settings)
    return runner


def test_when_graphs_are_for_any_query_lengths() -> None:
    assert a_runner()._may_vary()
    for changes in (
        {"device": "cpu"},
        {"budget": "goodput"},
        {"mode": CUDAGraphMode.PIECEWISE},  # which vLLM would stop at
        {"mode": CUDAGraphMode.NONE},
        {"mode": None},
        {"chains": "chunked attention"},
    ):
        assert not a_runner(**changes)._may_vary()


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_vllm_takes_our_backends_for_such_graphs(name: str) -> None:
    """By its own checks, which end the engine where a backend cannot have them."""
    from vllm.v1.worker.gpu import attn_utils

    module = importlib.import_module(f"vllm_ext.engine.attention.{name}_captured")
    (backend,) = (
        value
        for key, value in vars(module).items()
        if key.startswith("Tree") and key.endswith("AttentionBackend")
    )
    builder = backend.get_builder_cls()
    group = SimpleNamespace(
        layer_names=["a"], backend=backend, kv_cache_spec=None, get_metadata_builder=lambda _: builder
    )
    vllm_config = SimpleNamespace(num_speculative_tokens=15)
    unsupported = attn_utils.get_varlen_cudagraph_unsupported_backend
    assert unsupported([[group]], vllm_config, 16) is None
    assert unsupported([[group]], vllm_config, 17) == (backend.__name__, 16)
    assert attn_utils.get_query_lens_mismatch_unsupported_backend([[group]]) is None
