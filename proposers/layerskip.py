# SPDX-License-Identifier: Apache-2.0
"""LayerSkip: the model's first layers draft through its own norm and head; the other layers verify.

Source: "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", arXiv 2404.16710, section 3.4.

Deviations, ours: small trees of the likeliest nodes where the user wants them; drafting may stop below a node that the
exit is not sure of (SpecDec++, arXiv 2405.19715, asks a trained head); the target's own draws verify.

A model that was not trained to exit early has little to say there: see ``heads``, and `vllm-ext train exits`.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.joint_tree import JointProposer
from vllm_ext.proposers.self_draft import HeadOptions, SelfDraftProposer, ShapeOptions


class LayerSkipOptions(HeadOptions, ShapeOptions):
    """Options of `layerskip`."""

    exit_layer: int | None = Field(
        default=None, ge=1, description="how many layers draft; none: a quarter of them"
    )


class LayerSkip(JointProposer, SelfDraftProposer):
    """A chain or small tree by the layers below one exit; in a hybrid, nodes below the others'."""

    summary: ClassVar[str] = "the model's first layers draft, the others verify"
    paper: ClassVar[str] = "arXiv 2404.16710"
    on_v2 = "device"
    Options: ClassVar[type[MethodOptions]] = LayerSkipOptions
    only_alone = ("width", "least_sure")
    asked_per_node = 1  # leaves have places, too

    def exits(self, num_layers: int) -> list[int]:
        """After how many of the model's layers it exits: one number."""
        return [self.options.exit_layer or max(num_layers // 4, 1)]
