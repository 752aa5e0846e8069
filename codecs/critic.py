# SPDX-License-Identifier: Apache-2.0
"""Codec critic: as many blocks as fit a budget, by an exponential moving average of what attends to them.

When a prompt is read, and then whenever a block of the answer is full, the last ``watched`` tokens are asked what
they attend to; a block's score is ``decay`` times what it was and the rest of that. Above the budget the block of the
least score is forgotten. So a request's memory is bounded however long its answer grows, and a block that has not
mattered for long makes room.

Source: CRITIC, the cache reduction by token importance of "Scaling Test-Time Inference with Policy-Optimized, Dynamic
Retrieval-Augmented Generation via KV Caching and Decoding", arXiv 2504.01281. Of that paper nothing else is built: not
PORAG, which trains how retrieved text is used, nor ATLAS, which decides when and what to retrieve. Of CRITIC the idea
is built, by one measure of importance, attention: it is accumulated as in "H2O: Heavy-Hitter Oracle", arXiv 2306.14048,
section 4, for blocks, by a moving average instead of the sum (old tokens have had more chances), and asked of the last
tokens as in SnapKV, arXiv 2404.14469. One choice serves all layers and heads; the budget is given, not adapted.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from vllm_ext.codecs.selection import Float32, SelectingCodec, SelectionOptions


class CriticOptions(SelectionOptions):
    decay: float = Field(
        default=0.8, ge=0.0, lt=1.0, description="of a block's score, the part that a new one leaves of it"
    )


class Critic(SelectingCodec):
    """A choice when the prompt ends, and at each block's end behind it."""

    name = "critic"
    summary = "blocks within a budget, by an average of what attends to them"
    paper = "after arXiv 2504.01281, 2306.14048"
    Options = CriticOptions
    EXAMPLES = ({"budget": 256},)
    CHOOSES_AGAIN = True

    def next_moment(self, after: int, prompt_len: int) -> int | None:
        if after < prompt_len:
            return prompt_len
        return (after // self.block_size + 1) * self.block_size

    def scores(self, before: Float32, mass: Float32) -> Float32:
        """See the base class; a block's first score is what it was asked first."""
        decay = np.float32(self.options.decay)
        found = mass.copy()
        found[: len(before)] = decay * before + (1 - decay) * mass[: len(before)]
        return found
