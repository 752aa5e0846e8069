# SPDX-License-Identifier: Apache-2.0
"""Attention over draft trees: our kernel for these, vLLM's own backend for other rows.

The metadata of a step with trees carries a ``TreeMetadata``; without one the backends below are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_ext.engine import backend_overrides, tree_layers
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.block_mass import add_block_mass
from vllm_ext.kernels.kv_layouts import tokens_at
from vllm_ext.kernels.tree_attention import MAX_HEAD_SIZE, Scoring, TreeRows, tree_attention

# The attribute of vLLM's attention metadata that carries ours.
TREES = "vllm_ext_trees"
ASKED = "vllm_ext_asked"  # and which rows a KV method asks, some `vllm_ext.kernels.block_mass.AskedRows`


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """The trees of one step for one group of layers."""

    rows: TreeRows
    stock: Any  # vLLM's metadata of the other requests; None when there are none
    stock_rows: torch.Tensor | slice | None  # int64: their query rows
    # int64: those of the trees; None: the first of the query, in order
    own_rows: torch.Tensor | slice | None = None


class TreeAttention:
    """Mixin in front of a stock attention implementation."""

    # Whether chains and requests without drafts go by our kernel too, prompts left out.
    takes_decoding: ClassVar[bool] = False
    backend: ClassVar[Backend] = "auto"  # of our kernel
    scale: float
    attn_type: str

    _viewed: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
    _scoring: Scoring | None = None

    def scoring(self, layer: Any) -> Scoring:
        """The layer's window or chunk, soft-cap and sinks: found once, when its weights are there."""
        if self._scoring is None:
            sinks = getattr(self, "sinks", None)
            self._scoring = Scoring(
                tree_layers.window_of(self),
                float(getattr(self, "logits_soft_cap", None) or 0.0),
                None if sinks is None else sinks.detach().to(torch.float32).contiguous(),
                tree_layers.chunk_of(layer),
            )
        return self._scoring

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
        for asked in getattr(attn_metadata, ASKED, ()):
            add_block_mass(query, self.kv_views(layer, kv_cache)[0], asked, self.scale, self.backend)
        trees: TreeMetadata | None = getattr(attn_metadata, TREES, None)
        if trees is None:
            result: torch.Tensor = stock.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return result
        if trees.stock is not None:
            rows = trees.stock_rows
            part = torch.empty_like(output[rows])
            stock.forward(
                layer, query[rows], key[rows], value[rows], kv_cache, trees.stock, part, *args, **kwargs
            )
            output[rows] = part
        self.attend_trees(layer, query, kv_cache, output, trees, attn_metadata)
        return output

    def attend_trees(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        trees: TreeMetadata,
        attn_metadata: Any,
    ) -> None:
        """The trees' part of `forward`; their keys and values are in the cache."""
        views = self.kv_views(layer, kv_cache)
        tree_attention(query, *views, output, trees.rows, self.scale, self.backend, self.scoring(layer))

    @classmethod
    def choose(cls, layers: Sequence[Any], rows: Sequence[int] = ()) -> None:
        """At start-up, with caches bound: what is best found out on this device. Nothing here.

        Args:
            layers: vLLM's.
            rows: of one tree, those that steps will have; none: nobody knows.
        """


class OutOfGraphs:
    """Mixin in front of a stock metadata builder: a replayed graph would not see that a step of V1's has trees.

    A model that drafts chains keeps the stock builder's support.
    """

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """vLLM's ``AttentionMetadataBuilder.get_cudagraph_support``."""
        layers = vllm_config.compilation_config.static_forward_context
        if any(
            tree_layers.layer_problem(name, layer, vllm_config)
            for name, layer in layers.items()
            if isinstance(layer, AttentionLayerBase)
        ):
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        return AttentionCGSupport.NEVER


def register() -> None:
    """Register our backends instead of vLLM's. In the worker, before the model is built.

    On the CPU vLLM ignores an explicit CUSTOM backend, so CPU_ATTN itself is overridden; on CUDA the user's choice
    stands, and these two have trees.
    """
    backend_overrides.register(
        {
            "CPU_ATTN": "vllm_ext.engine.attention.cpu.TreeCPUAttentionBackend",
            "TRITON_ATTN": "vllm_ext.engine.attention.triton.TreeTritonAttentionBackend",
            "FLASH_ATTN": "vllm_ext.engine.attention.flash.TreeFlashAttentionBackend",
        }
    )


def head_problem(layer: Any) -> str | None:
    """`TreeAttention.layout_problem` of the backends that go by the Triton kernel."""
    size = layer.impl.head_size
    return None if size <= MAX_HEAD_SIZE else f"head size {size} (at most {MAX_HEAD_SIZE})"


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache of vLLM's own order, where they lie side by side."""
    head_size = kv_cache.shape[-1] // 2
    return kv_cache[..., :head_size], kv_cache[..., head_size:]


def warm_up(layers: Sequence[Any]) -> None:
    """Compile the kernels for layers' caches, once for each kind. Writes nothing into the caches."""
    for layer in {(layer.impl.head_size, layer.impl.scoring(layer).kind): layer for layer in layers}.values():
        _warm_up(layer)


def _warm_up(layer: Any) -> None:
    impl, kv_cache = layer.impl, layer.kv_cache
    shapes = [(1, 1)]
    if kv_cache.device.type == "cuda":
        # Each size of a tile, with a request's keys shared out and with more requests than it takes for that.
        group = impl.num_heads // impl.num_kv_heads
        shapes = [(requests, -(-tile // group)) for requests in (1, 512) for tile in (16, 32, 64)]
    keys, values = impl.kv_views(layer, kv_cache)
    for requests, rows in shapes:
        trees = chains(requests, rows, 0, kv_cache)
        query = torch.zeros(
            (requests * rows, impl.num_heads, impl.head_size), dtype=kv_cache.dtype, device=kv_cache.device
        )
        output = torch.empty_like(query)
        tree_attention(query, keys, values, output, trees, impl.scale, impl.backend, impl.scoring(layer))


def chains(requests: int, rows: int, context: int, kv_cache: torch.Tensor) -> TreeRows:
    """So many chains next to each other in the query, over whatever a cache of vLLM's own order holds."""
    device, num_blocks = kv_cache.device, kv_cache.shape[0]

    def ints(value: int) -> torch.Tensor:
        return torch.full((requests,), value, dtype=torch.int32, device=device)

    # Wide enough for keys to be shared out.
    width = -(-max(context + rows, 4096) // kv_cache.shape[2])
    table = torch.arange(requests * width, dtype=torch.int32, device=device) % num_blocks
    parent = torch.arange(-1, rows - 1, dtype=torch.int32, device=device)
    return TreeRows(
        table.view(requests, width),
        first_row=torch.arange(0, requests * rows, rows, dtype=torch.int32, device=device),
        num_rows=ints(rows),
        num_past=ints(0),
        context_len=ints(context),
        parents=parent.repeat(requests),
        max_rows=rows,
    )
