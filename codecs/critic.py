# SPDX-License-Identifier: Apache-2.0
"""Codec critic: as many blocks as fit a budget, by an exponential moving average of what attends to them.

When a prompt is read, and then whenever a block of the answer is full, the last ``watched`` tokens are asked what
they attend to; a block's score is ``decay`` times what it was and the rest of that. Above the budget the block of the
least score is forgotten. So a request's memory is bounded however long its answer grows, and a block that has not
mattered for long makes room.

Source: no paper of this name was found. This is eviction by accumulated attention as in "H2O: Heavy-Hitter Oracle",
arXiv 2306.14048, section 4, for blocks, with a moving average instead of the sum (old tokens have had more
chances) and tokens asked at fixed places as by SnapKV, arXiv 2404.14469; one choice for all layers and heads.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from vllm_ext.codecs.selection import Float32, SelectingCodec, SelectionOptions


class CriticOptions(SelectionOptions):
    """Of a server."""

    decay: float = Field(
        default=0.8, ge=0.0, lt=1.0, description="of a block's score, the part that a new one leaves of it"
    )


class Critic(SelectingCodec):
    """A choice when the prompt ends, and at each block's end behind it."""

    name = "critic"
    summary = "blocks within a budget, by an average of what attends to them"
    paper = "after arXiv 2306.14048"
    Options = CriticOptions

    def next_moment(self, after: int, prompt_len: int) -> int | None:
        """See the base class."""
        if after < prompt_len:
            return prompt_len
        return (after // self.block_size + 1) * self.block_size

    def scores(self, before: Float32, mass: Float32) -> Float32:
        """See the base class; a block's first score is what it was asked first."""
        decay = np.float32(self.options.decay)
        found = mass.copy()
        found[: len(before)] = decay * before + (1 - decay) * mass[: len(before)]
        return found
