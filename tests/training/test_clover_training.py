# SPDX-License-Identifier: Apache-2.0
"""Training Clover's heads, in seconds: answers in which a token says what the one before it leaves open."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.data.answers import Answer
from vllm_ext.engine.models import clover_heads
from vllm_ext.training.clover import Heads, Sizes, begun, save
from vllm_ext.training.draft_model import Recipe
from vllm_ext.training.figures.clover import figures
from vllm_ext.training.medusa import Texts, frequent, read, train

VOCAB, WIDTH, USED = 48, 32, 40
SIZES = Sizes(num_heads=3, intermediate_size=48, num_rows=USED)


def nothing(*_: Any) -> None:
    """No progress bar."""


def answers(count: int) -> list[Answer]:
    """A token's successor is a function of it seven times of ten, and any token else."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        tokens = [int(draw.integers(USED))]
        for _ in range(23):
            jump = draw.integers(USED) if draw.random() < 0.3 else tokens[-1] * 7 + 3
            tokens.append(int(jump) % USED)
        output = tokens[4:]
        top_ids = np.array([[token, (token + 1) % USED] for token in output], np.int32)
        top_logp = np.tile(np.log(np.array([0.9, 0.05], np.float32)), (20, 1))
        made.append(Answer(np.array(tokens, np.int32), 4, top_ids, top_logp))
    return made


class Target(torch.nn.Module):
    """Its hidden state is the token's embedding."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        for layer in (self.embedding, self.head):
            layer.weight.data = torch.randn(VOCAB, WIDTH, generator=draw)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCAB))

    def model(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


@pytest.fixture(scope="module")
def texts() -> Texts:
    return read(Target(), answers(60), 10_000, nothing)


@pytest.fixture
def heads(texts: Texts) -> Heads:
    token_map = frequent(texts.top_ids, texts.top_logp, VOCAB, SIZES.num_rows)
    assert token_map.tolist() == list(range(USED))
    torch.manual_seed(0)
    return begun(Target(), SIZES, token_map, texts)


def test_states_read_the_answers_own_tokens(texts: Texts, heads: Heads) -> None:
    """Those that follow a row, as far as the answer goes; the language head begins as the target's."""
    torch.testing.assert_close(heads.cell.lm_head.weight, Target().head.weight[:USED])
    torch.nn.init.normal_(heads.cell.down.weight, std=0.1)
    rows = torch.tensor([0, 17, 18, 19, 20])  # an answer has 20
    found = list(heads.states(texts, rows))
    assert [following.tolist() for following, _ in found] == [[1, 18, 19, 21], [2, 19, 22], [3, 23]]
    tokens = texts.tokens
    assert tokens[:20].tolist() == answers(1)[0].tokens[4:].tolist()
    embeds = Target().embedding.weight
    states = heads.cell.first(texts.hidden[:1].float(), embeds[tokens[:1]])
    for depth in (1, 2):
        states = heads.cell.following(states, embeds[tokens[depth : depth + 1]])
    torch.testing.assert_close(found[2][1][:1], states)


def test_they_learn_what_the_branch_says(texts: Texts, heads: Heads, tmp_path: Path) -> None:
    """The token before says the next one seven times of ten, at each depth; the hidden state at none."""
    recipe = Recipe(minutes=0.12, batch_tokens=128, learning_rate=1e-2)
    kept = heads.cell.lm_head.weight.clone()
    token_map = heads.cell.token_map.numpy().astype(np.int32)
    curve, _ = train(heads, texts, token_map, recipe, tmp_path, nothing, nothing)
    assert curve[-1]["loss"] < 0.8 * curve[0]["loss"]
    assert torch.equal(kept, heads.cell.lm_head.weight)
    found = figures(heads, texts, (1, 8))
    assert found.right.shape[0] == SIZES.num_heads
    assert found.right[:, 0].min() > 0.65
    assert found.tokens_per_step[8][0] > 2.5
    assert found.tokens_per_step[8][0] > found.tokens_per_step[1][0]
    # What is served is what was trained; the mutation, a head without the token, would know nothing.
    save(heads, torch.float32, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["num_heads"]) == (["CloverHeads"], 3)
    served = clover_heads.load(str(tmp_path), torch.float32, torch.device("cpu"))
    hidden, embeds = texts.hidden[:9].float(), heads.embeds(texts.tokens[:9])
    torch.testing.assert_close(
        served.logits(served.first(hidden, embeds)), heads.cell.logits(heads.cell.first(hidden, embeds))
    )
    with torch.no_grad():
        heads.cell.regress.weight[:, WIDTH:] = 0.0
    assert figures(heads, texts, (1,)).right[:, 0].max() < 0.3
