# SPDX-License-Identifier: Apache-2.0
"""How blocks are shared out: never more than there are, a text's own first, and by nothing that was drawn."""

from __future__ import annotations

import random

import pytest

from vllm_ext.proposers.spec_memo import Share, Text, blocks_of, fit, is_enough, num_admitted, spare

BLOCK = 16


def texts_of(seed: int) -> list[Text]:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 99) for _ in range(draw.randint(0, 9))]
    # Some have a block too few for the next token, some blocks of earlier drafts.
    return [
        Text(length, max(blocks_of(length, BLOCK) + draw.randint(-1, 2), 0), draw.choice([0, 5, 16, 40]))
        for length in lengths
    ]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("left", [-3, 0, 1, 4, 99])
def test_shares(left: int, whole: bool) -> None:
    for seed in range(200):
        texts = texts_of(seed)
        shares = fit(texts, left, BLOCK, whole)
        plain = [blocks_of(text.tokens, BLOCK) for text in texts]
        more = [share.kept - own for share, own in zip(shares, plain, strict=True)]
        assert min(more, default=0) >= 0
        assert sum(more) <= max(left, 0)
        for text, own, share in zip(texts, plain, shares, strict=True):
            assert 0 <= share.nodes <= text.nodes
            assert text.tokens + share.nodes <= share.kept * BLOCK
            if whole:
                assert share.nodes in (0, text.nodes)
            elif share.nodes < text.nodes:  # its blocks are full
                assert text.tokens + share.nodes == share.kept * BLOCK
            if left == 99:
                assert share.nodes == text.nodes
            if left <= 0 and not whole:
                assert share.nodes == min(text.nodes, own * BLOCK - text.tokens)


def test_who_holds_blocks_comes_first_then_who_came_first() -> None:
    texts = [Text(16, 1, 16), Text(16, 2, 16), Text(16, 1, 16)]
    assert fit(texts, 2, BLOCK) == [Share(16, 2), Share(16, 2), Share(0, 1)]
    assert fit(texts, 1, BLOCK) == [Share(0, 1), Share(16, 2), Share(0, 1)]


def test_what_is_enough_and_who_gets_in() -> None:
    texts = [Text(16, 1, 16), Text(17, 2, 5), Text(31, 4, 0)]
    assert spare(texts, 3, BLOCK) == 3 + 2
    assert is_enough(texts, 1, BLOCK)
    assert not is_enough(texts, 0, BLOCK)
    assert [num_admitted([2, 2, 1], left) for left in (-1, 1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2, 3]
