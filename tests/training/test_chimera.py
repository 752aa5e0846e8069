# SPDX-License-Identifier: Apache-2.0
"""Chimera's head in training: what it reads. The rest is tested with EAGLE-3's, in test_eagle_training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from tiny_texts import SIZE, VOCAB, random, texts_of

from vllm_ext.training.eagle import Head, save
from vllm_ext.training.eagle_relatives.chimera import ChimeraHead
from vllm_ext.training.eagle_texts import EagleTexts, batch_of, windows
from vllm_ext.training.eagle_training import unrolled


@pytest.fixture
def head() -> ChimeraHead:
    return random(ChimeraHead)


@pytest.fixture
def texts() -> EagleTexts:
    return texts_of(1)


def test_windows_end_with_each_rows_token_and_stay_in_their_text() -> None:
    tokens, starts = torch.tensor([5, 6, 7, 8, 1, 2]), torch.tensor([0, 0, 0, 0, 4, 4])
    assert windows(tokens, starts, 1).tolist() == [[5], [6], [7], [8], [1], [2]]
    assert windows(tokens, starts, 3).tolist() == [
        [5, 5, 5],
        [5, 5, 6],
        [5, 6, 7],
        [6, 7, 8],
        [1, 1, 1],
        [1, 1, 2],
    ]


@torch.no_grad()
def test_a_row_knows_the_order_of_its_three_tokens(head: ChimeraHead) -> None:
    features = torch.randn(3, SIZE)
    read = head.inputs(torch.tensor([[1, 2, 3], [2, 1, 3], [1, 2, 4]]), features)
    assert (read[0] - read[1]).abs().max() > 1e-2
    assert (read[0] - read[2]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("kind", [ChimeraHead, Head])
def test_what_a_pass_says_depends_on_three_tokens(texts: EagleTexts, kind: type[Head]) -> None:
    """A token changed is seen by rows of its own pass; EAGLE-3's first rows after it see it by attention alone."""
    head, batch = random(kind), batch_of(texts, [0])
    attended = []
    keys_values = head.keys_values

    def watched(
        inputs: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended.append(inputs)
        return keys_values(inputs, turns)

    head.keys_values = watched  # type: ignore[method-assign]
    for _ in range(2):
        list(unrolled(head, texts, batch, 1))
        texts.tokens[3] = (texts.tokens[3] + 1) % VOCAB
    moved = (attended[0] - attended[1]).abs().amax(1) > 1e-6
    assert moved.nonzero()[:, 0].tolist() == ([3, 4, 5] if kind is ChimeraHead else [3])


@torch.no_grad()
def test_it_begins_as_eagles(texts: EagleTexts, head: ChimeraHead) -> None:
    """By its last token alone, but for what is random."""
    layer = torch.nn.Module()
    head.begin_as(layer)
    head.trigram["down"].weight[:, : 2 * SIZE] = 0
    head.trigram["down"].weight[:, 2 * SIZE :] = torch.eye(SIZE)
    eagle = random(Head)
    eagle.load_state_dict(head.state_dict(), strict=False)
    batch = batch_of(texts, [1, 0])
    for a, b in zip(unrolled(head, texts, batch, 4), unrolled(eagle, texts, batch, 4), strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_saved_names_its_own_architecture(head: ChimeraHead, tmp_path: Path) -> None:
    save(head, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [ChimeraHead.architecture]
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["trigram.block.weight"].shape == (3 * SIZE, 3 * SIZE)
    assert tensors["trigram.down.weight"].shape == (SIZE, 3 * SIZE)
