# SPDX-License-Identifier: Apache-2.0
"""Falcon in training: a head of EAGLE-3 that says two tokens a pass.

A block is the last two rows of what there is. The first says the token behind the text, the second the one behind that,
whatever the first one is: half the passes. Rows of a block see each other, which is the relaxed causal mask: once the
block's last row is there, the others are *read again* behind it. Keys and values of a row depend on its input alone
in one layer, so that reading again changes no row but itself.

Coupled sequential glancing distillation: a share of the rows below a block gets the target's features there, where
tokens are the target's as well; the share falls as training goes on. Features are drawn to the target's.

Source: "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive Drafting
and Custom-Designed Decoding Tree", arXiv 2412.12639; shares and blocks by its code.

Deviations: these stand on EAGLE-3 (`eagle`): one layer of attention, without the LSTM of two layers before it (in the
paper's code it runs over the batch, and carries nothing from token to token). A row that is read again sees its own key
twice, in training too. The paper glances at a share of the rows that the head got wrong, we at half that share of all.
Trees are those of the method and not fixed ones. With blocks of one row it is EAGLE-3's head.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.eagle import Head

GLANCED = (
    0.35,
    0.175,
)  # share of the rows that get the target's features, when training begins and when it ends


class FalconHead(Head):
    """See the module, and `Head`. The configuration's ``falcon_block`` says how many rows a block has."""

    architecture: ClassVar[str] = "FalconLlamaForCausalLMEagle3"
    aligned: ClassVar[float] = 0.1

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor, token_map: Int32) -> None:
        super().__init__(config, embedding, token_map)
        self.block = config.setdefault("falcon_block", 2)

    def glanced(self, features: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        if not self.training:
            return features
        share = GLANCED[0] + (GLANCED[1] - GLANCED[0]) * self.spent
        chosen = torch.rand(len(features), 1, device=features.device) < share
        return torch.where(chosen, truth.to(features.dtype), features)
