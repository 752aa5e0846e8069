# SPDX-License-Identifier: Apache-2.0
"""What recurrent layers of ours share: a state for each request instead of one for each draft, and who reads a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform

from vllm_ext.config import speculative
from vllm_ext.engine.recurrent.rows import RecurrentRows
from vllm_ext.kernels.recurrent_trees import recurrent_trees
from vllm_ext.kernels.tree_conv import tree_conv


class TreeLayer:
    """Mixin in front of vLLM's layer, which keeps ``num_spec`` inputs of its convolution beside the last ones.

    Without a method of ours in the engine it is vLLM's.
    """

    # vLLM's.
    prefix: str
    kv_cache: tuple[torch.Tensor, ...]
    num_spec: int
    conv1d: Any

    gates: torch.Tensor  # [num_blocks, 1 + num_spec, ...] of the last step's rows, for those that are pending

    @property
    def problem(self) -> str | None:
        """Why its decoding is not ours, or None."""
        if not current_platform.is_cpu():
            return None
        from vllm_ext.kernels.numba_vectors import LANES

        if any(size % LANES for size in self.sizes):
            return f"has channels, keys and values of {self.sizes} elements, where a CPU takes multiples of {LANES}"
        return None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of the convolution, elements of a key and of a value."""
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM's, without a state for each draft."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        return replace(spec, num_speculative_blocks=0) if speculative.from_vllm_config(vllm_config) else spec

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """vLLM's; then there is room for the gates of each state."""
        super().bind_kv_cache(kv_cache)  # type: ignore[misc]
        conv, heads = self.kv_cache[0], self.num_gates
        self.gates = torch.empty((len(conv), 1 + self.num_spec, heads), dtype=conv.dtype, device=conv.device)

    @property
    def num_gates(self) -> int:
        """How many numbers of a row are kept beside its convolution's input."""
        raise NotImplementedError

    def begin(self, rows: RecurrentRows) -> None:
        """States of requests that have read nothing yet hold what others have left in their blocks."""
        if rows.fresh is not None:
            for state in self.kv_cache[:2]:
                state[rows.fresh] = 0

    def packed(self, rows: RecurrentRows, gates: torch.Tensor) -> torch.Tensor:
        """The gates of pending rows and of the step's, which are kept for the next.

        Args:
            rows: the step.
            gates: ``[rows, num_gates]`` of the step's rows.
        """
        found = gates.new_empty((rows.num_packed, gates.shape[1]))
        found[rows.verified] = gates
        places, states, last = rows.read
        found[places] = self.gates[states, last].to(gates.dtype)
        own, states, offsets = rows.kept
        self.gates[states, offsets] = gates[own].to(self.gates.dtype)
        return found

    def convolved(
        self, rows: RecurrentRows, inputs: torch.Tensor, weight: torch.Tensor, silu: bool
    ) -> torch.Tensor:
        """``[packed rows, channels]``: the convolution of pending rows and of the step's, whose inputs it keeps.

        Args:
            rows: the step.
            inputs: ``[rows, channels]`` of the step's rows.
            weight: ``[channels, width]``.
            silu: whether its outputs go through SiLU.
        """
        state = self.kv_cache[0]
        out = inputs.new_empty((rows.num_packed, inputs.shape[1]))
        tree_conv(
            inputs,
            state if is_conv_state_dim_first() else state.transpose(-1, -2),
            weight,
            self.conv1d.bias,
            rows.blocks,
            rows.row_start,
            rows.parents,
            rows.pending,
            rows.num_pending,
            rows.packed_start[:-1],
            out,
            silu,
        )
        return out

    def scanned(
        self,
        rows: RecurrentRows,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """As ``v``: what the step's rows, among the packed ones, read off the states, which are advanced to the roots.

        All but ``state`` are float32 and of the packed rows; see `recurrent_trees`.
        """
        out = torch.empty_like(v)
        layout = rows.blocks, rows.packed_start, rows.certain, rows.packed_parents
        recurrent_trees(q, k, v, decay, beta, state, *layout, out, max_rows=rows.max_rows)
        return out


def step_of(prefix: str) -> RecurrentRows | None:
    """A step for the layer of that name; None: it is vLLM's alone, a dummy's or without requests that decode."""
    metadata = get_forward_context().attn_metadata
    found = metadata.get(prefix) if isinstance(metadata, dict) else None
    return found if isinstance(found, RecurrentRows) else None


def read_by_vllm(
    prefix: str,
    rows: RecurrentRows,
    theirs: Callable[..., None],
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Have vLLM's layer read the rows of a step that are not ours, if there are any.

    Args:
        prefix: the layer's name.
        rows: the step.
        theirs: takes ``inputs`` and what it writes.
        inputs: each ``[rows, ...]``.
        out: ``[rows, ...]``, of which these rows are written.
    """
    if rows.stock_rows is None:
        return
    part = torch.zeros_like(out[rows.stock_rows])
    metadata = get_forward_context().attn_metadata
    metadata[prefix] = rows.stock
    try:
        theirs(*(values[rows.stock_rows].contiguous() for values in inputs), part)
    finally:
        metadata[prefix] = rows
    out[rows.stock_rows] = part
