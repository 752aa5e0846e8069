# SPDX-License-Identifier: Apache-2.0
"""Chimera's head by vLLM's class of EAGLE-3: it reads the last three tokens, encoded together.

See `vllm_ext.training.eagle_relatives.chimera` for the paper, and what deviates. Behind the features that a row takes
and hands on are the embeddings of the two tokens before: growth needs no tokens but the row's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM


class Trigram(torch.nn.Module):
    """The encoder of three embeddings.

    Args:
        size: of an embedding.
        prefix: of the layers' names.
    """

    def __init__(self, size: int, prefix: str) -> None:
        super().__init__()
        plain: dict[str, Any] = {"bias": False, "return_bias": False}
        self.block = ReplicatedLinear(3 * size, 3 * size, prefix=f"{prefix}.block", **plain)
        self.down = ReplicatedLinear(3 * size, size, prefix=f"{prefix}.down", **plain)

    def forward(self, embeds: torch.Tensor) -> torch.Tensor:
        """``[num_rows, size]`` of ``[num_rows, 3 * size]``."""
        found: torch.Tensor = self.down(embeds + silu(self.block(embeds)))
        return found


class ChimeraEagle3(Eagle3LlamaForCausalLM):  # type: ignore[misc]
    """See the module. Quantised checkpoints do not exist: nothing of ours is."""

    num_before = 2  # tokens whose embeddings rows take beside their features

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.trigram = Trigram(self.config.hidden_size, "trigram")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's, with ``[num_rows, 3 * hidden_size]`` of hidden states, and as much handed on."""
        size = self.config.hidden_size
        features, before = hidden_states[:, :size].contiguous(), hidden_states[:, size:]
        own = self.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        trigrams = torch.cat([before, own], 1)
        normed, handed_on = super().forward(input_ids, positions, features, self.model.trigram(trigrams))
        return normed, torch.cat([handed_on, trigrams[:, size:]], 1)
