# SPDX-License-Identifier: Apache-2.0
"""What a head of EAGLE-3 is worth on answers held out: its trees are grown as the method grows them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_ext.kernels.sparse import Float64
from vllm_ext.proposers.base import Request
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.eagle import Eagle, EagleOptions
from vllm_ext.proposers.sampled import ASKED_PER_NODE, ROOT
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.training.draft_model import multiplies_bfloat16
from vllm_ext.training.eagle import Head
from vllm_ext.training.eagle_texts import EagleTexts, batch_of, windows
from vllm_ext.training.eagle_training import unrolled
from vllm_ext.training.figures.common import GREEDY, MOST_TOKENS, RANKS, HeadFigures, tokens_per_step

MAX_DEPTH = 8  # of trees, the methods' default
DEPTHS = 6  # that it is told of how often the head is right


class Grown:
    """A `DraftModel` of a head that has read whole texts; a request, named by its number, is at a place of one.

    Args:
        head: of `Head`.
        texts: of which it reads some.
        answers: these.
        most_nodes: that are asked for behind one place.
    """

    def __init__(self, head: Head, texts: EagleTexts, answers: Sequence[int], most_nodes: int) -> None:
        self._head = head
        batch = batch_of(texts, answers)
        device = head.lm_head.weight.device
        count = len(answers)

        def padded(flat: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
            whole = flat.new_zeros(count * length, *flat.shape[1:]).index_copy(0, places.to(device), flat)
            return whole.view(count, length, *flat.shape[1:])

        positions = texts.positions[batch.rows].to(device)
        tokens = windows(texts.tokens[batch.rows], batch.starts, head.num_read).to(device)
        inputs = head.inputs(tokens, head.modulated(tokens, head.features(texts.aux[batch.rows].to(device))))
        keys, values = head.keys_values(inputs, head.turns(positions))
        self._keys, self._values = (
            padded(each, batch.row_places, batch.row_length) for each in (keys, values)
        )
        # Of each block what its rows put out: below the last token, and below nodes.
        said = [each.roll(-depth, 0) for depth, each in enumerate(unrolled(head, texts, batch, head.block))]
        output = torch.stack(said, 1)
        self._output = padded(output, batch.query_places, batch.query_length)
        self._positions, self._tokens = (
            padded(each[batch.queries.to(device)], batch.query_places, batch.query_length)
            for each in (positions, tokens)
        )
        self._first = batch.first.to(device)
        self.places = torch.zeros(
            count, dtype=torch.long, device=device
        )  # of the requests, set by the caller
        # Of nodes, by text and the order in which they are asked for.
        self._node_keys = keys.new_zeros(count, most_nodes, *keys.shape[1:])
        self._node_values = values.new_zeros(self._node_keys.shape)
        self._node_queries = keys.new_zeros(count, most_nodes, head.num_heads, head.head_dim)
        self._node_output = output.new_zeros(count, most_nodes, *output.shape[1:])
        self._node_features = output.new_zeros(count, most_nodes, head.config["hidden_size"])
        self._node_tokens = tokens.new_zeros(count, most_nodes, head.num_read)
        # The node that ends the last whole block of its path; or ROOT.
        self._block = torch.zeros(count, most_nodes, dtype=torch.long, device=device)
        self._parent = torch.zeros_like(self._block)
        self._path = torch.zeros(count, most_nodes, most_nodes, dtype=torch.bool, device=device)
        self._num_nodes = [0] * count

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel.roots`."""
        texts = torch.tensor([int(request) for request in request_ids], device=self.places.device)
        for text in texts.tolist():
            self._num_nodes[text] = 0
        return self._rows(self._output[texts, self.places[texts], 0])

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel.nodes`."""
        head, device = self._head, self.places.device
        numbers = [int(request) for request in request_ids]
        nodes = []
        for text in numbers:
            nodes.append(self._num_nodes[text])
            self._num_nodes[text] += 1
        texts, node, parent = (torch.tensor(each, device=device) for each in (numbers, nodes, list(parents)))
        of_root = parent == ROOT
        self._path[texts, node] = self._path[texts, parent.clamp(min=0)] & ~of_root[:, None]
        self._path[texts, node, node] = True
        block = head.block
        depth = self._path[texts, node].sum(1)
        above = torch.where(of_root, ROOT, self._block[texts, parent.clamp(min=0)])
        at_root = self._tokens[texts, self.places[texts]]
        before = torch.where(of_root[:, None], at_root, self._node_tokens[texts, parent.clamp(min=0)])
        came = torch.cat([before[:, 1:], torch.tensor(tokens, device=device)[:, None]], 1)
        self._node_tokens[texts, node] = came
        features = head.modulated(came, head.handed_on(self._said(texts, above, (depth - 1) % block)))
        self._node_features[texts, node] = features.to(self._node_features)
        self._parent[texts, node] = parent
        self._block[texts, node] = torch.where(depth % block == 0, node, above)
        turns = head.turns(self._positions[texts, self.places[texts]] + depth)
        inputs = head.inputs(came, features)
        self._node_keys[texts, node], self._node_values[texts, node] = head.keys_values(inputs, turns)
        self._node_queries[texts, node] = head.queries(inputs, turns)
        ends = depth % block == 0
        if ends.any():
            self._end_blocks(texts[ends], node[ends])
        return self._rows(self._said(texts, self._block[texts, node], depth % block))

    def _said(self, texts: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``[num_nodes, size]`` that rows of the blocks that end with these nodes put out."""
        of_root = (ends == ROOT)[:, None]
        at_root = self._output[texts, self.places[texts], rows]
        return torch.where(of_root, at_root, self._node_output[texts, ends.clamp(min=0), rows])

    def _end_blocks(self, texts: torch.Tensor, ends: torch.Tensor) -> None:
        """Run the rows of the blocks that end with these nodes; all see the whole block."""
        head, device = self._head, self.places.device
        members = [ends]  # the last row first
        while len(members) < head.block:
            members.append(self._parent[texts, members[-1]])
        numbers = texts.tolist() * head.block
        # As many rows of each text as of the one that has most: padding, to read a text's keys once.
        few = sorted(set(numbers))
        lines = {text: line for line, text in enumerate(few)}
        taken = dict.fromkeys(few, 0)
        columns = []
        for text in numbers:
            columns.append(taken[text])
            taken[text] += 1
        line, column = (torch.tensor(each, device=device) for each in ([lines[t] for t in numbers], columns))
        some, of_text, member = torch.tensor(few, device=device), texts.repeat(head.block), torch.cat(members)
        query = self._keys.new_zeros(len(few), max(taken.values()), *self._node_queries.shape[2:])
        query[line, column] = self._node_queries[of_text, member].to(query.dtype)
        length = self._keys.shape[1]
        seen = query.new_full((*query.shape[:2], length + self._path.shape[1]), -torch.inf)
        context = torch.arange(length, device=device) <= (self._first + self.places)[some, None]
        seen[:, :, :length] = torch.where(context, 0.0, -torch.inf)[:, None]
        path = torch.where(self._path[texts, ends], 0.0, -torch.inf).to(seen.dtype).repeat(head.block, 1)
        # A row that is read again sees its own key twice.
        path[torch.arange(len(ends), len(path), device=device), member[len(ends) :]] += math.log(2.0)
        seen[line, column, length:] = path
        attended = scaled_dot_product_attention(
            query.transpose(1, 2),
            torch.cat([self._keys[some], self._node_keys[some]], 1).transpose(1, 2),
            torch.cat([self._values[some], self._node_values[some]], 1).transpose(1, 2),
            attn_mask=seen[:, None],
            enable_gqa=True,
        )
        output = head.output(
            self._node_features[of_text, member], attended.transpose(1, 2)[line, column].flatten(1)
        )
        for number, own in enumerate(output.chunk(head.block)):
            self._node_output[texts, ends, head.block - 1 - number] = own

    def _rows(self, output: torch.Tensor) -> Rows:
        best = self._head.logits(output).log_softmax(1).topk(min(RANKS, len(self._head.d2t)), 1)
        ids = self._head.token_map[best.indices]
        return Rows(ids.int().cpu().numpy(), best.values.cpu().numpy())


@torch.no_grad()
def figures(head: Head, texts: EagleTexts, sizes: Sequence[int], most: int = MOST_TOKENS) -> HeadFigures:
    """See `HeadFigures`.

    Args:
        head: trained.
        texts: held out.
        sizes: nodes of trees.
        most: tokens of answers, about.
    """
    chosen: list[int] = []
    tokens = 0
    for answer, count in enumerate(torch.diff(texts.learn_starts).tolist()):
        if texts.greedy[answer] and count > MAX_DEPTH and tokens < most:
            chosen.append(answer)
            tokens += count
    if not chosen:
        return HeadFigures(np.zeros((DEPTHS, RANKS)), {}, 0)
    first = texts.top_ids[:, 0].numpy().astype(np.int32)
    came = [first[texts.learn_starts[answer] : texts.learn_starts[answer + 1]] for answer in chosen]
    device = head.lm_head.weight.device
    head.eval()
    # As heads are served, and faster than float32.
    with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device.type)):
        right = _right(head, texts, chosen)
        grown = Grown(head, texts, chosen, ASKED_PER_NODE * max(sizes))

        def grow(at: Sequence[tuple[int, int]], size: int) -> list[DraftTree]:
            proposer = Eagle(EagleOptions(model="trained", num_speculative_tokens=size, max_depth=MAX_DEPTH))
            proposer.draft = grown
            for text, place in at:
                grown.places[text] = place
            return proposer.propose(
                [Request(str(text), first[:1], 1, size, MAX_DEPTH, GREEDY) for text, _ in at]
            )

        found = tokens_per_step(came, grow, sizes, MAX_DEPTH)
    return HeadFigures(right, found, sum(map(len, came)))


def _right(head: Head, texts: EagleTexts, answers: Sequence[int]) -> Float64:
    """See `HeadFigures.right`, along the answers themselves."""
    batch = batch_of(texts, answers)
    labels = texts.top_ids[batch.labels, 0].to(head.lm_head.weight.device)
    right = np.zeros((DEPTHS, RANKS))
    for depth, output in enumerate(unrolled(head, texts, batch, DEPTHS)):
        there = torch.nonzero(batch.depths >= depth)[:, 0].to(labels.device)
        best = head.logits(output[there]).topk(min(RANKS, len(head.d2t)), 1).indices
        hits = head.token_map[best] == labels[there, None]
        right[depth, : hits.shape[1]] = hits.double().mean(0).cpu().numpy()
    return right
