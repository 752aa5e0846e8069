# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv 2405.21060) over draft trees: STree's packed scan (arXiv 2505.14969) in vLLM's layer.

Registered with vLLM instead of its own `MambaMixer2`: Mamba-2, Granite 4, Nemotron-H, Falcon-H1, Bamba and others.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from vllm_ext.engine.recurrent.layers import TreeLayer, read_by_vllm, step_of
from vllm_ext.engine.recurrent.rows import RecurrentRows


class TreeMambaMixer2(TreeLayer, MambaMixer2):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM's layer; requests that decode go by our kernels."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """See `TreeLayer`."""
        return self.tped_conv_size, self.ssm_state_size, self.head_dim

    @property
    def num_gates(self) -> int:
        """The time steps of the heads."""
        return int(self.tped_dt_size)

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """vLLM's, over the rows that are not ours.

        Args:
            projected_states: ``[rows, gate, convolution's input and time steps]``.
            output: ``[rows, num_heads * head_dim]``, written.
        """
        rows = step_of(self.prefix)
        if rows is None:
            super().conv_ssm_forward(projected_states, output)
            return
        read_by_vllm(self.prefix, rows, super().conv_ssm_forward, (projected_states,), output)
        output[rows.own] = self._trees(rows, projected_states[rows.own, self.tped_intermediate_size :])

    def _trees(self, rows: RecurrentRows, inputs: torch.Tensor) -> torch.Tensor:
        """``[rows, num_heads * head_dim]``."""
        self.begin(rows)
        conv_in, dt = torch.split(inputs, [self.tped_conv_size, self.tped_dt_size], dim=-1)
        silu = self.activation in ("silu", "swish")
        mixed = self.convolved(rows, conv_in, self.conv_weights, silu)
        x, k, q = self.split_hidden_states_B_C_fn(mixed)
        heads = self.tped_dt_size
        dt = F.softplus(self.packed(rows, dt).float() + self.dt_bias.float())
        x = x.float().view(rows.num_packed, heads, self.head_dim)
        q, k = (part.float().view(rows.num_packed, -1, self.ssm_state_size) for part in (q, k))
        out = self.scanned(rows, q, k, x * dt[:, :, None], dt * self.A, None, self.kv_cache[1])
        own = rows.verified
        out = out[own] + x[own] * self.D.float()[:, None]
        found: torch.Tensor = out.flatten(1).to(inputs.dtype)
        return found


@functools.cache
def register() -> None:
    """Have vLLM make our layer instead of its own."""
    MambaMixer2.register_oot(TreeMambaMixer2, name="MambaMixer2")
