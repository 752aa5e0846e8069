# SPDX-License-Identifier: Apache-2.0
"""Which layers take trees: those of which each part is exactly one that we know, vLLM's own derivations not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from attention_layers import SPEC, config, group, layer
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.model_executor.layers.attention.static_sink_attention import create_static_sink_attention_backend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_ext.engine import tree_layers
from vllm_ext.engine.attention import flash_captured, triton_captured
from vllm_ext.engine.attention.cpu import TreeCPUAttentionBackend
from vllm_ext.engine.attention.flash import TreeFlashAttentionBackend
from vllm_ext.engine.attention.triton import TreeTritonAttentionBackend
from vllm_ext.engine.draft_model.passes import DraftPasses
from vllm_ext.engine.v1.model_runner import SpeculativeRunner
from vllm_ext.engine.v2.model_runner import SpeculativeRunner as V2Runner
from vllm_ext.kernels.tree_attention import Scoring

OURS = [
    TreeCPUAttentionBackend,
    TreeTritonAttentionBackend,
    TreeFlashAttentionBackend,
    triton_captured.TreeTritonAttentionBackend,
    flash_captured.TreeFlashAttentionBackend,
]
SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def problem_of(made: Any) -> str | None:
    return tree_layers.layer_problem("a", made, config(a=made))


@pytest.mark.parametrize("backend", OURS)
def test_a_plain_decoder_layer_takes_trees(backend: Any) -> None:
    assert problem_of(layer(backend)) is None
    assert problem_of(layer(backend, sliding_window=(-1, -1))) is None
    padded = replace(SPEC, block_size=32, page_size_padded=1 << 20, max_tp_shards=2)
    assert problem_of(layer(backend, padded)) is None
    for window in (9, (8, 0)):
        windowed = SlidingWindowSpec(**SIZES, sliding_window=9)
        assert problem_of(layer(backend, windowed, sliding_window=window)) is None
        kept_alike = replace(SPEC, sliding_window=9)
        assert problem_of(layer(backend, kept_alike, sliding_window=window)) is None
    assert problem_of(layer(backend, logits_soft_cap=30.0, sinks=torch.zeros(4))) is None
    both = config(a=layer(backend), b=layer(backend))
    assert tree_layers.model_problem(both, [[group(backend)]]) is None


def in_chunks(backend: Any = TreeTritonAttentionBackend, chunk: int = 64, **changes: Any) -> Any:
    """A layer as vLLM's ``ChunkedLocalAttention``."""
    spec = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=chunk)
    derived = create_chunked_local_attention_backend(backend, chunk)
    made = layer(derived, **{"spec": spec, **changes})
    made.attention_chunk_size = chunk
    return made


@pytest.mark.parametrize("backend", OURS)
def test_a_layer_in_chunks_takes_trees(backend: Any) -> None:
    """Llama 4's: by the chunk of its own, whatever its group's cache is like."""
    made = in_chunks(backend)
    assert problem_of(made) is None
    assert made.impl.scoring(made) == Scoring(chunk=64)
    of_chunks = partial(group, made.get_attn_backend())
    for spec in (made.get_kv_cache_spec(None), replace(SPEC, attention_chunk_size=64), SPEC):
        assert tree_layers.model_problem(config(a=made, b=made), [[of_chunks(kv_cache_spec=spec)]]) is None
    other = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=128)
    problem = tree_layers.model_problem(config(a=made, b=made), [[of_chunks(kv_cache_spec=other)]])
    assert "attention_chunk_size=128, where the layer's is 64" in str(problem)
    stock = of_chunks(builder=backend.get_builder_cls(), kv_cache_spec=SPEC)
    assert "is not ChunkedLocalAttentionBuilder" in str(
        tree_layers.model_problem(config(a=made, b=made), [[stock]])
    )


def test_a_full_layer_beside_those_in_chunks_takes_trees() -> None:
    """Where vLLM keeps all layers' blocks alike, they have one cache spec."""
    layers = config(a=layer(), b=layer())
    assert (
        tree_layers.model_problem(layers, [[group(kv_cache_spec=replace(SPEC, attention_chunk_size=64))]])
        is None
    )


def test_a_backend_of_other_chunks_or_other_making_drafts_chains() -> None:
    made = in_chunks()
    made.attention_chunk_size = 128
    assert "ChunkedLocalAttention_64_" in str(problem_of(made))
    copied: Any = type("Copied", (TreeTritonAttentionBackend,), vars(in_chunks().get_attn_backend()).copy())
    made = in_chunks()
    made.get_attn_backend = lambda: copied
    assert "Copied is derived from" in str(problem_of(made))
    twice = create_chunked_local_attention_backend(in_chunks().get_attn_backend(), 64)
    made.get_attn_backend = lambda: twice
    assert "derived from" in str(problem_of(made))


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_which_layouts_take_trees(isa: str) -> None:
    assert problem_of(layer(TreeCPUAttentionBackend, isa=isa)) is None


@pytest.mark.parametrize("backend", OURS)
def test_what_vllm_derives_from_a_backend_drafts_chains(backend: Any) -> None:
    """Of a layer that says nothing of chunks those too."""
    made: Any
    for made, name in (
        (create_chunked_local_attention_backend(backend, 128), "ChunkedLocalAttention_128_"),
        (create_static_sink_attention_backend(backend, 64), "StaticSink_"),
        (create_encoder_only_attention_backend(backend), "EncoderOnlyAttention_"),
        (create_fast_prefill_custom_backend("FastPrefill", backend), "FastPrefill"),
    ):
        for problem in (
            problem_of(layer(made)),
            # A group whose layers say that they have the backend itself.
            tree_layers.model_problem(config(a=layer(backend), b=layer(backend)), [[group(made)]]),
        ):
            assert problem is not None
            assert problem.startswith("layer a: ")
            assert f"{name}{backend.__name__}" in problem
            assert f"derived from {backend.__name__}" in problem


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (layer(sliding_window=8), "sliding window of 8 tokens is smaller than a tree of 9 rows"),
        (layer(sliding_window=(7, 0)), "sliding window of 8 tokens"),
        (layer(alibi_slopes=[0.5]), "ALiBi"),
        (layer(kv_cache_dtype="fp8"), "quantised KV cache"),
        (layer(attn_type="encoder_only", spec=None), "not a decoder's"),
        (layer(use_mm_prefix=True), "both ways over images"),
        (layer(head_size=512), "head size 512 (at most 256)"),
        (layer(TreeFlashAttentionBackend, head_size=512), "head size 512 (at most 256)"),
        (layer(triton_captured.TreeTritonAttentionBackend, head_size=512), "head size 512"),
        (layer(TreeCPUAttentionBackend, isa="neon"), "layout 'neon'"),
        (layer(impl=TritonAttentionImpl), "implementation TritonAttentionImpl is not TreeTriton"),
        (layer(spec=RSWASpec(**SIZES, rswa_window=64)), "RSWASpec"),
        (layer(spec=SinkFullAttentionSpec(**SIZES, sink_len=64)), "SinkFullAttentionSpec"),
        (
            layer(spec=SlidingWindowSpec(**SIZES, sliding_window=64, extra_retained_tokens=3)),
            "extra_retained_tokens=3",
        ),
        (
            layer(spec=ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)),
            "attention_chunk_size=64, where the layer's is 0",
        ),
        (in_chunks(chunk=8), "its chunk of 8 tokens is smaller than a tree of 9 rows"),
        (in_chunks(sliding_window=(63, 0)), "a sliding window in chunks"),
        (in_chunks(kv_cache_dtype="fp8"), "quantised KV cache"),
        (in_chunks(impl=TritonAttentionImpl), "implementation TritonAttentionImpl is not TreeTriton"),
        (layer(spec=replace(SPEC, head_size_v=32)), "head_size_v=32"),
        (layer(spec=replace(SPEC, tokens_per_state=2)), "tokens_per_state=2"),
        (
            SimpleNamespace(impl=object(), get_attn_backend=lambda: FlexAttentionBackend),
            "FLEX_ATTENTION has no tree attention (on CUDA, pass --attention-backend FLASH_ATTN or TRITON_ATTN",
        ),
    ],
)
def test_what_has_to_draft_chains_and_why(changed: Any, reason: str) -> None:
    problem = problem_of(changed)
    assert problem is not None
    assert problem.startswith("layer a: ")
    assert reason in problem


@pytest.mark.parametrize(
    ("impl", "backend"), [({"impl": object()}, TritonMLABackend), ({}, Mamba1AttentionBackend)]
)
def test_no_other_backend_is_advised_where_none_would_do(impl: Any, backend: Any) -> None:
    problem = problem_of(SimpleNamespace(get_attn_backend=lambda: backend, **impl))
    assert str(problem).endswith(f"{backend.get_name()} has no tree attention")


@pytest.mark.parametrize("backend", OURS)
def test_batch_invariance_drafts_chains(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_ATTN keeps no copy of the flag."""
    from vllm import envs

    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in str(problem_of(layer(backend)))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"builder": TritonAttentionMetadataBuilder}, "metadata builder TritonAttentionMetadataBuilder"),
        ({"kv_cache_spec": replace(SPEC, head_size_v=32)}, "head_size_v=32"),
        ({"kernel_block_size": 16}, "kernel blocks of 16 tokens"),
    ],
)
def test_what_vllm_has_made_of_a_group_is_looked_at(changed: dict[str, Any], reason: str) -> None:
    problem = tree_layers.model_problem(config(a=layer(), b=layer()), [[group(**changed)]])
    assert problem is not None
    assert problem.startswith("layer a: ")
    assert reason in problem


def test_one_layer_of_many_is_enough_and_is_named() -> None:
    sinks = create_static_sink_attention_backend(TreeTritonAttentionBackend, 64)
    layers = config(a=layer(), b=layer(), c=layer(sinks))
    groups = [[group()], [group(sinks, layer_names=["c"])]]
    assert str(tree_layers.model_problem(layers, groups)).startswith("layer c: ")


@pytest.mark.parametrize("runner_class", [SpeculativeRunner, V2Runner], ids=["V1", "V2"])
@pytest.mark.parametrize(
    ("changed", "of_model", "reason"),
    [
        ({"uses_mrope": True}, {"uses_mrope": True}, None),
        (
            {"uses_mrope": True},
            {
                "uses_mrope": True,
                "multimodal_config": SimpleNamespace(is_multimodal_pruning_enabled=lambda: True),
            },
            "M-RoPE over pruned videos (video_pruning_rate)",
        ),
        (
            {"dcp_world_size": 2, "dcp_size": 2},
            {},
            "decode_context_parallel_size=2",
        ),
        ({}, {"rswa_window": 512}, "reference sliding window attention (rswa_window=512)"),
        ({}, {}, None),
    ],
)
def test_what_a_whole_model_is_refused_trees_for(
    runner_class: Any, changed: dict[str, Any], of_model: dict[str, Any], reason: str | None
) -> None:
    runner: Any = object.__new__(runner_class)
    vllm_config = config({"uses_mrope": False, **of_model}, a=layer(), b=layer())
    vars(runner).update(
        {
            "uses_mrope": False,
            "dcp_world_size": 1,
            "dcp_size": 1,
            "pcp_manager": None,
            "model_state": None,
            "model_config": vllm_config.model_config,
            "vllm_config": vllm_config,
            "attn_groups": [[group()]],
            **changed,
        }
    )
    found = runner._chain_reason()
    assert found is None if reason is None else reason in str(found)


def test_where_chains_would_be_wrong_too_the_start_is_refused() -> None:
    backend = create_encoder_only_attention_backend(TreeTritonAttentionBackend)
    prefix_lm = layer(backend, replace(SPEC, non_causal=True))
    with pytest.raises(
        ValueError, match=r"layer a: .*not causal \(non_causal=True\).*Remove --speculative-config"
    ):
        tree_layers.model_problem(config(a=prefix_lm), [[group(backend, layer_names=["a"])]])


def test_a_draft_model_that_cannot_grow_trees_is_refused_with_the_layer() -> None:
    class Passes(DraftPasses):
        what_next = "Leave it out."

        def load(self, target: Any) -> None: ...

    sinks = layer(create_static_sink_attention_backend(TreeTritonAttentionBackend, 64))
    made: Any = Passes
    made.__abstractmethods__ = frozenset()
    passes = object.__new__(made)
    passes._target_config, passes._what, passes.layers = config(a=sinks), "draft model 'x'", ["a"]
    with pytest.raises(ValueError, match=r"draft model 'x': layer a: .*StaticSink_.*Leave it out"):
        passes.bind(SimpleNamespace())
