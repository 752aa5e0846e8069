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
from vllm_ext.training.eagle_texts import Batch, EagleTexts, batch_of, batches_of
from vllm_ext.training.medusa import loss_of
from vllm_ext.training.timed import train_for

WEIGHT_DECAY = 0.1
DECAY = 0.8  # of the passes' weights in the loss
ALONE = 0.15  # of the time, in which the first pass learns alone: later ones build on it, and cost three times as much


def unrolled(head: Head, texts: EagleTexts, batch: Batch, num_passes: int) -> Iterator[torch.Tensor]:
    """Of each pass what it puts out ``[num_queries, size]``: see `Head.output`.

    Of pass ``k`` the first ``k`` queries of an answer mean nothing.
    """
    device = head.lm_head.weight.device
    rows, places, queries = batch.rows, batch.row_places.to(device), batch.queries.to(device)
    query_places = batch.query_places.to(device)
    turns = head.turns(texts.positions[rows].to(device))
    own_turns = turns[0][queries], turns[1][queries]
    tokens = texts.tokens[rows].to(device)
    features = head.modulated(tokens, head.features(texts.aux[rows].to(device)))
    inputs = head.inputs(tokens, features)
    tokens, features = tokens[queries], features[queries]
    num_answers = len(batch.first)

    def padded(flat: torch.Tensor, at: torch.Tensor, length: int) -> torch.Tensor:
        """``[num_answers, num_kv_heads, length * group, head_dim]`` of ``[num_rows, num_heads, head_dim]``."""
        whole = flat.new_zeros(num_answers * length, *flat.shape[1:]).index_copy(0, at, flat)
        grouped = whole.view(num_answers, length, head.num_kv_heads, -1, head.head_dim)
        return grouped.transpose(1, 2).flatten(2, 3)

    keys, values = (padded(each, places, batch.row_length) for each in head.keys_values(inputs, turns))
    inputs = inputs[queries]
    length, group = batch.query_length, head.num_heads // head.num_kv_heads
    last = batch.first.to(device)[:, None] + torch.arange(length, device=device)
    columns = torch.arange(batch.row_length, device=device)
    chain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(num_passes):
        if number:
            inputs = head.inputs(tokens, features)
            chain = [(key.roll(1, 2), value.roll(1, 2)) for key, value in chain]
            new = head.keys_values(inputs, own_turns)
            chain.append(tuple(padded(each, query_places, length) for each in new))  # type: ignore[arg-type]
        query = padded(head.queries(inputs, own_turns), query_places, length) / math.sqrt(head.head_dim)
        hidden = columns > (last - number)[:, :, None]  # [num_answers, length, row_length]
        scores = (query @ keys.transpose(2, 3)).view(*query.shape[:2], length, group, -1)
        scores = scores.masked_fill(hidden[:, None, :, None], -torch.inf)
        query = query.view(*query.shape[:2], length, group, -1)
        own = [(query * key[:, :, :, None]).sum(-1, keepdim=True) for key, _ in chain]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        attended = (weights[..., : batch.row_length].flatten(2, 3) @ values).view_as(query)
        for place, (_, value) in enumerate(chain):
            attended = attended + weights[..., batch.row_length + place, None] * value[:, :, :, None]
        flat = attended.transpose(1, 2).flatten(2).flatten(0, 1)[query_places]
        output = head.output(features, flat)
        yield output
        features = head.modulated(tokens, head.handed_on(output).roll(1, 0))


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
        passes = 1 if share < ALONE else num_passes
        places, top_logp = places_of[texts.top_ids[batch.labels]], texts.top_logp[batch.labels]
        loss = torch.zeros((), device=device)
        goal = head.goal(texts, batch)
        with products:
            for number, output in enumerate(unrolled(head, texts, batch, passes)):
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
