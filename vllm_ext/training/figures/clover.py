# SPDX-License-Identifier: Apache-2.0
"""What Clover's heads are worth on answers held out: their trees are grown as the method grows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_ext.engine.models.node_states import NodeStates
from vllm_ext.kernels.sparse import Float64
from vllm_ext.proposers.base import Request
from vllm_ext.proposers.clover import Clover, CloverOptions
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.tree import DraftTree, Int32
from vllm_ext.training.clover import Heads
from vllm_ext.training.draft_model import multiplies_bfloat16
from vllm_ext.training.figures.common import GREEDY, MOST_TOKENS, RANKS, HeadFigures, tokens_per_step
from vllm_ext.training.figures.medusa import greedy_spans
from vllm_ext.training.medusa import Texts

MAX_DEPTH = 8  # of trees, the method's default


class Grown:
    """A `DraftModel` of heads; a request, named by its number, is at a row of the texts.

    Args:
        heads: of `Heads`.
        texts: in which the requests are.
    """

    def __init__(self, heads: Heads, texts: Texts) -> None:
        self._heads, self._texts = heads, texts
        self._states = NodeStates()
        self.rows: dict[str, int] = {}  # by request, set by the caller

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel.roots`."""
        self._states.clear()
        rows = torch.tensor([self.rows[name] for name in request_ids])
        hidden = self._texts.hidden[rows].to(self._heads.embedding.device).float()
        return self._said(
            request_ids, self._heads.cell.first(hidden, self._heads.embeds(self._texts.tokens[rows]))
        )

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel.nodes`."""
        above = self._states.at(request_ids, parents)
        embeds = self._heads.embeds(torch.tensor(tokens))
        return self._said(request_ids, self._heads.cell.following(above, embeds))

    def _said(self, request_ids: Sequence[str], states: torch.Tensor) -> Rows:
        self._states.keep(request_ids, states)
        ids, log_q = self._heads.cell.distributions(states)
        return Rows(ids.cpu().numpy(), log_q.cpu().numpy())


@torch.no_grad()
def figures(heads: Heads, texts: Texts, sizes: Sequence[int], most: int = MOST_TOKENS) -> HeadFigures:
    """See `HeadFigures`.

    Args:
        heads: trained.
        texts: held out.
        sizes: nodes of trees.
        most: tokens of answers, about.
    """
    spans = greedy_spans(texts, MAX_DEPTH, most)
    if not spans:
        return HeadFigures(np.zeros((heads.num_heads, RANKS)), {}, 0)
    came: list[Int32] = [texts.top_ids[start + 1 : end, 0].cpu().numpy() for start, end in spans]
    device = heads.embedding.device
    grown = Grown(heads, texts)

    def grow(at: Sequence[tuple[int, int]], size: int) -> list[DraftTree]:
        proposer = Clover(CloverOptions(model="trained", num_speculative_tokens=size, max_depth=MAX_DEPTH))
        proposer.draft = grown
        grown.rows = {str(text): spans[text][0] + place for text, place in at}
        some = np.zeros(1, np.int32)
        return proposer.propose([Request(str(text), some, 1, size, MAX_DEPTH, GREEDY) for text, _ in at])

    with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device.type)):
        right = _right(heads, texts, spans)
        found = tokens_per_step(came, grow, sizes, MAX_DEPTH)
    return HeadFigures(right, found, sum(map(len, came)))


def _right(heads: Heads, texts: Texts, spans: Sequence[tuple[int, int]]) -> Float64:
    """See `HeadFigures.right`, along the answers themselves."""
    rows = torch.cat([torch.arange(start, end) for start, end in spans])
    right = np.zeros((heads.num_heads, RANKS))
    for depth, (following, logits) in enumerate(heads.guesses(texts, rows)):
        best = logits.topk(min(RANKS, logits.shape[1]), 1).indices
        hits = heads.cell.token_map[best] == texts.tokens[following].to(best.device)[:, None]
        right[depth, : hits.shape[1]] = hits.double().mean(0).cpu().numpy()
    return right
