# SPDX-License-Identifier: Apache-2.0
"""FSPAD's head by vLLM's class of EAGLE-3: the next token gates the feature, and the layer has two outputs.

See `vllm_ext.training.eagle_relatives.fspad` for the paper, and what deviates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM


class FeatureSampling(torch.nn.Module):
    """What the layer reads of a feature whose next token is known.

    Args:
        size: of features and embeddings.
        inner: dimensions in which the embedding gates the feature.
        eps: of the norm.
        prefix: of the layers' names.
    """

    def __init__(self, size: int, inner: int, eps: float, prefix: str) -> None:
        super().__init__()
        plain: dict[str, Any] = {"bias": False, "return_bias": False}
        self.fc = ReplicatedLinear(2 * size, size, prefix=f"{prefix}.fc", **plain)
        self.norm = RMSNorm(size, eps=eps)
        self.gate = ColumnParallelLinear(size, inner, prefix=f"{prefix}.gate", **plain)
        self.up = ColumnParallelLinear(size, inner, prefix=f"{prefix}.up", **plain)
        self.down = RowParallelLinear(inner, size, prefix=f"{prefix}.down", **plain)

    def forward(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """``[num_rows, size]`` of two such."""
        rows: torch.Tensor = self.fc(torch.cat([embeds, features], 1))
        gated: torch.Tensor = self.down(silu(self.gate(embeds)) * self.up(self.norm(rows)))
        return rows + gated


class SplitNorm(RMSNorm):  # type: ignore[misc]
    """The last norm, of two outputs side by side: the first is for the language head, the second is handed on."""

    def forward(self, outputs: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[num_rows, size]`` twice of ``[num_rows, 2 * size]`` and ``[num_rows, size]``."""
        said, handed_on = outputs.chunk(2, 1)
        handed_on = handed_on + residual
        normed, _ = super().forward(said.contiguous(), residual)
        return normed, handed_on


class FspadEagle3(Eagle3LlamaForCausalLM):  # type: ignore[misc]
    """See the module. Quantised checkpoints do not exist: nothing of ours is."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        size, inner, eps = self.config.hidden_size, self.config.intermediate_size, self.config.rms_norm_eps
        self.model.sampling = FeatureSampling(size, inner, eps, "sampling")
        self.model.norm = SplitNorm(size, eps=eps)
        self.model.layers[-1].mlp.down_proj = RowParallelLinear(
            inner, 2 * size, bias=False, prefix="mlp.down_proj"
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's: the feature first meets the token behind it, ``input_ids``."""
        embeds = self.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        features = self.model.sampling(self.model.layers[0].input_layernorm(embeds), hidden_states)
        found: tuple[torch.Tensor, torch.Tensor] = super().forward(
            input_ids, positions, features, inputs_embeds
        )
        return found
