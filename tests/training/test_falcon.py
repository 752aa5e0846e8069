# SPDX-License-Identifier: Apache-2.0
"""Falcon's head in training: what rows of a block see. That growth computes the same: test_eagle_training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from tiny_texts import CONFIG, LEARNING, LENGTHS, SIZE, VOCAB, random, texts_of

from vllm_ext.training.eagle import Head
from vllm_ext.training.eagle_relatives.falcon import GLANCED, FalconHead
from vllm_ext.training.eagle_texts import EagleTexts, batch_of
from vllm_ext.training.eagle_training import unrolled


@pytest.fixture
def texts() -> EagleTexts:
    return texts_of(1)


@pytest.fixture
def head() -> FalconHead:
    return random(FalconHead)


def naive(head: Head, rows: list[tuple[int, torch.Tensor, int]], block: int) -> list[torch.Tensor]:
    """What the last ``block`` rows put out, token, feature and position of each given: all see all, by loops."""
    inputs = [head.inputs(torch.tensor([token]), feature[None])[0] for token, feature, _ in rows]
    turns = [head.turns(torch.tensor([position])) for *_, position in rows]
    found = [head.keys_values(each[None], turn) for each, turn in zip(inputs, turns, strict=True)]
    outputs = []
    for own in range(len(rows) - block, len(rows)):
        query = head.queries(inputs[own][None], turns[own])[0]
        # The last row is not read again: it sees its own key once, the others theirs twice.
        seen = [*range(len(rows)), *([own] if own < len(rows) - 1 else [])]
        parts = []
        for number in range(head.num_heads):
            kv = number * head.num_kv_heads // head.num_heads
            scores = torch.stack([query[number] @ found[row][0][0, kv] for row in seen]) / math.sqrt(
                head.head_dim
            )
            parts.append(
                sum(w * found[row][1][0, kv] for w, row in zip(scores.softmax(0), seen, strict=True))
            )
        outputs.append(head.output(rows[own][1][None], torch.cat(parts)[None])[0])
    return outputs


@torch.no_grad()
def test_rows_of_a_block_see_each_other(head: FalconHead, texts: EagleTexts) -> None:
    """Against plain loops, over two blocks of a chain."""
    for answer in (0, 1):
        passes = list(unrolled(head, texts, batch_of(texts, [answer]), 4))
        start = int(texts.starts[answer])
        tokens = texts.tokens[start : start + LENGTHS[answer]].tolist()
        features = head.features(texts.aux[start : start + LENGTHS[answer]])
        first = LENGTHS[answer] - LEARNING[answer]
        for query in range(LEARNING[answer] - 3):
            end = first + query
            rows = [(tokens[row], features[row], row) for row in range(end + 1)]
            for depth in (0, 2):
                wanted = naive(head, rows, 2)
                for number in (0, 1):
                    found = passes[depth + number][query + depth + number]
                    torch.testing.assert_close(found, wanted[number], rtol=1e-4, atol=1e-4)
                behind = range(end + depth + 1, min(end + depth + 3, len(tokens)))
                rows += [(tokens[row], feature, row) for row, feature in zip(behind, wanted, strict=False)]


@torch.no_grad()
def test_a_strict_mask_is_another_head(head: FalconHead, texts: EagleTexts) -> None:
    """The mutation: a block's first row that does not see the last one says something else."""
    batch = batch_of(texts, [0])
    said, *_ = unrolled(head, texts, batch, 1)
    strict = random(Head)
    strict.load_state_dict(head.state_dict())
    alone, *_ = unrolled(strict, texts, batch, 1)
    assert (said[1:] - alone[:-1]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("answers", [[0], [1, 0]])
def test_blocks_of_one_row_are_eagles(texts: EagleTexts, answers: list[int]) -> None:
    one, eagle = random(FalconHead, falcon_block=1), random(Head)
    eagle.load_state_dict(one.state_dict())
    batch = batch_of(texts, answers)
    for a, b in zip(unrolled(one, texts, batch, 4), unrolled(eagle, texts, batch, 4), strict=True):
        assert torch.equal(a, b)


def test_glancing_fades_and_is_for_training(head: FalconHead) -> None:
    features, truth = torch.zeros(20_000, SIZE), torch.ones(20_000, SIZE)
    assert torch.equal(head.glanced(features, truth), features)
    head.train()
    for spent, share in ((0.0, GLANCED[0]), (1.0, GLANCED[1])):
        head.spent = spent
        found = head.glanced(features, truth)
        assert torch.equal(found.amax(1), found.amin(1))
        assert abs(float(found.mean()) - share) < 0.02


def test_what_a_checkpoint_says() -> None:
    made: Any = random(FalconHead)
    assert (made.block, made.config["falcon_block"]) == (2, 2)
    assert np.array_equal(made.token_map, np.arange(VOCAB))
    assert CONFIG.keys() <= made.config.keys()
