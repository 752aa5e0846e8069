# SPDX-License-Identifier: Apache-2.0
"""Recursive rejection sampling: verify a tree whose children were drawn from the draft without replacement.

At the current row try its children in the order they were drawn, each against what the target has left after the ones
before it were rejected; where none is accepted, draw from what is left then. The output has the target's law.

Source: "Recursive Speculative Decoding", arXiv 2402.14160, section 3; DySpec, arXiv 2410.11744, and SpecInfer, arXiv
2305.09781, verify alike. With one child a row it is speculative sampling, arXiv 2211.17192, algorithm 1.

What makes it exact, and is the builder's to keep: the children of a row are drawn from ``q`` one after the other, each
without those before it, and stand in that order; whether a token that was drawn is kept depends on nothing that came
after it nor on which token it is. Of a tree whose children were *chosen*, such as the likeliest ones, the ratio
says nothing: that is for the `tree_walk`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.chance import Chance, Float64

Int32 = npt.NDArray[np.int32]


def recursive_rejection(
    tokens: Int32,
    parents: Int32,
    p: Callable[[int], Float64],
    q: Callable[[int], Float64],
    chance: Chance,
) -> tuple[list[int], list[int]]:
    """Verify one request's tree.

    Args:
        tokens: int32 ``[num_rows]``, each row's input token, the root first.
        parents: int32 ``[num_rows]`` the parent row; -1 for the root. Siblings stand in the order they were drawn.
        p: the target's distribution after a row, float64 ``[vocab]``, adding up to 1; asked once for each visited row.
        q: the distribution that the first child of a row was drawn from, the same shape; asked for visited rows that
            have children.
        chance: independent of the draft's.

    Returns:
        The accepted rows, root left out, and the emitted tokens, always one more than the accepted rows.
    """
    path: list[int] = []
    emitted: list[int] = []
    row = 0
    while True:
        left = p(row)
        children = np.flatnonzero(parents == row).tolist()
        proposal = q(row).copy() if children else left
        accepted = None
        for child in children:
            token = int(tokens[child])
            if chance.accepts(left[token], proposal[token]):
                accepted = child
                break
            left = _residual(left, proposal)
            proposal[token] = 0.0
            mass = proposal.sum()
            if mass <= 0.0:
                break
            proposal /= mass
        if accepted is None:
            emitted.append(chance.draw(left))
            return path, emitted
        path.append(accepted)
        emitted.append(int(tokens[accepted]))
        row = accepted


def _residual(p: Float64, q: Float64) -> Float64:
    """What of ``p`` lies above ``q``, adding up to 1; ``p`` itself where rounding leaves nothing."""
    above = np.maximum(p - q, 0.0)
    mass = above.sum()
    return above / mass if mass > 0.0 else p
