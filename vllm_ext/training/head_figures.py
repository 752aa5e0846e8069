# SPDX-License-Identifier: Apache-2.0
"""What heads are worth on answers held out: how often right, by depth and rank, and tokens a step with trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_ext.kernels.sparse import Float64, Int32, Sparse
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.training.medusa import Heads, Texts

RANKS = 32
ASKED = 64  # as of method medusa_tree


class HeadFigures(NamedTuple):
    """On greedy answers held out."""

    right: Float64  # [num_heads, RANKS] how often a head's choice of this rank is the token
    tokens_per_step: dict[
        int, tuple[float, float]
    ]  # by nodes of a tree, the mean and half of its 95 % interval
    num_tokens: int


@torch.no_grad()
def figures(
    heads: Heads, texts: Texts, token_map: Int32, sizes: Sequence[int], most: int = 2000
) -> HeadFigures:
    """Draft at tokens of greedy answers as the method does, and count what verification would have accepted.

    Steps do not go on where the last one ended, but begin at tokens spread over the answers.

    Args:
        heads: trained.
        texts: held out.
        token_map: of the heads.
        sizes: nodes of trees.
        most: places to draft at, about.
    """
    num_heads = len(heads.blocks)
    places = torch.nonzero(texts.greedy & (texts.left >= num_heads))[:, 0]
    if not len(places):
        return HeadFigures(np.zeros((num_heads, RANKS)), {}, 0)
    places = places[:: max(len(places) // most, 1)]
    hidden = texts.hidden[places].to(heads.lm_head.device).float()
    ids, probabilities = [], []
    for head in range(num_heads):
        q = (heads.state(head, hidden) @ heads.lm_head.T).softmax(1)
        best = q.topk(min(RANKS, q.shape[1]), 1)
        ids.append(token_map[best.indices.cpu().numpy()])
        probabilities.append(best.values.double().cpu().numpy())
    # [num_heads, num_places]: the tokens that came.
    came = np.stack([texts.top_ids[places + head + 1, 0].cpu().numpy() for head in range(num_heads)])
    right = np.stack([(ids[head] == came[head][:, None]).mean(0) for head in range(num_heads)])
    tokens: dict[int, list[int]] = {size: [] for size in sizes}
    for place in range(len(places)):
        rows = [Sparse(ids[head][place], probabilities[head][place]) for head in range(num_heads)]
        for size in sizes:
            tree = LikeliestTree(size, num_heads, ASKED)
            while wanted := tree.wanted():
                tree.give([rows[tree.depth(node)] for node in wanted])
            drafts = tree.tree()
            at, accepted = ROOT, 0
            while accepted < num_heads:
                below = np.flatnonzero((drafts.parents == at) & (drafts.tokens == came[accepted, place]))
                if not len(below):
                    break
                at, accepted = int(below[0]), accepted + 1
            tokens[size].append(1 + accepted)
    found = {
        size: (float(np.mean(each)), float(1.96 * np.std(each) / np.sqrt(len(each))))
        for size, each in tokens.items()
    }
    return HeadFigures(right, found, len(places))


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
