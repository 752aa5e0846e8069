# SPDX-License-Identifier: Apache-2.0
"""EAGLE: one layer that goes on from the target's own hidden states drafts the tree, depth by depth.

A row of the head stands for a token: it takes what the target made of the text before the token, the token's embedding,
and attends to the rows before. Below the last token its own output stands in for what the target would make, so that a
depth costs one pass.

Sources: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv 2503.01840;
"EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv 2406.16858, for the trees; the first
EAGLE's checkpoints, arXiv 2401.15077, are read too.

Deviations: a depth takes as many nodes as may be in the finished tree instead of a fixed ten, and none where a pass
does not pay. A request that samples without a seed has a tree drawn without replacement from the head's distributions,
as DySpec grows it (arXiv 2410.11744), and verified by recursive rejection; EAGLE-2's are the likeliest at all
temperatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.draft_model import PassOptions
from vllm_ext.proposers.dyspec import DynamicTreeProposer


class EagleOptions(PassOptions):
    """Options of ``eagle_tree``."""

    model: UserPath = Field(
        min_length=1,
        description="folder or hub name of an EAGLE-3 or EAGLE head for the target, as vLLM loads it, or of a "
        "relative: `vllm-ext train heads --kind eagle`",
    )


class Eagle(DynamicTreeProposer):
    """Trees of an EAGLE head."""

    summary: ClassVar[str] = "a trained layer on the target's hidden states"
    paper: ClassVar[str] = "arXiv 2503.01840"
    Options: ClassVar[type[MethodOptions]] = EagleOptions
    tested_with: ClassVar[Mapping[str, Any]] = {}  # tests make heads for their models
