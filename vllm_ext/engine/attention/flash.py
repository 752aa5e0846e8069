# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend, and trees.

FlashAttention has no masks, but all rows of a tree see all of the context. So it takes that, and our kernel continues
with the nodes (`attend_nodes`); or ours takes both, as with TRITON_ATTN, on the same cache. Which is faster is timed at
start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_ext.engine.attention.autotune import Fastest, seconds_in_graph
from vllm_ext.engine.attention.tree_backend import (
    OutOfGraphs,
    TreeAttention,
    TreeMetadata,
    chains,
    halves,
    head_problem,
)
from vllm_ext.engine.tree_layers import takes_trees
from vllm_ext.kernels.attend_nodes import attend_nodes
from vllm_ext.kernels.tree_attention import PLAIN, TreeRows, tree_attention

logger = init_logger("vllm.vllm_ext")

FLASH, TRITON = "flash", "triton"
# FlashAttention 4 has limits of its own on pages and heads.
VERSIONS = (2, 3)
# What is timed: requests, their rows where nobody says which there will be, tokens of context before each.
REQUESTS, ROWS, CONTEXTS = (1, 8, 32), (4, 16, 64), (512, 4096)

# Output and logarithms as `attend_nodes` takes them, by flash_attn_varlen_func's keyword arguments.
ContextAttention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class TreeFlashAttentionImpl(TreeAttention, FlashAttentionImpl):  # type: ignore[misc]
    """The stock kernel for all rows but a tree's."""

    # None: our kernel takes all trees.
    fastest: Fastest | None = None
    num_heads: int
    vllm_flash_attn_version: int

    @staticmethod
    def make_views(layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TreeAttention.make_views`."""
        return halves(kv_cache)

    @staticmethod
    def layout_problem(layer: Any) -> str | None:
        """See `TreeAttention.layout_problem`."""
        return head_problem(layer)

    @staticmethod
    def context_attention(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """FlashAttention's own function, which there is on CUDA alone."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        result: tuple[torch.Tensor, torch.Tensor] = flash_attn_varlen_func(**arguments)
        return result

    def attend_trees(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        trees: TreeMetadata,
        attn_metadata: Any,
    ) -> None:
        """See `TreeAttention.attend_trees`."""
        rows = trees.rows
        # A draft model's passes over a tree that grows have metadata of ours alone.
        if (
            self.fastest is not None
            and self.scoring(layer) == PLAIN  # FlashAttention has a window by row, not by depth
            and isinstance(attn_metadata, FlashAttentionMetadata)
            and self.fastest.form(len(rows.num_rows), rows.max_rows) == FLASH
        ):
            own = slice(len(rows.parents)) if trees.own_rows is None else trees.own_rows
            self.attend_in_two(
                query,
                query[own],
                self.kv_views(layer, kv_cache),
                output,
                rows,
                attn_metadata.max_seq_len,
                attn_metadata.max_num_splits,
            )
        else:
            super().attend_trees(layer, query, kv_cache, output, trees, attn_metadata)

    def attend_in_two(
        self,
        query: torch.Tensor,
        own: torch.Tensor,
        views: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        rows: TreeRows,
        max_seq_len: int,
        num_splits: int,
    ) -> None:
        """FlashAttention over the contexts, then the nodes.

        Args:
            query: of the step.
            own: the trees' rows of it, in order; strided as query may be.
            views: of the cache.
            output: written to at the trees' rows.
            rows: the trees; every row has a query.
            max_seq_len: no request has more tokens.
            num_splits: FlashAttention's; 0: as it likes.
        """
        # Tokens before heads, and strides that its copies by descriptor take.
        keys, values = (canonicalize_singleton_dim_strides(view.transpose(1, 2)) for view in views)
        context_output, context_lse = self.context_attention(
            q=own,
            k=keys,
            v=values,
            out=torch.empty_like(own),
            cu_seqlens_q=rows.row_start,
            max_seqlen_q=min(rows.max_rows, len(own)),
            seqused_k=rows.context_len,
            max_seqlen_k=max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=rows.block_table,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
            num_splits=num_splits,
        )
        attend_nodes(query, *views, context_output, context_lse, output, rows, self.scale, self.backend)

    @classmethod
    def choose(cls, layers: Sequence[Any], rows: Sequence[int] = ROWS) -> None:
        """See `TreeAttention.choose`: time both forms on the first layer, for all."""
        layers = [
            layer for layer in layers if isinstance(layer.impl, cls) and layer.impl.scoring(layer) == PLAIN
        ]
        if not layers or layers[0].kv_cache.device.type != "cuda":
            return
        impl = layers[0].impl
        if impl.vllm_flash_attn_version not in VERSIONS:
            logger.info(
                "vllm-ext: FlashAttention %s takes no part in tree attention (%s do)",
                impl.vllm_flash_attn_version,
                " and ".join(map(str, VERSIONS)),
            )
            return
        fastest = Fastest((FLASH, TRITON), impl.timer(layers[0]), REQUESTS, rows, CONTEXTS)
        logger.info("vllm-ext: microseconds of tree attention by requests x rows: %s", fastest)
        for layer in layers:
            layer.impl.fastest = fastest

    def timer(self, layer: Any) -> Callable[[str, int, int, int], float]:
        """What `Fastest` asks: seconds of a form over this layer's cache, whatever it holds."""
        views = self.kv_views(layer, layer.kv_cache)

        def seconds(form: str, requests: int, rows: int, context: int) -> float:
            trees = chains(requests, rows, context, layer.kv_cache)
            query = torch.zeros(
                (requests * rows, self.num_heads, views[0].shape[3]),
                dtype=views[0].dtype,
                device=views[0].device,
            )
            output = torch.empty_like(query)
            if form == FLASH:
                return seconds_in_graph(
                    lambda: self.attend_in_two(query, query, views, output, trees, context + rows, 0)
                )
            return seconds_in_graph(
                lambda: tree_attention(query, *views, output, trees, self.scale, self.backend)
            )

        return seconds


class TreeFlashAttentionMetadataBuilder(OutOfGraphs, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """See `OutOfGraphs`."""


@takes_trees
class TreeFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with the two above."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return TreeFlashAttentionMetadataBuilder
