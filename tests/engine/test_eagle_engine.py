# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads beside the target: which rows they read, what they may say, and that output stays the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_eagle
import torch
from conftest import engine
from distribution import BLOCK_SIZE
from engine_heads import (
    PROMPTS,
    along,
    assert_knows_everything,
    assert_plains,
    assert_plains_distribution,
    fused,
)
from v2_requests import counters
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_ext.engine.models import cpu_linear

pytestmark = pytest.mark.engine


def eagle(model: str, nodes: int = 12, **options: Any) -> dict[str, Any]:
    return {
        "method": "eagle_tree",
        "model": model,
        "num_speculative_tokens": nodes,
        "budget": "fixed",
        **options,
    }


@pytest.mark.parametrize(
    ("by", "method", "late"),
    [
        ("token", "eagle_tree", 0),
        ("feature", "eagle_tree", 0),
        ("token", "hybrid", 0),
        pytest.param("feature", "eagle_tree", 1, marks=pytest.mark.slow),
        pytest.param("sampling", "eagle_tree", 0, marks=pytest.mark.slow),
        pytest.param("sampling", "eagle_tree", 1, marks=pytest.mark.slow),
        ("trigram", "eagle_tree", 0),
        pytest.param("trigram", "eagle_tree", 1, marks=pytest.mark.slow),
        pytest.param("blocks", "eagle_tree", 0, marks=pytest.mark.slow),
        pytest.param("blocks", "hybrid", 0, marks=pytest.mark.slow),
        pytest.param("blocks", "eagle_tree", 1, marks=pytest.mark.slow),
        pytest.param("first", "eagle_tree", 0, marks=pytest.mark.slow),
    ],
)
def test_a_head_that_knows_everything(
    cycle: tuple[str, Any], tmp_path: Path, by: str, method: str, late: int
) -> None:
    """All that it drafts is accepted, fused or alone; a row or a token beside it, and nothing is."""
    folder, after = cycle
    if by == "first":
        head = tiny_eagle.first(tmp_path / "head", Path(folder))
    else:
        head = tiny_eagle.knowing(tmp_path / "head", Path(folder), after, by, late)
    nodes = 1 if by == "feature" else 4
    config = eagle(head, nodes)
    if method == "hybrid":
        config = fused(config)
    prompts = along(after) if by == "trigram" else PROMPTS
    if by == "blocks":  # before a text's only row there is none that a block could begin with
        prompts = [[3, 3], *prompts[1:]]
    assert_knows_everything(folder, after, config, nodes, late, prompts)


def bits_of_weights(worker: Any) -> set[int]:
    """Of the head's own layers."""
    layers = worker.model_runner.drafter.model_drafts.passes.head.model.modules()
    return {
        round(8 * layer.packed_bytes / (layer.input_size * layer.output_size))
        for layer in layers
        if isinstance(layer, LinearBase | ParallelLMHead)
    }


@pytest.mark.skipif(cpu_linear.reason_against(torch.bfloat16) is not None, reason="no kernel of ours")
@pytest.mark.slow
def test_a_head_in_8_bits_knows_everything_too(cycle: tuple[str, Any], tmp_path: Path) -> None:
    folder, after = cycle
    config = eagle(tiny_eagle.knowing(tmp_path / "head", Path(folder), after, "token", 0), 4)

    def seen(llm: Any) -> None:
        (bits,) = llm.collective_rpc(bits_of_weights)
        assert bits == {8}

    assert_knows_everything(folder, after, config, 4, 0, seen=seen, dtype="bfloat16")


@pytest.fixture(
    scope="module",
    params=[
        None,
        pytest.param(tiny_eagle.FALCON, marks=pytest.mark.slow),
        pytest.param(tiny_eagle.CHIMERA, marks=pytest.mark.slow),
        pytest.param(tiny_eagle.FSPAD, marks=pytest.mark.slow),
    ],
    ids=["eagle", "falcon", "chimera", "fspad"],
)
def head(request: pytest.FixtureRequest, slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_eagle.random(tmp_path_factory.mktemp("head"), Path(slice_dir), architecture=request.param)


@pytest.fixture(scope="module")
def drafting(head: str, slice_dir: str) -> Iterator[Any]:
    yield from engine(slice_dir, eagle(head), block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains(plain_slice_llm, drafting)
    totals = counters(drafting)
    assert totals["spec_draft_tokens"] > 500
    assert totals["fallbacks:proposer_error"] == totals["fallbacks:hidden_states_missing"] == 0


def compared(worker: Any, folder: str) -> float:
    """Sent to the worker: how far its head is from the one that is trained, by the same weights, over a short text."""
    import json

    import torch
    from safetensors.torch import load_file
    from torch.nn.functional import scaled_dot_product_attention

    from vllm_ext.engine.draft_model.passes import DraftPasses, Growth
    from vllm_ext.training.eagle import Head
    from vllm_ext.training.eagle_relatives.chimera import ChimeraHead
    from vllm_ext.training.eagle_relatives.fspad import FspadHead
    from vllm_ext.training.eagle_texts import windows

    runner = worker.model_runner
    passes = runner.drafter.model_drafts.passes
    config = json.loads((Path(folder) / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kinds = {tiny_eagle.FSPAD: FspadHead, tiny_eagle.CHIMERA: ChimeraHead}
    kind = kinds.get(config["architectures"][0], Head)
    embedding = runner.model.model.embed_tokens.weight.float()
    trained = kind(config, embedding, np.arange(config["vocab_size"], dtype=np.int32)).eval()
    stored = {name: each.float() for name, each in load_file(Path(folder) / "model.safetensors").items()}
    missing, unknown = trained.load_state_dict(stored, strict=False)
    assert set(missing) == {"d2t", "t2d"}
    assert not unknown
    draw, rows = torch.Generator().manual_seed(0), passes._block_size
    tokens = torch.randint(config["vocab_size"], (rows,), generator=draw)
    aux = torch.randn(rows, 2 * config["hidden_size"], generator=draw).to(runner.dtype)
    # In the block that no request has.
    passes._kv_slots = lambda _, index: torch.from_numpy(index.astype(np.int64))
    passes._block_table = lambda _: torch.zeros(1, 1, dtype=torch.int32)
    passes._growth["a text"], passes._features = Growth(0, 0), passes.head.features(aux)
    read = windows(tokens, torch.zeros(rows, dtype=torch.int64), trained.num_read)
    passes._features = passes.head.beside(passes._features, read[:, :-1])
    found = DraftPasses._grow(passes, ["a text"] * rows, range(-1, rows - 1), tokens.tolist())
    del passes._kv_slots, passes._block_table, passes._growth["a text"]
    with torch.no_grad():
        features = trained.modulated(read, trained.features(aux))
        inputs, turns = trained.inputs(read, features), trained.turns(torch.arange(rows))
        parts = trained.queries(inputs, turns), *trained.keys_values(inputs, turns)
        query, key, value = (each.transpose(0, 1)[None] for each in parts)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        own = trained.output(features, attended[0].transpose(0, 1).flatten(1))
        handed_on = [trained.handed_on(own), embedding[read[:, 1:]].flatten(1)]
        wanted = trained.norm(own[:, : config["hidden_size"]]), torch.cat(handed_on, 1)
    return max(float((a.float() - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_it_computes_what_is_trained(drafting: Any, head: str) -> None:
    assert max(drafting.collective_rpc(compared, args=(head,))) < 1e-3


@pytest.mark.slow
def test_drawn_trees_have_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains_distribution(plain_slice_llm, drafting)
