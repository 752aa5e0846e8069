# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention backend, and trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_ext.engine.attention.tree_backend import TreeAttention
from vllm_ext.engine.tree_layers import takes_trees
from vllm_ext.kernels.kv_layouts import amx_layout, sizes, vec_layout
from vllm_ext.kernels.kv_move import Places, move_tokens

# By vLLM's names.
LAYOUTS = {"vec": vec_layout, "vec16": vec_layout, "amx": amx_layout}


class TreeCPUAttentionImpl(TreeAttention, CPUAttentionBackendImpl):  # type: ignore[misc]
    """The stock kernel for prompts, ours for all that decodes.

    The stock kernel rounds the weights of 16-bit dtypes to these, ours does not: were a row's kernel to depend on what
    was drafted, so would which of two near tokens is put out, and text that is asked for twice would part from
    itself more often. In ours a row's value does not depend on the rows beside it.
    """

    takes_decoding: ClassVar[bool] = True

    @staticmethod
    def make_views(layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TreeAttention.make_views`: vLLM has put the name of the layout on the layer."""
        return LAYOUTS[layer.isa](kv_cache)

    @classmethod
    def kv_mover(cls, layers: Sequence[Any]) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """See `TreeAttention.kv_mover`; all layers in one call."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for layer in layers:
            for view in layer.impl.kv_views(layer, layer.kv_cache):
                kinds.setdefault((view.dtype, sizes(view)), []).append(view)
        all_places = [Places(views) for views in kinds.values()]

        def move(source: torch.Tensor, target: torch.Tensor) -> None:
            slots = source.flatten().long().numpy(), target.flatten().long().numpy()
            for places in all_places:
                move_tokens(places, *slots)

        nothing = torch.zeros(0, dtype=torch.int64)
        move(nothing, nothing)  # compiles what would else stall the first step that moves
        return move

    @staticmethod
    def layout_problem(layer: Any) -> str | None:
        """See `TreeAttention.layout_problem`."""
        return None if layer.isa in LAYOUTS else f"KV cache layout {layer.isa!r}"


@takes_trees
class TreeCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with the implementation above."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return TreeCPUAttentionImpl
