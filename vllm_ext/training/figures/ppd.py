# SPDX-License-Identifier: Apache-2.0
"""What prompt tokens are worth on answers held out: how often right, by depth and rank; tokens a step with trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_ext.data.answers import Answer
from vllm_ext.kernels.sparse import Int32
from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.ppd import MOST_RANKS, Ppd
from vllm_ext.proposers.tree import DraftTree, Float32
from vllm_ext.training.figures.common import HeadFigures, interval
from vllm_ext.training.ppd import Prompts, chains_of, first_place

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
CHAINS = 64  # that the target reads at once


class Said(NamedTuple):
    """What the target says at prompt tokens behind each token of an answer."""

    tokens: Int32  # [num_tokens] the answer's output, behind the last token of the prompt
    ids: Int32  # [num_tokens, num_prompt_tokens, MOST_RANKS] likeliest first
    log_p: Float32  # the same shape


@torch.no_grad()
def figures(
    model: Any, prompts: Prompts, answers: Sequence[Answer], sizes: Sequence[int], length: int, most: int
) -> HeadFigures:
    """Decode greedy answers as the method would, one step after the other, and count what verification accepts.

    Each size has one proposer for all answers, which begins with what it believes before it has learnt anything.

    Args:
        model: the target.
        prompts: trained.
        answers: held out; those that are not greedy are left out.
        sizes: rows of a tree, prompt tokens counted.
        length: tokens of an answer that are read.
        most: tokens of answers, about.
    """
    count = len(prompts.embeddings)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    hits, trials, tokens = np.zeros((count, MOST_RANKS)), 0, 0
    proposers = {size: Ppd(vocab_size, count, size) for size in sizes}
    steps: dict[int, list[int]] = {size: [] for size in sizes}
    for answer in answers:
        if tokens >= most:
            break
        if not answer.is_greedy or len(answer.tokens) - first_place(answer, length) < count + 3:
            continue
        said = _said(model, prompts, answer, length)
        places = len(said.tokens) - 1 - count
        for depth in range(count):
            came = said.tokens[2 + depth : 2 + depth + places, None]
            right = said.ids[:places, depth] == came
            hits[depth, : right.shape[1]] += right.sum(0)
        trials += places
        tokens += len(said.tokens)
        for size, ppd in proposers.items():
            steps[size] += _decode(ppd, said, size)
    found = {size: interval(each) for size, each in steps.items() if each}
    return HeadFigures(hits / max(trials, 1), found, trials)


def _said(model: Any, prompts: Prompts, answer: Answer, length: int) -> Said:
    """Of an answer, at each of its tokens and at the prompt's last one."""
    device = str(prompts.embeddings.device)
    first = first_place(answer, length)
    places = np.arange(first, len(answer.tokens), dtype=np.int32)
    head = model.get_output_embeddings()
    ids, log_p = [], []
    for start in range(0, len(places), CHAINS):
        hidden = prompts.hidden(model, chains_of(answer, places[start : start + CHAINS], length, device))
        logits = head(hidden).float()
        best = logits.topk(min(MOST_RANKS, logits.shape[-1]), -1)
        ids.append(best.indices.int().cpu().numpy())
        log_p.append((best.values - torch.logsumexp(logits, -1, keepdim=True)).cpu().numpy())
    return Said(answer.tokens[first:], np.concatenate(ids), np.concatenate(log_p))


def _decode(ppd: Ppd, said: Said, size: int) -> list[int]:
    """Tokens of each step that decodes an answer; its end, where there is nothing to be guessed, left out."""
    depths = said.ids.shape[1]
    out: list[int] = []
    root = 1  # the token that the prompt's step has put out
    while root + depths + 1 < len(said.tokens):
        request = Request("", said.tokens[: root + 1], 1, size, depths + 1, GREEDY)
        tree = ppd.propose([request])[0]
        path = tree.path(said.tokens[root + 1 :].tolist())
        out.append(len(path) + 1)
        ppd.observe(_rows(ppd, tree, said, root, path))
        root += len(path) + 1
    ppd.finish("")
    return out


def _rows(ppd: Ppd, tree: DraftTree, said: Said, root: int, path: list[int]) -> VerifiedRows:
    """The step that has accepted a path: what prompt tokens below its end say is what they say behind that token."""
    rows, width = 1 + len(tree), ppd.verified_top_k
    last, depths = root + len(path), said.ids.shape[1]
    top_ids, top_logp = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32)
    # A prompt token's id tells which one it is. Those below other nodes are not looked at.
    first_id = ppd.vocab_size
    for row, token in enumerate(tree.tokens.tolist(), 1):
        if token >= first_id:
            assert token - first_id < depths
            top_ids[row] = said.ids[last, token - first_id, :width]
            top_logp[row] = said.log_p[last, token - first_id, :width]
    accepted = np.zeros(rows, np.bool_)
    accepted[[0, *(node + 1 for node in path)]] = True
    return VerifiedRows(
        [""],
        np.array([0, rows], np.int32),
        np.concatenate([said.tokens[root : root + 1], tree.tokens]).astype(np.int32),
        np.concatenate([[-1], tree.parents + 1]).astype(np.int32),
        accepted,
        top_ids,
        top_logp,
        [said.tokens[root + 1 : last + 2].tolist()],
        np.zeros(rows, np.float32),
    )
