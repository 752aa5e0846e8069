# SPDX-License-Identifier: Apache-2.0
"""Clover: heads on the target's last hidden state that take in the tokens of the branch, one after the other.

Medusa's heads say what stands one, two and three places on, whatever stands between. Here a small cell makes of a state
and a token the state behind that token, so that each node has a distribution of its own. The first state has taken in
the last token already, which Medusa's heads do not know. A depth costs one pass of the cell, without attention; nothing
is kept between steps.

Sources: "Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge", arXiv 2405.00263; "Hydra:
Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv 2402.05109. The heads, and where they deviate:
`vllm_ext.engine.models.clover_heads`.

Deviations: trees of the largest path probabilities, as deep as pays, instead of a fixed number of heads with the best
few tokens of each; a request that samples without a seed has a tree drawn without replacement (DySpec, arXiv
2410.11744), verified by recursive rejection. Acceptance is lossless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.dyspec import DynamicTreeProposer


class CloverOptions(MethodOptions):
    """Options of ``clover_tree``."""

    model: UserPath = Field(
        min_length=1,
        description="folder or hub name of heads for the target: `vllm-ext train heads --kind clover`",
    )
    max_depth: int = Field(
        default=8, ge=1, le=32, description="deepest node: each depth is a pass of the heads"
    )


class Clover(DynamicTreeProposer):
    """Trees of heads that read the branch."""

    summary: ClassVar[str] = "trained heads on the last hidden state and the branch's tokens"
    paper: ClassVar[str] = "arXiv 2405.00263"
    Options: ClassVar[type[MethodOptions]] = CloverOptions
    tested_with: ClassVar[Mapping[str, Any]] = {}  # tests make heads for their models
