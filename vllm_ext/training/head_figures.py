# SPDX-License-Identifier: Apache-2.0
"""What heads are worth on answers held out: how often right, by depth and rank, and tokens a step with trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_ext.kernels.sparse import Float64, Int32, Sparse
from vllm_ext.proposers.medusa import product_tree
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.training.medusa import Heads, Texts

RANKS = 32


class HeadFigures(NamedTuple):
    """On greedy answers held out."""

    right: Float64  # [num_heads, RANKS] how often a head's choice of this rank is the token
    tokens_per_step: dict[
        int, tuple[float, float]
    ]  # by nodes of a tree, the mean and half of its 95 % interval
    num_tokens: int


@torch.no_grad()
def figures(
    heads: Heads, texts: Texts, token_map: Int32, sizes: Sequence[int], most: int = 4000
) -> HeadFigures:
    """Decode greedy answers as the method would, and count what verification accepts.

    A step begins where the last one ended: what is hard to guess takes more of them than its share of the text.

    Args:
        heads: trained.
        texts: held out.
        token_map: of the heads.
        sizes: nodes of trees.
        most: tokens of answers, about.
    """
    num_heads = len(heads.blocks)
    ends = torch.nonzero(texts.left == 0)[:, 0].tolist()
    spans, start, tokens = [], 0, 0
    for end in ends:
        if bool(texts.greedy[start]) and end - start > num_heads and tokens < most:
            spans.append((start, end))
            tokens += end - start
        start = end + 1
    if not spans:
        return HeadFigures(np.zeros((num_heads, RANKS)), {}, 0)
    hits = np.zeros((num_heads, RANKS))
    trials = 0
    steps: dict[int, list[int]] = {size: [] for size in sizes}
    for start, end in spans:
        hidden = texts.hidden[start : end - num_heads].to(heads.lm_head.device).float()
        ids, q = [], []
        for head in range(num_heads):
            best = (
                (heads.state(head, hidden) @ heads.lm_head.T).softmax(1).topk(min(RANKS, len(token_map)), 1)
            )
            ids.append(token_map[best.indices.cpu().numpy()])
            q.append(best.values.double().cpu().numpy())
        came = texts.top_ids[start : end + 1, 0].cpu().numpy()
        for head in range(num_heads):
            right = ids[head] == came[head + 1 : head + 1 + len(hidden), None]
            hits[head, : right.shape[1]] += right.sum(0)
        trials += len(hidden)
        for size in sizes:
            place = 0
            while place < len(hidden):
                tree = product_tree([Sparse(ids[h][place], q[h][place]) for h in range(num_heads)], size)
                step = 1 + _accepted(tree, came[place + 1 : place + 1 + num_heads])
                steps[size].append(step)
                place += step
    found = {
        size: (float(np.mean(each)), float(1.96 * np.std(each) / np.sqrt(len(each))))
        for size, each in steps.items()
    }
    return HeadFigures(hits / trials, found, trials)


def _accepted(tree: DraftTree, came: Int32) -> int:
    """How many nodes stand on the path of the tokens that came."""
    at = ROOT
    for depth, token in enumerate(came.tolist()):
        below = np.flatnonzero((tree.parents == at) & (tree.tokens == token))
        if not len(below):
            return depth
        at = int(below[0])
    return len(came)


def per_doubling(points: Sequence[tuple[int, float]]) -> float | None:
    """What twice the training brings, by a line through what heads were worth over the logarithm of the tokens seen.

    Source: "Scaling Laws for Speculative Decoding", arXiv 2505.07858: acceptance grows with the logarithm of the tokens
    of training. Here those of one run, whose learning rate falls, with all answers seen again and again.

    Args:
        points: tokens learnt from, and tokens a step.

    Returns:
        None: there are too few points.
    """
    known = {seen: worth for seen, worth in points if seen > 0}
    if len(known) < 3:
        return None
    slope, _ = np.polyfit(np.log2(list(known)), list(known.values()), 1)
    return float(slope)
