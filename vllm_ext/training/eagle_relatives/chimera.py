# SPDX-License-Identifier: Apache-2.0
"""Chimera in training: a head of EAGLE-3 that reads the last three tokens, encoded together.

Trigram encoder: what attention cannot tell from one token, a block over the embeddings of three does, before the layer.
Full context encoder: one layer over the whole text, which has the target's hidden states where the target has read,
and what the layer itself put out where it has not. What it puts out is drawn to the target's hidden states.

Source: "Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing all Tokens",
arXiv 2402.15758; the encoder's parts, by its code.

Deviations: these stand on EAGLE-3 (`eagle`). So rows of text have trigrams beside the target's hidden states, which are
of several of its layers; the paper's have these alone, of the last one, and the rows below trigrams alone. Its heads
say tokens by a matrix of twice the width, over the layer's output and the trigram; ours by the target's language
head. Distances are relative to the size of what is aligned. A text's first token is not read: its second stands for it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.functional import silu

from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.eagle import Head, linear


class ChimeraHead(Head):
    """See the module, and `Head`."""

    architecture: ClassVar[str] = "ChimeraLlamaForCausalLMEagle3"
    aligned: ClassVar[float] = 0.1
    num_read = 3
    trigram: Any

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor, token_map: Int32) -> None:
        super().__init__(config, embedding, token_map)
        self._size: int = config["hidden_size"]
        inner = self.num_read * self._size
        self.trigram = torch.nn.ModuleDict({"block": linear(inner, inner), "down": linear(inner, self._size)})

    def normed(self, embeds: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        within = embeds + silu(self.trigram["block"](embeds))
        return super().normed(self.trigram["down"](within))

    def begin_as(self, layer: torch.nn.Module) -> None:
        """See `Head`: trigrams begin as their last tokens, the block as nothing."""
        super().begin_as(layer)
        self.trigram["block"].weight.zero_()
        down = self.trigram["down"].weight
        down.mul_(0.1)
        down[:, -self._size :] += torch.eye(self._size, device=down.device)
