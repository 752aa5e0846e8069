# SPDX-License-Identifier: Apache-2.0
"""FSPAD in training: a head of EAGLE-3 whose features know their token, and are not what it says.

Feature sampling: the target's feature of a token does not say which token came next, as that was drawn from it. Before
the layer the next token's embedding gates the feature, in as many dimensions as the layer's MLP has. Partial alignment
distillation: the layer has two outputs. One is what the language head gets. The other is handed on to the rows
below, and is drawn to the target's own features, so that this loss and that of the tokens have a branch each.

Source: "Boosting Lossless Speculative Decoding via Feature Sampling and Partial Alignment Distillation", arXiv
2408.15562; where the parts are, by its code.

Deviations: these two stand on EAGLE-3 (`eagle`), not on EAGLE-2. So features are of several of the target's layers,
passes after the first read what the head handed on, and what is aligned is the feature that the head makes of the
target's layers. Embeddings are normed first. The distance of features is relative to their size. How much it weighs is
our own: the paper weighs features ten times as much as tokens, for its own features.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.functional import silu

from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.eagle import Head, Norm, linear


class FspadHead(Head):
    """See the module, and `Head`."""

    architecture: ClassVar[str] = "FspadLlamaForCausalLMEagle3"
    aligned: ClassVar[float] = 0.3
    sampling: Any

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor, token_map: Int32) -> None:
        super().__init__(config, embedding, token_map)
        size, inner = config["hidden_size"], config["intermediate_size"]
        self._size = size
        sampling = torch.nn.Module()
        sampling.fc, sampling.norm = linear(2 * size, size), Norm(size, config["rms_norm_eps"])
        sampling.gate, sampling.up = linear(size, inner), linear(size, inner)
        sampling.down = linear(inner, size)
        self.sampling = sampling
        self.midlayer.mlp["down_proj"] = linear(inner, 2 * size)

    def modulated(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `Head`: which of the tokens that the feature allowed has come is in it from here on."""
        sampling, embeds = self.sampling, self.embeds(tokens)
        rows: torch.Tensor = sampling.fc(torch.cat([embeds, features], 1))
        gated: torch.Tensor = sampling.down(silu(sampling.gate(embeds)) * sampling.up(sampling.norm(rows)))
        return rows + gated

    def handed_on(self, output: torch.Tensor) -> torch.Tensor:
        """See `Head`: the second half."""
        return output[:, self._size :]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See `Head`: of the first half."""
        return super().logits(output[:, : self._size])

    def begin_as(self, layer: torch.nn.Module) -> None:
        """See `Head`: both outputs begin as the layer's, and features go through as they are."""
        super().begin_as(layer)
        sampling = self.sampling
        sampling.fc.weight.mul_(0.1)
        sampling.fc.weight[:, self._size :] += torch.eye(self._size, device=sampling.fc.weight.device)
        theirs = dict(layer.named_parameters()).get("mlp.down_proj.weight")
        own = self.midlayer.mlp["down_proj"].weight
        if theirs is not None and theirs.repeat(2, 1).shape == own.shape:
            own.copy_(theirs.repeat(2, 1))
