# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets (arXiv 2412.06464) over draft trees: a packed scan as Mamba-2's, in vLLM's layer.

Registered with vLLM instead of its own `QwenGatedDeltaNetAttention`: Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_ext.config import speculative
from vllm_ext.engine.recurrent.layers import TreeLayer, read_by_vllm, step_of
from vllm_ext.engine.recurrent.rows import RecurrentRows


class TreeGatedDeltaNet(TreeLayer, QwenGatedDeltaNetAttention):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM's layer; requests that decode go by our kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's way for drafts in chains, which does the layer's norm too.
        if speculative.from_vllm_config(get_current_vllm_config()) is not None:
            self.enable_fused_gdn_spec_decode = False

    @property
    def problem(self) -> str | None:
        """On CPUs and CUDA as of all; elsewhere vLLM has other ways through the layer, and ours is in none."""
        if current_platform.is_cpu() or current_platform.is_cuda():
            return super().problem
        return f"is a gated delta net, which {current_platform.device_type} does not take"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """See `TreeLayer`."""
        channels = (2 * self.key_dim + self.value_dim) // self.tp_size
        return channels, self.head_k_dim, self.head_v_dim

    @property
    def num_gates(self) -> int:
        """Of each value head what decays and what is written."""
        return 2 * int(self.num_v_heads // self.tp_size)

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM's projections around our operator.

        Args:
            hidden_states: ``[rows, hidden_size]``.
        """
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            *parts, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            mixed = torch.cat([part.flatten(1) for part in parts], dim=-1)
        else:
            of_value = self.value_dim // self.tp_size
            mixed, z = qkvz.split([qkvz.shape[1] - of_value, of_value], dim=-1)
            z = z.reshape(len(z), -1, self.head_v_dim)
            b, a = ba.chunk(2, dim=-1)
        out = torch.zeros_like(z)
        torch.ops.vllm_ext.gated_delta_net(mixed, b, a, out, self.prefix)
        projected: torch.Tensor = self._output_projection(out, z)
        return projected

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """vLLM's, on CUDA, over the rows that are not ours.

        Args:
            mixed_qkv: ``[rows, queries, keys and values]``, before the convolution.
            b: ``[rows, num_v_heads]``.
            a: likewise.
            core_attn_out: ``[rows, num_v_heads, head_v_dim]``, written.
        """
        self.core(super()._forward_core, mixed_qkv, b, a, core_attn_out)

    def core(self, theirs: Callable[..., None], *parts: torch.Tensor) -> None:
        """vLLM's core of a layer over the rows that are not ours, and ours over the others.

        Args:
            theirs: vLLM's; takes what is convolved, ``b``, ``a`` and what is written.
            parts: these.
        """
        rows = step_of(self.prefix)
        if rows is None:
            theirs(*parts)
            return
        mixed, b, a, out = parts
        read_by_vllm(self.prefix, rows, theirs, (mixed, b, a), out)
        out[rows.own] = self.trees(rows, mixed[rows.own].contiguous(), b[rows.own], a[rows.own])

    def trees(
        self, rows: RecurrentRows, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, num_v_heads, head_v_dim]`` of the rows that are ours.

        Args:
            rows: the step.
            mixed: ``[rows, queries, keys and values]``, before the convolution.
            b: ``[rows, num_v_heads]``: what is written, before the sigmoid.
            a: ``[rows, num_v_heads]``: what decays, before the gating.
        """
        self.begin(rows)
        packed = self.convolved(rows, mixed, self._conv_weight(), self.activation == "silu")
        b, a = self.packed(rows, torch.cat([b, a], dim=-1)).float().chunk(2, dim=-1)
        q, k, v = (part.squeeze(0).float() for part in self.rearrange_mixed_qkv(packed))
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        state = self.kv_cache[1]
        if current_platform.is_cpu():
            # vLLM's kernels for CPUs have keys before values in memory, whatever the shape says.
            state = state.view(*state.shape[:2], self.head_k_dim, self.head_v_dim).transpose(-1, -2)
        out = self.scanned(
            rows,
            q * self.head_k_dim**-0.5,
            k,
            v,
            -self.A_log.float().exp() * F.softplus(a + self.dt_bias.float()),
            b.sigmoid().contiguous(),
            state,
        )
        found: torch.Tensor = out[rows.verified].to(mixed.dtype)
        return found

    def _conv_weight(self) -> torch.Tensor:
        """``[channels, width]``; vLLM packs its own for some CPUs."""
        weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        found: torch.Tensor = (self.conv1d.weight if weight is None else weight).flatten(1)
        return found


def _core(mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    """vLLM's operator for CPUs, over the rows that are not ours."""

    def own(*values: torch.Tensor) -> None:
        torch.ops.vllm.cpu_gdn_attention_core(*values, layer_name)

    layer: Any = get_forward_context().no_compile_layers[layer_name]
    layer.core(own, mixed, b, a, out)


def _shape_only(
    mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    """For compiled graphs."""


@functools.cache
def register() -> None:
    """Have vLLM make our layer instead of its own."""
    library: Any = torch.library.Library("vllm_ext", "FRAGMENT")  # type: ignore[no-untyped-call]
    register.library = library  # type: ignore[attr-defined]  # what it has defined goes with it
    direct_register_custom_op(
        "gated_delta_net", _core, mutates_args=["out"], fake_impl=_shape_only, target_lib=library
    )
    QwenGatedDeltaNetAttention.register_oot(TreeGatedDeltaNet, name="QwenGatedDeltaNetAttention")
