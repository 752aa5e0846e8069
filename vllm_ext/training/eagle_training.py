# SPDX-License-Identifier: Apache-2.0
"""Train a head of EAGLE-3 as it is used: a pass after the first reads what the head itself put out.

The first pass has a row for each token that the target has read. In pass ``k`` a row's feature is what pass ``k - 1``
put out for the row before; it attends to the target's rows up to ``k`` before itself, and to its own chain since. So
row ``i`` of pass ``k`` is what growth computes for a node of depth ``k`` whose path is the text, and learns the
target's own distribution there.

Source: training-time test, EAGLE-3, arXiv 2503.01840, section 3.2; a pass weighs `DECAY` times the one before, as its
code has it. Deviations: distributions as far as the target's `top_k` alternatives go, and of the tokens that the head
has rows for; the target's own answers, which are few, several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_ext.data.atomic_files import Progress
from vllm_ext.training.draft_model import Recipe, multiplies_bfloat16
from vllm_ext.training.eagle import Head
from vllm_ext.training.eagle_texts import Batch, EagleTexts, batch_of, batches_of, windows
from vllm_ext.training.medusa import loss_of
from vllm_ext.training.timed import train_for

WEIGHT_DECAY = 0.1
DECAY = 0.8  # of the passes' weights in the loss
ALONE = 0.15  # of the time, in which the first pass learns alone: later ones build on it, and cost three times as much


def unrolled(head: Head, texts: EagleTexts, batch: Batch, num_depths: int) -> Iterator[torch.Tensor]:
    """Of each depth what the row that says it puts out ``[num_queries, size]``: see `Head.output`.

    Of depth ``k`` the first ``k`` queries of an answer mean nothing. A pass gives as many depths as a block has rows.
    """
    reading = _Reading(head, texts, batch)
    outputs: list[torch.Tensor] = []
    for first in range(0, num_depths, head.block):
        outputs = reading.block(first, outputs)
        for depth, output in enumerate(outputs[: num_depths - first], first):
            yield output.roll(depth, 0)


class _Reading:
    """Texts that a head has read, and for each query the chain that grows from it along the text."""

    def __init__(self, head: Head, texts: EagleTexts, batch: Batch) -> None:
        self._head, self._batch = head, batch
        device = head.lm_head.weight.device
        self._queries, self._places = batch.queries.to(device), batch.query_places.to(device)
        self._starts = batch.starts[batch.queries].to(device)
        self._tokens = windows(texts.tokens[batch.rows], batch.starts, head.num_read).to(device)
        self._turns = head.turns(texts.positions[batch.rows].to(device))
        self._features = head.features(texts.aux[batch.rows].to(device))
        self._modulated = head.modulated(self._tokens, self._features)
        found = head.keys_values(head.inputs(self._tokens, self._modulated), self._turns)
        places = batch.row_places.to(device)
        self._keys, self._values = (self._padded(each, places, batch.row_length) for each in found)
        last = batch.first.to(device)[:, None] + torch.arange(batch.query_length, device=device)
        self._unseen = torch.arange(batch.row_length, device=device) > last[:, :, None]
        self._chain: list[tuple[torch.Tensor, torch.Tensor]] = []

    def block(self, first: int, above: list[torch.Tensor]) -> list[torch.Tensor]:
        """One pass: ``[num_queries, size]`` of each of its rows.

        Args:
            first: the depth of what the block's first row says.
            above: what the block before put out; none of the first, whose rows are the text's.
        """
        head, rows = self._head, []
        for number in range(head.block):
            at = self._queries + 1 - head.block + number + first
            at = torch.maximum(at, self._starts).clamp(max=len(self._tokens) - 1)
            turns = self._turns[0][at], self._turns[1][at]
            if above:
                handed_on = head.glanced(head.handed_on(above[number]), self._features[at])
                features = head.modulated(self._tokens[at], handed_on)
            else:
                features = self._modulated[at]
            inputs = head.inputs(self._tokens[at], features)
            # The last row of a text's block needs no keys but those that are there.
            again = number < head.block - 1
            own = [self._kept(each) for each in head.keys_values(inputs, turns)] if above or again else []
            if above:
                self._chain.append((own[0], own[1]))
            rows.append((features, head.queries(inputs, turns), [(own[0], own[1])] if again else []))
        return [head.output(features, self._attend(query, again)) for features, query, again in rows]

    def _attend(self, queries: torch.Tensor, again: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """``[num_queries, num_heads * head_dim]`` over the text, the chain, and rows that are read again."""
        head, batch = self._head, self._batch
        length, chain = batch.query_length, [*self._chain, *again]
        query = self._kept(queries) / math.sqrt(head.head_dim)
        grouped = (*query.shape[:2], length, query.shape[2] // length, -1)
        scores = (query @ self._keys.transpose(2, 3)).view(grouped)
        scores = scores.masked_fill(self._unseen[:, None, :, None], -torch.inf)
        query = query.view(grouped)
        own = [(query * key[:, :, :, None]).sum(-1, keepdim=True) for key, _ in chain]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        attended = (weights[..., : batch.row_length].flatten(2, 3) @ self._values).view_as(query)
        for place, (_, value) in enumerate(chain):
            attended = attended + weights[..., batch.row_length + place, None] * value[:, :, :, None]
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)[self._places]

    def _kept(self, flat: torch.Tensor) -> torch.Tensor:
        return self._padded(flat, self._places, self._batch.query_length)

    def _padded(self, flat: torch.Tensor, at: torch.Tensor, length: int) -> torch.Tensor:
        """``[num_answers, num_kv_heads, length * group, head_dim]`` of ``[num_rows, num_heads, head_dim]``."""
        head, num_answers = self._head, len(self._batch.first)
        whole = flat.new_zeros(num_answers * length, *flat.shape[1:]).index_copy(0, at, flat)
        grouped = whole.view(num_answers, length, head.num_kv_heads, -1, head.head_dim)
        return grouped.transpose(1, 2).flatten(2, 3)


def train(
    head: Head,
    texts: EagleTexts,
    num_passes: int,
    recipe: Recipe,
    folder: Path,
    report: Progress,
    log: Callable[[str], None],
    worth: Callable[[], float] | None = None,
) -> tuple[list[dict[str, float]], list[tuple[int, float]]]:
    """Train in place, from the folder's checkpoint where there is one.

    Args:
        head: of `Head`.
        texts: to learn from.
        num_passes: deepest node that training unrolls to.
        recipe: how; its ``batch_tokens`` are a step's rows that learn, about.
        folder: of the checkpoint and the curve.
        report: progress in seconds of training.
        log: takes a line with the loss at each checkpoint.
        worth: of the head as it is; asked now and then.

    Returns:
        the loss curve, and by tokens learnt from what the head was worth then.
    """
    device = head.lm_head.weight.device
    places_of = torch.full((head.config["vocab_size"],), -1)
    places_of[head.token_map.cpu()] = torch.arange(len(head.d2t))
    learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        learning, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
    )
    products = torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device.type))
    per_epoch = sum(1 for _ in batches_of(texts, recipe.batch_tokens, 0))
    epochs: dict[int, list[list[int]]] = {}

    def loss_at(step: int, share: float) -> torch.Tensor:
        epoch, place = divmod(step, per_epoch)
        if epoch not in epochs:
            epochs.clear()
            seed = recipe.seed * 1_000_003 + epoch
            epochs[epoch] = list(batches_of(texts, recipe.batch_tokens, seed))
        head.train()  # figures were asked for in between
        batch = batch_of(texts, epochs[epoch][place])
        depths = batch.depths
        depths_learnt = min(head.block if share < ALONE else num_passes, num_passes)
        places, top_logp = places_of[texts.top_ids[batch.labels]], texts.top_logp[batch.labels]
        loss = torch.zeros((), device=device)
        goal = head.goal(texts, batch) if head.aligned else None
        head.spent = share
        with products:
            for number, output in enumerate(unrolled(head, texts, batch, depths_learnt)):
                there = torch.nonzero(depths >= number)[:, 0]
                logits = head.logits(output[there.to(device)])
                own = loss_of(logits, places[there].to(device), top_logp[there].to(device))
                if goal is not None:
                    at = there[goal.known[there]].to(device)
                    own = own + head.misaligned(output[at], goal.features[at])
                loss = loss + DECAY**number * own
        return loss

    curve, points = train_for(head, optimizer, loss_at, recipe, folder, report, log, worth)
    return curve, [(step * recipe.batch_tokens, each) for step, each in points]
