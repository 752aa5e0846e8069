# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a model that drafts, recorded and replayed without CUDA: what they hold is all that a step needs.

Found: a graph that reads what vLLM has moved since, or holds what the host knew when it was captured. There graphs are
captured with requests that write nowhere, and replayed with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import v2_attention, v2_engine
from engine_heads import options_of
from helpers import assert_same_outputs
from recorded_graph import recorded_instead_of_captured
from v2_requests import counters, generate, prompts, sampling, tokens
from vllm.config.compilation import CUDAGraphMode

from vllm_ext.engine.draft_model.device import graphs as draft_graphs
from vllm_ext.engine.draft_model.device import passes as draft_passes
from vllm_ext.engine.draft_model.device.step import Kind
from vllm_ext.kernels import ancestor_bits as masks

pytestmark = pytest.mark.v2
NODES = 4
METHODS: dict[str, dict[str, Any]] = {
    "dyspec": {"model": "self", "self_layers": 2},
    "spectr": {"model": "self", "self_layers": 2, "drafts": 2},
    "layerskip": {"exit_layer": 1, "width": 2, "least_sure": 0.05},
    "eagle_tree": {},
    "clover_tree": {},
    "medusa_tree": {},
    "hybrid+eagle_tree": {},
}


@pytest.fixture(scope="module", autouse=True)
def triton_attention() -> Iterator[None]:
    """By launches, which are recorded; that of CPUs is numba's."""
    with v2_attention("TRITON_ATTN"):
        yield


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.quick] * (name == "spectr")) for name in METHODS],
)
def test_graphs_draft_as_launches_do(
    v2_dir: str, method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {
        **options_of(method, v2_dir, tmp_path),
        **METHODS[method],
        "num_speculative_tokens": NODES,
        "budget": "fixed",
    }
    llm = v2_engine(v2_dir, options, max_num_seqs=3)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    speculator = runner.speculator
    kinds = [
        sampling(max_tokens=9),
        sampling(max_tokens=7, temperature=0.8, seed=5),
        sampling(max_tokens=8, temperature=1.0, seed=6),
    ]
    texts = prompts(3, seed=8)

    def answers() -> tuple[list[list[int]], dict[str, int]]:
        speculator.forget()  # of a hybrid, which has learnt the answers
        before = counters(llm)
        found = tokens(generate(llm, texts, kinds)) + tokens(generate(llm, texts[:1], kinds[:1]))
        return found, {
            name: total - before[name] for name, total in counters(llm).items() if name.startswith("spec")
        }

    expected, steps = answers()
    drawn = [each for each in Kind if speculator.step.draws or each in (Kind.GREEDY, Kind.CHOSEN)]
    assert draft_graphs.sizes(3) == [1, 2, 3]
    assert draft_graphs.sizes(256) == [1, 2, 4, 8, 16, 32]
    monkeypatch.setattr(draft_graphs, "sizes", lambda most: [1, 3])  # two requests have the graph of three
    with recorded_instead_of_captured([(masks, "ancestor_bits")], [(draft_passes, "async_tensor_h2d")]):
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
        graphs = speculator.graphs
        graphs.capture_all()
        assert len(graphs.graphs) == 2 * (1 + len(drawn))  # reading, and each kind of trees
        used: list[tuple[int, int, Kind]] = []
        run = graphs.run

        def running(size: int, level: int = 0, kind: Kind = Kind.GREEDY) -> bool:
            used.append((size, level, kind))
            found: bool = run(size, level, kind)
            return found

        monkeypatch.setattr(graphs, "run", running)
        found, again = answers()
        assert_same_outputs(expected, found)
        assert again == steps
        assert {(3, NODES, Kind.CHOSEN), (1, NODES, Kind.GREEDY), (1, 0, Kind.GREEDY)} <= set(used)
        used.clear()
        random = [sampling(max_tokens=9, temperature=1.0, top_k=20), sampling(max_tokens=9)]
        mixed = tokens(generate(llm, texts[:2], random))
        assert_same_outputs([expected[0]], [tokens(generate(llm, texts[:1], kinds[:1]))[0]])
        assert mixed[1] == tokens(generate(llm, texts[1:2], random[1:]))[0]
        kind = Kind.MIXED if speculator.step.draws else Kind.CHOSEN
        assert (3, NODES, kind) in used
        assert all(size != 2 for size, *_ in used)
