# SPDX-License-Identifier: Apache-2.0
"""The tokens that a contrast is about: those with at least a part of the likeliest one's probability.

Source: "Contrastive Decoding", arXiv 2210.15097, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Tokens of a row that are looked up one by one; with more that are plausible it is the whole head.
FIRST_IDS = 64


class Plausible(NamedTuple):
    """Tokens that a contrast is about, and their logits."""

    ids: torch.Tensor | None  # int64 [num_rows, k], likeliest first; None: all of the vocabulary
    logits: torch.Tensor  # [num_rows, k]
    # bool [num_rows, k]: which of them are plausible; of a row with fewer others fill it up
    kept: torch.Tensor


def plausible(logits: torch.Tensor, alpha: torch.Tensor, at_least: int = 1) -> Plausible:
    """The tokens with at least so much of the likeliest one's probability.

    Args:
        logits: ``[num_rows, vocab]``; tokens at minus infinity are not among them.
        alpha: ``[num_rows, 1]``, 0 to 1.
        at_least: how many ids there are to be.

    """
    values, ids = logits.topk(min(max(FIRST_IDS, at_least), logits.shape[1]), 1)
    kept = (values >= values[:, :1] + alpha.log()) & (values > -torch.inf)
    if bool(kept[:, -1].any()):  # there may be more
        return Plausible(None, logits, plausible_mask(logits, alpha))
    return Plausible(ids, values, kept)


def plausible_mask(logits: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Which they are: bool ``[num_rows, vocab]``; see `plausible`."""
    least = logits.amax(1, keepdim=True) + alpha.log()
    return (logits >= least) & (logits > -torch.inf)


def leave(logits: torch.Tensor, of: Plausible, scores: torch.Tensor) -> None:
    """Make scores the logits, in place: of plausible tokens, and minus infinity of all others.

    A score of minus infinity stands for a token that cannot be contrasted; where there are only such, the likeliest one
    is left.

    Args:
        logits: ``[num_rows, vocab]``.
        of: what was plausible.
        scores: ``[num_rows, k]``, of its tokens.
    """
    kept = of.kept & (scores > -torch.inf) & (scores < torch.inf)
    none = ~kept.any(1, keepdim=True)
    kept = kept | (none & (of.logits == of.logits.amax(1, keepdim=True)))
    scores = torch.where(kept, torch.where(none, of.logits, scores), -torch.inf)
    if of.ids is None:
        logits.copy_(scores)
    else:
        logits.fill_(-torch.inf).scatter_(1, of.ids, scores)
