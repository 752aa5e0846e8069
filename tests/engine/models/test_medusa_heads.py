# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Medusa heads: both layouts, shortened vocabularies, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_heads
import torch
from tiny_heads import of_target

from vllm_ext.engine.models.medusa_heads import MedusaHeads, check, read_shape

WIDTH, VOCAB, HEADS = 16, 64, 3


def weights(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    heads = [torch.randn(VOCAB, WIDTH, generator=draw) for _ in range(HEADS)]
    return heads, [torch.randn(WIDTH, WIDTH, generator=draw) / 4 for _ in range(HEADS)]


def load(folder: Path | str) -> MedusaHeads:
    return MedusaHeads(str(folder), torch.float32, torch.device("cpu"))


def reference(
    hidden: torch.Tensor, head: torch.Tensor, block: torch.Tensor, token_map: torch.Tensor | None
) -> torch.Tensor:
    """Log-probabilities ``[num_rows, VOCAB]``."""
    state = hidden + torch.nn.functional.silu(hidden @ block.T)
    logits = torch.full((len(hidden), VOCAB), -torch.inf)
    if token_map is None:
        logits = state @ head.T
    else:
        logits[:, token_map] = state @ head.T
    return logits.log_softmax(1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shortened", [False, True])
def test_what_heads_say(tmp_path: Path, shared: bool, shortened: bool) -> None:
    heads, blocks = weights()
    heads = heads[:1] if shared else heads
    token_map = torch.arange(3, 63, 2) if shortened else None
    if token_map is not None:
        heads = [head[token_map] for head in heads]
    folder = tiny_heads.write(
        tmp_path / "heads", heads, blocks, shared=shared, token_map=token_map, vocab_size=VOCAB
    )
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    ids, log_q = load(folder).distributions(hidden)
    assert ids.shape == log_q.shape == (HEADS, 5, min(32, len(heads[0])))
    for number, block in enumerate(blocks):
        wanted = reference(hidden, heads[0 if shared else number], block, token_map)
        best = wanted.topk(ids.shape[2], 1)
        assert ids[number].tolist() == best.indices.tolist()
        torch.testing.assert_close(log_q[number], best.values)


def test_the_papers_own_keys(tmp_path: Path) -> None:
    heads, blocks = weights()
    wanted = load(tiny_heads.write(tmp_path / "new", heads, blocks))
    old = tmp_path / "old"
    old.mkdir()
    stored = {f"{number}.0.linear.weight": block for number, block in enumerate(blocks)}
    stored |= {f"{number}.1.weight": head for number, head in enumerate(heads)}
    torch.save(stored, old / "medusa_lm_head.pt")
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "hidden_size": WIDTH, "vocab_size": VOCAB}
    (old / "config.json").write_text(json.dumps(config))
    hidden = torch.randn(4, WIDTH)
    torch.testing.assert_close(load(old)(hidden), wanted(hidden))


def test_what_is_refused(tmp_path: Path) -> None:
    heads, blocks = weights()
    folder = tiny_heads.write(tmp_path / "heads", heads, blocks)
    assert check(of_target(WIDTH, VOCAB), folder).num_heads == HEADS
    with pytest.raises(
        ValueError, match=r"model='.*': its hidden_size is 16, that of target 32.*train heads"
    ):
        check(of_target(32, VOCAB), folder)
    with pytest.raises(ValueError, match="its vocab_size is 64, that of target 65"):
        check(of_target(WIDTH, 65), folder)
    with pytest.raises(ValueError, match=r"cannot be read.*train heads"):
        read_shape(str(tmp_path / "nothing"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(ValueError, match="no checkpoint of Medusa heads"):
        read_shape(str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"num_heads": 4}, "no blocks.3.layers.0.weight"),
        ({"num_hidden_layers": 2}, "no blocks.0.layers.1.weight"),
        ({"truncated_vocab_size": 32}, "no token_map"),
        ({"vocab_size": 128, "truncated_vocab_size": 128}, "lm_heads.0.weight has 64 rows, the config 128"),
        ({"hidden_size": 8}, r"blocks.0.layers.0.weight is \[16, 16\], not 8 x 8"),
    ],
)
def test_weights_that_are_not_what_the_config_says(
    tmp_path: Path, changed: dict[str, int], problem: str
) -> None:
    folder = Path(tiny_heads.write(tmp_path / "heads", *weights()))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ValueError, match=f"speculative_config.model=.*{problem}.*train heads"):
        load(folder)
