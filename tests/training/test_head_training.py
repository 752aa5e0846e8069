# SPDX-License-Identifier: Apache-2.0
"""Training Medusa heads, in seconds: a target whose answers follow a rule that heads can learn."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.data.answers import Answer
from vllm_ext.engine.models.medusa_heads import MedusaHeads
from vllm_ext.training.draft_model import Recipe
from vllm_ext.training.figures.common import per_doubling
from vllm_ext.training.figures.medusa import figures
from vllm_ext.training.medusa import (
    Heads,
    MedusaShape,
    Texts,
    frequent,
    loss_of,
    read,
    save,
    train,
)
from vllm_ext.training.timed import ASKED, CURVE

VOCAB, WIDTH = 48, 32
SHAPE = MedusaShape(num_heads=3, num_layers=1, num_rows=40)


def nothing(*_: Any) -> None:
    """No progress bar."""


def answers(count: int) -> list[Answer]:
    """Each token's successor is the next but four."""
    made = []
    for number in range(count):
        tokens = [(number + 5 * place) % 40 for place in range(24)]
        top_ids = np.array([[token, (token + 1) % 40] for token in tokens[4:]], np.int32)
        top_logp = np.tile(np.log(np.array([0.9, 0.05], np.float32)), (20, 1))
        made.append(Answer(np.array(tokens, np.int32), 4, top_ids, top_logp))
    return made


class Target(torch.nn.Module):
    """Its hidden state is the token's embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)

    def model(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


@pytest.fixture(scope="module")
def texts() -> Texts:
    return read(Target(), answers(30), 10_000, nothing)


def test_hidden_states_stand_beside_what_follows_them(texts: Texts) -> None:
    target = Target()
    assert texts.hidden.shape == (600, WIDTH)
    assert texts.greedy.all()
    for place in range(0, 600, 7):
        following = int(texts.top_ids[place, 0])
        before = (following - 5) % 40
        torch.testing.assert_close(
            texts.hidden[place].float(), target.embedding.weight[before].to(torch.bfloat16).float()
        )
    assert texts.left[:20].tolist() == list(range(19, -1, -1))


def test_they_learn(texts: Texts, tmp_path: Path) -> None:
    token_map = frequent(texts.top_ids, texts.top_logp, VOCAB, SHAPE.num_rows)
    assert token_map.tolist() == list(range(40))
    heads = Heads(SHAPE, torch.randn(40, WIDTH) * 0.1)
    recipe = Recipe(minutes=0.12, batch_tokens=128, learning_rate=1e-2)
    before = figures(heads, texts, token_map, (3,))
    curve, points = train(heads, texts, token_map, recipe, tmp_path, nothing, nothing, lambda: 1.0)
    assert [seen for seen, _ in points] == sorted(seen for seen, _ in points)
    assert len(points) == len(ASKED) + 1
    assert curve[-1]["loss"] < 0.7 * curve[0]["loss"]
    found = figures(heads, texts, token_map, (1, 3))
    assert found.right[:, 0].min() > 0.95 > before.right[:, 0].max()
    mean, half = found.tokens_per_step[3]
    assert mean > 3.8
    assert half < 0.2
    assert 1.9 < found.tokens_per_step[1][0] <= 2.0
    assert json.loads((tmp_path / CURVE).read_text())["curve"] == curve
    # Again: it goes on, and has no time left.
    other = Heads(SHAPE, torch.zeros(40, WIDTH))
    train(other, texts, token_map, recipe, tmp_path, nothing, nothing)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), other.parameters(), strict=True))
    # What is served says what was trained.
    save(heads, token_map, VOCAB, torch.float32, tmp_path)
    served = MedusaHeads(str(tmp_path), torch.float32, torch.device("cpu"))
    hidden = texts.hidden[:9].float()
    ids, _ = served.distributions(hidden)
    for head in range(SHAPE.num_heads):
        best = (heads.state(head, hidden) @ heads.lm_head.T).argmax(1)
        assert ids[head, :, 0].tolist() == token_map[best.numpy()].tolist()


def test_heads_begin_as_the_targets_own_head() -> None:
    weight = torch.randn(40, WIDTH)
    heads = Heads(SHAPE, weight)
    hidden = torch.randn(3, WIDTH)
    for head in range(3):
        torch.testing.assert_close(heads.state(head, hidden) @ heads.lm_head.T, hidden @ weight.T)


def test_the_loss_is_least_at_the_targets_distribution() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    places = torch.tensor([[0, 1, 2]])
    least = loss_of(p.log(), places, p.log())
    assert float(least) == pytest.approx(float(-(p * p.log()).sum()))
    assert loss_of(torch.tensor([[0.4, 0.4, 0.2]]).log(), places, p.log()) > least
    # What the language head has no row for counts nothing.
    half = loss_of(p.log(), torch.tensor([[0, -1, 2]]), p.log())
    assert float(half) == pytest.approx(-0.5 * np.log(0.5) - 0.2 * np.log(0.2))


def test_what_twice_the_training_brings() -> None:
    assert per_doubling([(100, 1.5), (200, 1.6), (400, 1.7), (800, 1.8)]) == pytest.approx(0.1)
    assert per_doubling([(100, 1.5), (800, 1.8)]) is None
