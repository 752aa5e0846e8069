# SPDX-License-Identifier: Apache-2.0
"""Which layers take trees, and the Triton backend's forward through the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_ext import v1_attention
from vllm_ext.v1_attention_cpu import TreeCPUAttentionImpl
from vllm_ext.v1_runner import SpeculativeRunner

SUPPORTED: dict[str, Any] = {
    "sliding_window": -1,
    "alibi_slopes": None,
    "logits_soft_cap": 0,
    "sinks": None,
    "kv_cache_dtype": "auto",
    "attn_type": "decoder",
}


def layer(**features: Any) -> SimpleNamespace:
    impl = v1_attention.TreeAttention()
    vars(impl).update({**SUPPORTED, **features})
    return SimpleNamespace(impl=impl)


def cpu_layer(isa: str) -> SimpleNamespace:
    impl: Any = object.__new__(TreeCPUAttentionImpl)
    vars(impl).update(SUPPORTED)
    return SimpleNamespace(impl=impl, isa=isa)


def test_a_plain_decoder_layer_takes_trees() -> None:
    assert v1_attention.layer_problem(layer()) is None
    assert v1_attention.layer_problem(layer(sliding_window=(-1, -1))) is None


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_which_layouts_take_trees(isa: str) -> None:
    assert v1_attention.layer_problem(cpu_layer(isa)) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (layer(sliding_window=4096), "sliding window"),
        (layer(sliding_window=(4095, 0)), "sliding window"),
        (layer(alibi_slopes=[0.5]), "ALiBi"),
        (layer(logits_soft_cap=30.0), "soft-cap"),
        (layer(sinks=[0.0]), "sinks"),
        (layer(kv_cache_dtype="fp8"), "quantised KV cache"),
        (layer(attn_type="encoder_only"), "not a decoder's"),
        (cpu_layer("neon"), "layout 'neon'"),
        (SimpleNamespace(impl=object()), "no tree attention"),  # FlashAttention, MLA
        (SimpleNamespace(), "SimpleNamespace has no tree attention"),  # Mamba: a layer without an impl
    ],
)
def test_what_has_to_draft_chains_and_why(changed: Any, reason: str) -> None:
    problem = v1_attention.layer_problem(changed)
    assert problem is not None
    assert reason in problem


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"uses_mrope": True}, "M-RoPE"), ({"dcp_world_size": 2}, "decode_context_parallel_size=2"), ({}, None)],
)
def test_what_a_whole_model_is_refused_trees_for(changed: dict[str, Any], reason: str | None) -> None:
    names = ["a", "b"]
    runner = SpeculativeRunner()
    vars(runner).update(
        {
            "uses_mrope": False,
            "dcp_world_size": 1,
            "compilation_config": SimpleNamespace(static_forward_context={name: layer() for name in names}),
            "attn_groups": [[SimpleNamespace(layer_names=names)]],
            **changed,
        }
    )
    found = runner._chain_reason()
    assert found is None if reason is None else reason in str(found)


TRITON = """
import numpy as np, torch
from types import SimpleNamespace
from functools import partial
from vllm_ext import v1_attention
from vllm_ext.v1_attention import TREES, TreeMetadata
from vllm_ext.v1_attention_triton import TreeTritonAttentionImpl
from vllm_ext.kernels.tree_attention import TreeRows, tree_attention

blocks, kv_heads, block_size, size, heads, rows, context = 6, 2, 16, 32, 4, 5, 37
# In vLLM's logical order; in memory tokens come before heads.
cache = torch.randn(blocks, block_size, kv_heads, 2 * size).transpose(1, 2)
impl = object.__new__(TreeTritonAttentionImpl)
impl.scale = size**-0.5
int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
tree = TreeRows(
    block_table=int32(3, 1, 5)[None], first_row=int32(0), num_rows=int32(rows), num_past=int32(0),
    context_len=int32(context),
    parents=int32(-1, 0, 0, 1, 3),
)
query = torch.randn(rows, heads, size)
output, expected = torch.zeros_like(query), torch.zeros_like(query)
v1_attention.tree_attention = partial(tree_attention, backend="triton")  # "auto" is numba for CPU tensors
impl.forward(None, query, None, None, cache, SimpleNamespace(**{TREES: TreeMetadata(tree, None, None)}), output)
tree_attention(
    query, cache[..., :size], cache[..., size:], expected, tree, impl.scale, backend="torch",
)
assert (output - expected).abs().max() < 2e-6
"""


def test_the_triton_backend_attends_over_vllms_cache() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TRITON],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
