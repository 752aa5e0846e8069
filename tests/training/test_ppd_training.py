# SPDX-License-Identifier: Apache-2.0
"""Training prompt tokens: what they see, that they learn, and what they are worth; the target is a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.data.answers import Answer
from vllm_ext.engine.models.prompt_embeddings import load, read_shape
from vllm_ext.proposers.base import Request
from vllm_ext.proposers.ppd import Ppd
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.training.draft_model import Recipe
from vllm_ext.training.figures.ppd import Said, _decode, figures
from vllm_ext.training.ppd import Prompts, chains_of, first_place, save, train

VOCAB, COUNT, LENGTH = 48, 2, 64


def nothing(*_: Any) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def model() -> Any:
    """It knows that a token's successor is the next but four; and what two tokens of its own, 40 and 41, ask for.

    Those stand behind some text, the first one for the successor's successor, the other one for that one's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for step in range(400):
        length = 4 + step % 18
        text = (torch.randint(40, (32, 1)) + 5 * torch.arange(length + 3)) % 40
        asked = torch.tensor([[40, 41]]).expand(32, 2)
        ids = torch.cat([text[:, :length], asked], 1)
        logits = made(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss.detach()) < 0.1
    return made.eval()


def answers(count: int) -> list[Answer]:
    """Greedy answers in which each token is five more than the one before it, modulo 40."""
    made = []
    for number in range(count):
        tokens = [(number + 5 * place) % 40 for place in range(24)]
        top_ids = np.array([[token, (token + 1) % 40] for token in tokens[4:]], np.int32)
        top_logp = np.tile(np.log(np.array([0.95, 0.02], np.float32)), (20, 1))
        made.append(Answer(np.array(tokens, np.int32), 4, top_ids, top_logp))
    return made


def test_chains_see_the_text_before_them_and_nobody_sees_them(model: Any) -> None:
    """Many in one pass say what each says alone, behind its part of the text."""
    prompts = Prompts(model, COUNT)
    (answer,) = answers(1)
    places = np.array([3, 9, 10, 22], np.int32)
    with torch.no_grad():
        found = prompts.hidden(model, chains_of(answer, places, LENGTH, "cpu"))
        assert found.shape == (4, COUNT, 32)
        table = model.get_input_embeddings()
        for chain, place in zip(found, places.tolist(), strict=True):
            text = table(torch.from_numpy(answer.tokens[: place + 1].astype(np.int64)))
            rows = torch.cat([text, prompts.embeddings])[None]
            alone = model.model(inputs_embeds=rows).last_hidden_state[0, -COUNT:]
            torch.testing.assert_close(chain, alone, atol=1e-4, rtol=1e-4)


def test_of_long_answers_the_end_is_read(model: Any) -> None:
    prompts = Prompts(model, COUNT)
    (answer,) = answers(1)
    assert first_place(answer, 100) == 3
    assert first_place(answer, 10) == 14
    chains = chains_of(answer, np.array([14, 20], np.int32), 10, "cpu")
    assert chains.ids[0].tolist() == answer.tokens[14:].tolist()
    assert chains.places.tolist() == [0, 6]
    assert prompts.hidden(model, chains).shape == (2, COUNT, 32)


def test_they_learn(model: Any, tmp_path: Path) -> None:
    learnt, held_out = answers(30), answers(6)
    prompts = Prompts(model, COUNT)
    weights = [parameter.clone() for parameter in model.parameters()]
    before = figures(model, prompts, held_out, (8,), LENGTH, 100)
    recipe = Recipe(minutes=0.2, batch_tokens=24, learning_rate=3e-2)
    curve, points = train(model, prompts, learnt, recipe, tmp_path, nothing, nothing, lambda: 1.0)
    assert [seen for seen, _ in points] == sorted(seen for seen, _ in points)
    assert curve[-1]["loss"] < 0.6 * curve[0]["loss"]
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    found = figures(model, prompts, held_out, (1, 8), LENGTH, 100)
    assert found.num_tokens >= 80
    assert found.right[:, 0].min() > 0.9 > before.right[:, 0].max()
    # A token of each depth and one more, after a step that asks; with one row it asks every other step.
    assert found.tokens_per_step[8][0] > max(2.2, before.tokens_per_step[8][0] + 0.4)
    assert 1.4 < found.tokens_per_step[1][0] < 1.7
    # Again: it goes on, and has no time left.
    other = Prompts(model, COUNT, seed=1)
    train(model, other, learnt, recipe, tmp_path, nothing, nothing)
    assert torch.equal(other.embeddings, prompts.embeddings)
    # What is served is what was trained.
    save(prompts, VOCAB, torch.float32, tmp_path)
    assert torch.equal(load(str(tmp_path)), prompts.embeddings.detach())
    assert read_shape(str(tmp_path))[1] == (COUNT, 32, VOCAB)


def test_answers_that_are_too_short_are_refused(model: Any, tmp_path: Path) -> None:
    (answer,) = answers(1)
    short = Answer(answer.tokens[:6], 4, answer.top_ids[:2], answer.top_logp[:2])
    with pytest.raises(ValueError, match="none of 1 answers has 4 tokens to learn from"):
        train(model, Prompts(model, COUNT), [short], Recipe(minutes=0.01), tmp_path, nothing, nothing)


def test_figures_decode_one_step_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said at a prompt token counts only where one stood below the last accepted node."""
    tokens = np.arange(12, dtype=np.int32)
    ids = (np.arange(12)[:, None, None] + 2 + np.arange(COUNT)[:, None]).astype(np.int32)
    log_p = np.tile(np.log(np.array([0.99, 0.01], np.float32)), (12, COUNT, 1))
    said = Said(tokens, np.concatenate([ids, ids * 0 + 40], 2), log_p)
    assert _decode(Ppd(VOCAB, COUNT, 2), said, 2) == [1, 3, 1, 3]
    seen: list[int] = []
    propose = Ppd.propose

    def watched(ppd: Ppd, asked: Sequence[Request]) -> list[DraftTree]:
        trees = propose(ppd, asked)
        seen.extend(int(tree.tokens[0]) for tree in trees)
        return trees

    monkeypatch.setattr(Ppd, "propose", watched)
    assert _decode(Ppd(VOCAB, COUNT, 1), said, 1) == [1, 2, 1, 2, 1, 2]
    assert seen == [VOCAB, 3, VOCAB, 6, VOCAB, 9]
