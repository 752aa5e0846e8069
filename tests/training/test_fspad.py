# SPDX-License-Identifier: Apache-2.0
"""FSPAD's head in training: what it adds to EAGLE-3's. The rest is tested for both, in test_eagle_training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from tiny_texts import SIZE, VOCAB, random, texts_of

from vllm_ext.training.eagle import save
from vllm_ext.training.eagle_relatives.fspad import FspadHead
from vllm_ext.training.eagle_texts import EagleTexts, batch_of
from vllm_ext.training.eagle_training import unrolled


@pytest.fixture
def head() -> FspadHead:
    return random(FspadHead)


@pytest.fixture
def texts() -> EagleTexts:
    return texts_of(1)


class OfTheArgmax(FspadHead):
    """The mutation: features meet the token that the head itself likes best there."""

    def modulated(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        return super().modulated(self.logits(torch.cat([features, features], 1)).argmax(1), features)


@torch.no_grad()
@pytest.mark.parametrize("kind", [FspadHead, OfTheArgmax])
def test_features_depend_on_the_sampled_token(
    head: FspadHead, texts: EagleTexts, kind: type[FspadHead]
) -> None:
    made = random(kind)
    features = made.features(texts.aux)
    one, other = (made.modulated(tokens, features) for tokens in (texts.tokens, (texts.tokens + 1) % VOCAB))
    moved = (one - other).abs().amax(1)
    assert (moved > 1e-3).all() if kind is FspadHead else not moved.any()


@torch.no_grad()
def test_each_pass_gives_features_the_token_that_came(head: FspadHead, texts: EagleTexts) -> None:
    batch = batch_of(texts, [0, 1])
    seen: list[torch.Tensor] = []
    modulated = head.modulated

    def watched(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        return modulated(tokens, features)

    head.modulated = watched  # type: ignore[method-assign]
    list(unrolled(head, texts, batch, 3))
    came = texts.tokens[batch.rows, None]
    assert torch.equal(seen[0], came)
    for depth, each in enumerate(seen[1:], 1):
        assert torch.equal(each, came[(batch.queries + depth).clamp(max=len(came) - 1)])


@torch.no_grad()
def test_the_embedding_gates_the_feature(head: FspadHead) -> None:
    """As the formula says, row by row."""
    tokens, features = torch.tensor([3, 17]), torch.randn(2, SIZE)
    weights = {name: each.double() for name, each in head.state_dict().items()}

    def norm(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row / (row.square().mean() + 1e-5).sqrt() * weight

    for token, feature, found in zip(tokens, features, head.modulated(tokens, features), strict=True):
        embed = norm(head.embedding[token].double(), weights["midlayer.input_layernorm.weight"])
        row = weights["sampling.fc.weight"] @ torch.cat([embed, feature.double()])
        gate = weights["sampling.gate.weight"] @ embed
        up = weights["sampling.up.weight"] @ norm(row, weights["sampling.norm.weight"])
        wanted = row + weights["sampling.down.weight"] @ (gate * torch.sigmoid(gate) * up)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_the_losses_have_a_branch_each(head: FspadHead) -> None:
    """What is said does not move what is handed on, and the other way round."""
    output = torch.randn(5, 2 * SIZE, requires_grad=True)
    (said,) = torch.autograd.grad(head.logits(output).square().sum(), output)
    assert said[:, :SIZE].abs().min() > 0
    assert not said[:, SIZE:].any()
    (aligned,) = torch.autograd.grad(head.misaligned(output, torch.randn(5, SIZE)), output)
    assert not aligned[:, :SIZE].any()
    assert aligned[:, SIZE:].abs().min() > 0


def test_goals_are_the_next_rows_features(head: FspadHead, texts: EagleTexts) -> None:
    batch = batch_of(texts, [1, 0])
    goal = head.goal(texts, batch)
    assert goal.known.tolist() == [True] * 4 + [False] + [True] * 6 + [False]
    rows = batch.rows[batch.queries]
    wanted = head.features(texts.aux)
    for place in torch.nonzero(goal.known)[:, 0].tolist():
        torch.testing.assert_close(goal.features[place], wanted[rows[place] + 1])
    right = torch.cat([torch.randn(12, SIZE), goal.features], 1)
    assert float(head.misaligned(right[goal.known], goal.features[goal.known])) < 1e-6


def test_what_is_saved_names_its_own_architecture(head: FspadHead, tmp_path: Path) -> None:
    save(head, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [FspadHead.architecture]
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["midlayer.mlp.down_proj.weight"].shape == (2 * SIZE, 24)
    assert {name for name in tensors if name.startswith("sampling.")} == {
        f"sampling.{part}.weight" for part in ("fc", "norm", "gate", "up", "down")
    }
