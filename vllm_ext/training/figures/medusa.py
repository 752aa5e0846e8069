# SPDX-License-Identifier: Apache-2.0
"""What Medusa's heads are worth on answers held out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_ext.kernels.sparse import Float64, Int32, Sparse
from vllm_ext.proposers.medusa import product_tree
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.training.figures.common import MOST_TOKENS, RANKS, HeadFigures, tokens_per_step
from vllm_ext.training.medusa import Heads, Texts


@torch.no_grad()
def figures(
    heads: Heads, texts: Texts, token_map: Int32, sizes: Sequence[int], most: int = MOST_TOKENS
) -> HeadFigures:
    """See `HeadFigures`.

    Args:
        heads: trained.
        texts: held out.
        token_map: of the heads.
        sizes: nodes of trees.
        most: tokens of answers, about.
    """
    num_heads = heads.num_heads
    spans = greedy_spans(texts, num_heads, most)
    if not spans:
        return HeadFigures(np.zeros((num_heads, RANKS)), {}, 0)
    hits = np.zeros((num_heads, RANKS))
    trials = 0
    came: list[Int32] = []
    guesses: list[list[tuple[Int32, Float64]]] = []  # by text and head: [num_places, ranks] ids and chances
    for start, end in spans:
        hidden = texts.hidden[start : end - num_heads].to(heads.lm_head.device).float()
        guesses.append([])
        came.append(texts.top_ids[start + 1 : end, 0].cpu().numpy())
        for head in range(num_heads):
            best = (
                (heads.state(head, hidden) @ heads.lm_head.T).softmax(1).topk(min(RANKS, len(token_map)), 1)
            )
            ids = token_map[best.indices.cpu().numpy()]
            guesses[-1].append((ids, best.values.double().cpu().numpy()))
            right = ids == came[-1][head : head + len(hidden), None]
            hits[head, : right.shape[1]] += right.sum(0)
        trials += len(hidden)

    def grow(at: Sequence[tuple[int, int]], size: int) -> list[DraftTree]:
        return [
            product_tree([Sparse(ids[place], q[place]) for ids, q in guesses[text]], size)
            for text, place in at
        ]

    return HeadFigures(hits / trials, tokens_per_step(came, grow, sizes, num_heads), trials)


def greedy_spans(texts: Texts, depth: int, most: int) -> list[tuple[int, int]]:
    """The first and the last rows of greedy answers.

    Args:
        texts: held out.
        depth: of trees; an answer has more rows than this.
        most: rows of all answers, about.
    """
    spans, start, tokens = [], 0, 0
    for end in torch.nonzero(texts.left == 0)[:, 0].tolist():
        if bool(texts.greedy[start]) and end - start > depth and tokens < most:
            spans.append((start, end))
            tokens += end - start
        start = end + 1
    return spans
