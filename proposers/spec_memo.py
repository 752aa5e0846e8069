# SPDX-License-Identifier: Apache-2.0
"""SpecMemo: how many draft nodes a step has where KV blocks are short; the drafts give way, and no request.

A step needs ``sum(ceil((tokens + nodes) / block_size))`` blocks. Where there are not as many, nodes go, the latest
requests' first, down to what the last block of each text has room for; and blocks that earlier drafts have left behind
a text go back. What a plain step needs is taken first, and what the next waiting request would get.

The number of nodes never depends on what was drawn: the caller gives the most that a request may have. So verification
of what is left keeps the target's distribution, of trees of which a part may be left out; of others (``whole``) all
nodes stay, or none.

Paper: https://arxiv.org/abs/2506.01986 (SpecMemo), whose text gives no formulas for this: the admission check above and
the order are ours. No code of the authors was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Text(NamedTuple):
    """One running request."""

    tokens: int  # KV slots that a plain step needs: what is computed, and what the step computes
    held: int  # blocks that it has
    nodes: int  # slots behind these that its drafts want; 0: it has none


class Share(NamedTuple):
    """What one request gets."""

    nodes: int  # slots for drafts
    kept: int  # blocks that it may keep, or come to have


def blocks_of(tokens: int, block_size: int) -> int:
    """That so many tokens need."""
    return -(-tokens // block_size)


def spare(texts: Iterable[Text], free: int, block_size: int) -> int:
    """Blocks that a plain step of these would leave free; negative: that it has not.

    Args:
        texts: the running requests.
        free: blocks that nobody has.
        block_size: tokens of a block.
    """
    return free + sum(text.held - blocks_of(text.tokens, block_size) for text in texts)


def is_enough(texts: Iterable[Text], free: int, block_size: int) -> bool:
    """Whether all drafts find room as things are."""
    wanted = (blocks_of(text.tokens + text.nodes, block_size) - text.held for text in texts)
    return sum(max(missing, 0) for missing in wanted) <= free


def num_admitted(needs: Sequence[int], left: int) -> int:
    """How many of the waiting requests a plain step would let in, in their order.

    Args:
        needs: blocks of each.
        left: blocks that running requests leave.
    """
    return sum(1 for total in accumulate(needs) if total <= left)


def fit(texts: Sequence[Text], left: int, block_size: int, whole: bool = False) -> list[Share]:
    """Share out the blocks that drafts may have. Those who hold some keep them; then the first of the others get some.

    Args:
        texts: the running requests, in the order in which vLLM serves them.
        left: blocks for drafts; with none or less, nodes lie in the last block of each text.
        block_size: tokens of a block.
        whole: a tree is to be verified whole or not at all.
    """
    plain = [blocks_of(text.tokens, block_size) for text in texts]
    more = [
        blocks_of(text.tokens + text.nodes, block_size) - own for text, own in zip(texts, plain, strict=True)
    ]
    given = [0] * len(texts)
    for of_holders in (True, False):
        for place, (text, own) in enumerate(zip(texts, plain, strict=True)):
            most = min(more[place], text.held - own) if of_holders else more[place]
            new = min(most - given[place], left)
            if new > 0:
                given[place] += new
                left -= new
    shares = []
    for text, own, asked, got in zip(texts, plain, more, given, strict=True):
        if whole and got < asked:
            shares.append(Share(0, own))
        else:
            shares.append(Share(min(text.nodes, (own + got) * block_size - text.tokens), own + got))
    return shares
