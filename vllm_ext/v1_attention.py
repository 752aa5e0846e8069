# SPDX-License-Identifier: Apache-2.0
"""Attention over draft trees: our kernel for these, vLLM's own backend for other rows.

The metadata of a step with trees carries a ``TreeMetadata``; without one the backends below are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_ext.kernels.kv_layouts import tokens_at
from vllm_ext.kernels.tree_attention import TreeRows, tree_attention

# The attribute of vLLM's attention metadata that carries ours.
TREES = "vllm_ext_trees"


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """The trees of one step for one group of layers."""

    rows: TreeRows
    stock: Any  # vLLM's metadata of the other requests; None when there are none
    stock_rows: torch.Tensor | None  # int64: their query rows


class TreeAttention:
    """Mixin in front of a stock attention implementation."""

    # Whether chains and requests without drafts go by our kernel too, prompts left out.
    takes_decoding: ClassVar[bool] = False
    scale: float
    attn_type: str

    _viewed: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    def kv_views(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value cache of a layer as views that `tree_attention` takes: made once for each cache."""
        if self._viewed is None or self._viewed[0] is not kv_cache:
            self._viewed = kv_cache, self.make_views(layer, kv_cache)
        return self._viewed[1]

    @staticmethod
    def make_views(layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value cache of a layer as views that `tree_attention` takes."""
        raise NotImplementedError

    @classmethod
    def kv_mover(cls, layers: Sequence[Any]) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """What copies the keys and values of some tokens between slots of each layer: by the backend's own writer.

        Args:
            layers: vLLM's, each with this class as its implementation and a cache of its own.

        Returns:
            A function of source and target, int ``[num]``: each a block times the block size, plus the token's place in
            it. A slot may be both. Good for as long as the layers have these caches.
        """

        def move(source: torch.Tensor, target: torch.Tensor) -> None:
            for layer in layers:
                # Copies.
                moved = [tokens_at(cache, source) for cache in layer.impl.kv_views(layer, layer.kv_cache)]
                layer.impl.do_kv_cache_update(layer, *moved, layer.kv_cache, target)

        return move

    @staticmethod
    def layout_problem(layer: Any) -> str | None:
        """What `make_views` cannot view in a layer's cache, or None."""
        return None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """vLLM's ``AttentionImpl.forward``."""
        stock: Any = super()
        trees: TreeMetadata | None = getattr(attn_metadata, TREES, None)
        if trees is None:
            result: torch.Tensor = stock.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return result
        if trees.stock is not None:
            rows = trees.stock_rows
            part = output.new_empty((len(rows), *output.shape[1:]))  # type: ignore[arg-type]
            stock.forward(
                layer, query[rows], key[rows], value[rows], kv_cache, trees.stock, part, *args, **kwargs
            )
            output[rows] = part
        tree_attention(query, *self.kv_views(layer, kv_cache), output, trees.rows, self.scale)
        return output


def register() -> None:
    """Put our backends in the place of vLLM's. In the worker, before the model is built.

    By name: the one of another platform may not import. On the CPU vLLM ignores an explicit CUSTOM backend, so
    CPU_ATTN itself is overridden; on CUDA the user's choice stands, and TRITON_ATTN is the one with trees.
    """
    register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_ext.v1_attention_cpu.TreeCPUAttentionBackend")
    register_backend(
        AttentionBackendEnum.TRITON_ATTN, "vllm_ext.v1_attention_triton.TreeTritonAttentionBackend"
    )


def warm_up(layer: Any) -> None:
    """Compile the kernel for a layer's cache: one row over an empty context. Writes nothing into the cache."""
    impl, kv_cache = layer.impl, layer.kv_cache
    query = torch.zeros((1, impl.num_heads, impl.head_size), dtype=kv_cache.dtype, device=kv_cache.device)
    zero = torch.zeros(1, dtype=torch.int32, device=kv_cache.device)
    rows = TreeRows(
        zero[None], first_row=zero, num_rows=zero + 1, num_past=zero, context_len=zero, parents=zero - 1
    )
    key_cache, value_cache = impl.kv_views(layer, kv_cache)
    tree_attention(query, key_cache, value_cache, torch.empty_like(query), rows, impl.scale)


def layer_problem(layer: Any) -> str | None:
    """Why a layer cannot attend over trees, or None."""
    impl = getattr(layer, "impl", None)
    if hasattr(impl, "codec"):
        return None  # `v1_kv_cache` has refused what it cannot do
    if not isinstance(impl, TreeAttention):
        return f"{type(impl or layer).__name__} has no tree attention (on CUDA, --attention-backend TRITON_ATTN has)"
    features: dict[str, Any] = {
        "sliding window": getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1)),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "logits soft-cap": bool(getattr(impl, "logits_soft_cap", None)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "quantised KV cache": getattr(impl, "kv_cache_dtype", "auto") not in ("auto", "float16", "bfloat16"),
        "attention that is not a decoder's": impl.attn_type != AttentionType.DECODER,
    }
    problem = next((feature for feature, present in features.items() if present), impl.layout_problem(layer))
    return problem and f"{problem} is not supported by the tree attention kernel"
