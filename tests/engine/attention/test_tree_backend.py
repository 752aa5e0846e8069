# SPDX-License-Identifier: Apache-2.0
"""Trees beside CUDA graphs, and the forward passes of CUDA's backends through the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from attention_layers import layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.attention.autotune import Fastest
from vllm_ext.engine.attention.flash import TreeFlashAttentionImpl, TreeFlashAttentionMetadataBuilder
from vllm_ext.engine.attention.triton import TreeTritonAttentionMetadataBuilder

TRITON = """
import numpy as np, torch
from types import SimpleNamespace
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.attention.tree_backend import TREES, TreeMetadata
from vllm_ext.engine.attention.triton import TreeTritonAttentionImpl
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
tree_backend.TreeAttention.backend = "triton"  # "auto" is numba for CPU tensors
impl.forward(None, query, None, None, cache, SimpleNamespace(**{TREES: TreeMetadata(tree, None, None)}), output)
tree_attention(
    query, cache[..., :size], cache[..., size:], expected, tree, impl.scale, backend="torch",
)
assert (output - expected).abs().max() < 2e-6
"""


# Three requests: two trees, of which the second comes after a prompt's rows. FlashAttention's place has its contract.
FLASH = """
import sys, torch
sys.path.insert(0, "tests")
from types import SimpleNamespace
import flash_attention
from vllm_ext.engine.attention.autotune import Fastest
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
from vllm_ext.engine.attention.tree_backend import TREES, TreeMetadata
from vllm_ext.engine.attention.flash import FLASH, TRITON, TreeFlashAttentionImpl
from vllm_ext.kernels.tree_attention import TreeRows, tree_attention

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)  # torch.empty is NaN
blocks, kv_heads, block_size, size, heads = 12, 2, 16, 32, 4
cache = torch.randn(blocks, block_size, kv_heads, 2 * size).transpose(1, 2)
int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
table = torch.stack([int32(3, 1, 5), int32(0, 2, 4), int32(7, 9, 11)])
parents = [[-1, 0, 0, 1, 3], [-1, 0, 1, 1]]
query = torch.randn(5 + 7 + 4 + 3, heads, size)  # a tree, a prompt, a tree, padding
trees = TreeRows(table[[0, 2]], int32(0, 12), int32(5, 4), int32(0, 0), int32(37, 0), int32(*parents[0], *parents[1]))
prompt = torch.arange(5, 12)
own = torch.tensor([*range(5), *range(12, 16)])

def stock(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
    assert attn_metadata == "stock"
    return output.copy_(query + 1)

FlashAttentionImpl.forward = stock
impl = object.__new__(TreeFlashAttentionImpl)
impl.scale, impl.vllm_flash_attn_version, impl.head_size = size**-0.5, 3, size
TreeFlashAttentionImpl.backend = "triton"  # "auto" is numba for CPU tensors
calls = []

def context_attention(**arguments):
    calls.append(arguments)
    return flash_attention.flash_attn_varlen_func(**arguments)

TreeFlashAttentionImpl.context_attention = staticmethod(context_attention)
metadata = FlashAttentionMetadata(
    num_actual_tokens=16, max_query_len=7, query_start_loc=int32(0, 5, 12, 16), max_seq_len=64,
    seq_lens=int32(42, 20, 4), block_table=table, slot_mapping=torch.zeros(16, dtype=torch.int64),
)
expected = torch.full_like(query, 7.0)
tree_attention(query, cache[..., :size], cache[..., size:], expected, trees, impl.scale, backend="torch")
expected[prompt] = query[prompt] + 1
# By whom trees are taken: FlashAttention and our kernel, ours alone, ours before anything was timed.
for form in (FLASH, TRITON, None):
    impl.fastest = form and Fastest((form,), lambda *_: 1.0, [1], [1], [1])
    setattr(metadata, TREES, TreeMetadata(trees, "stock", prompt, own))
    output = torch.full_like(query, 7.0)
    impl.forward(None, query, query, query, cache, metadata, output)
    assert (output - expected).abs().max() < 2e-6, form
    assert len(calls) == 1
assert calls[0]["max_seqlen_k"] == 64 and calls[0]["max_seqlen_q"] == 9 and calls[0]["fa_version"] == 3
# Trees alone, the first rows in order; and a draft model's pass, whose metadata is ours alone.
alone = TreeRows(table[:1], int32(0), int32(5), int32(0), int32(37), int32(*parents[0]), max_rows=5)
for made in (metadata, SimpleNamespace()):
    impl.fastest = Fastest((FLASH,), lambda *_: 1.0, [1], [1], [1])
    setattr(made, TREES, TreeMetadata(alone, None, None))
    output = torch.full_like(query, 7.0)
    impl.forward(None, query, query, query, cache, made, output)
    assert (output[:5] - expected[:5]).abs().max() < 2e-6
    assert (output[5:] == 7).all()
assert len(calls) == 2 and calls[1]["max_seqlen_q"] == 5
"""


@pytest.mark.parametrize("script", [TRITON, FLASH], ids=["TRITON_ATTN", "FLASH_ATTN"])
def test_the_backends_of_cuda_attend_over_vllms_cache(script: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_form_is_the_fastest_of_the_nearest_size() -> None:
    times = {
        (1, 4): {"flash": 3.0, "triton": 2.0},
        (1, 64): {"flash": 4.0, "triton": 9.0},
        (32, 4): {"flash": 5.0, "triton": 5.0},
        (32, 64): {"flash": 50.0, "triton": 49.0},
    }
    asked = []

    def seconds(form: str, requests: int, rows: int, context: int) -> float:
        asked.append((form, requests, rows, context))
        slower = 3.0 if context == 4096 and form == "triton" and requests == 32 and rows == 64 else 1.0
        return times[requests, rows][form] * slower * 1e-6

    fastest = Fastest(("flash", "triton"), seconds, [1, 32], [4, 64], [512, 4096])
    assert len(asked) == 16
    assert fastest.form(1, 1) == "triton"
    assert fastest.form(1, 4) == "triton"
    assert fastest.form(1, 40) == "flash"
    assert fastest.form(3, 129) == "flash"
    assert fastest.form(8, 129) == "flash"  # behind much context; behind little the other is
    assert fastest.form(256, 2) == "flash"  # as fast: the first
    assert len(asked) == 16  # once
    assert str(fastest).startswith("1x4: flash 3/3 triton 2/2, 1x64: flash 4/4 triton 9/9")


class Impl(TreeFlashAttentionImpl):
    def __init__(self, version: int) -> None:
        self.vllm_flash_attn_version = version

    def timer(self, layer: Any) -> Any:
        return lambda form, *_: {"flash": 2.0, "triton": 1.0}[form]


def cached_layer(version: int, device: str) -> SimpleNamespace:
    return SimpleNamespace(impl=Impl(version), kv_cache=SimpleNamespace(device=SimpleNamespace(type=device)))


def test_what_is_timed_and_for_whom() -> None:
    layers = [cached_layer(3, "cuda"), cached_layer(3, "cuda"), SimpleNamespace(impl=object())]
    Impl.choose(layers)
    assert layers[0].impl.fastest is layers[1].impl.fastest is not None
    assert layers[0].impl.fastest.form(1, 1) == "triton"
    for other in (cached_layer(4, "cuda"), cached_layer(3, "cpu")):
        Impl.choose([other])
        assert other.impl.fastest is None


@pytest.mark.parametrize("builder", [TreeTritonAttentionMetadataBuilder, TreeFlashAttentionMetadataBuilder])
def test_trees_stay_out_of_graphs_and_chains_in_them(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(AttentionLayerBase):  # type: ignore[misc]
        def __init__(self, **features: Any) -> None:
            for name, value in vars(layer(**features)).items():
                setattr(self, name, value)

        def get_attn_backend(self) -> Any: ...  # abstract; see __init__

        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

    def support(*layers: Any) -> AttentionCGSupport:
        context = dict(enumerate((*layers, torch.nn.Linear(1, 1))))
        compilation = SimpleNamespace(static_forward_context=context)
        config = SimpleNamespace(compilation_config=compilation, num_speculative_tokens=8)
        return builder.get_cudagraph_support(config, None)

    assert support(Attention(), Attention()) == AttentionCGSupport.NEVER
    stock = builder.__mro__[2]
    assert stock.__module__.startswith("vllm.")
    assert support(Attention(), Attention(alibi_slopes=[0.5])) == stock._cudagraph_support
    assert stock._cudagraph_support != AttentionCGSupport.NEVER


def test_our_backends_stand_in_for_vllms() -> None:
    kept = [backend for backend in AttentionBackendEnum if backend.is_overridden()]
    try:
        tree_backend.register()
        for backend, name in (
            (AttentionBackendEnum.TRITON_ATTN, "TRITON_ATTN"),
            (AttentionBackendEnum.FLASH_ATTN, "FLASH_ATTN"),
        ):
            ours = backend.get_class()
            assert ours.__module__.startswith("vllm_ext.")
            assert ours.get_name() == name
            assert issubclass(ours.get_impl_cls(), tree_backend.TreeAttention)
    finally:
        for backend in AttentionBackendEnum:
            if backend.is_overridden() and backend not in kept:
                backend.clear_override()
