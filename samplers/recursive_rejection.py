# SPDX-License-Identifier: Apache-2.0
"""Recursive rejection sampling: verify a node's children that were drawn from the draft without replacement.

Try the children in the order they were drawn, each against what the target has left after the ones before it were
rejected; where none is accepted, draw from what is left then. The token has the target's law. It is one of the children
only if that was accepted: of a rejected one nothing is left. So the walk down a tree is that of `tree_walk`.

Source: "Recursive Speculative Decoding", arXiv 2402.14160, section 3; DySpec, arXiv 2410.11744, and SpecInfer, arXiv
2305.09781, verify alike. With one child a row it is speculative sampling, arXiv 2211.17192, algorithm 1.

What makes it exact, and is the builder's to keep: the children of a row are drawn from ``q`` one after the other, each
without those before it, and stand in that order; whether a token that was drawn is kept depends on nothing that came
after it nor on which token it is. Of a tree whose children were *chosen*, such as the likeliest ones, the ratio
says nothing: that is for the `tree_walk` and the target's own draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.sparse import Float64, Sparse


def choose(p: Float64, children: Sequence[int], q: Sparse, chance: Chance) -> int:
    """The next token after one row.

    Args:
        p: float64 ``[vocab]``, the target's distribution after the row, adding up to 1.
        children: tokens drawn from ``q`` without replacement, in that order; at least one.
        q: what the first of them was drawn from.
        chance: independent of the draft's.
    """
    # Of both distributions, what there is at q's tokens; the target's others stay in proportion.
    left, proposal = p[q.ids], q.q.copy()
    weights = p.copy()
    weights[q.ids] = 0.0
    others = outside = float(weights.sum())
    for token in children:
        place = int(np.flatnonzero(q.ids == token)[0])
        if chance.accepts(left[place], proposal[place]):
            return token
        above = np.maximum(left - proposal, 0.0)
        mass = float(above.sum()) + others
        if mass > 0.0:  # else rounding left nothing, and the target is the draft
            left, others = above / mass, others / mass
        proposal[place] = 0.0
        remaining = float(proposal.sum())
        if remaining <= 0.0:
            break
        proposal /= remaining
    if outside > 0.0:
        weights *= others / outside
    weights[q.ids] = left
    return chance.draw(weights)
