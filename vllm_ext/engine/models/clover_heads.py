# SPDX-License-Identifier: Apache-2.0
"""Heads that go on from the target's last hidden state by the tokens of a branch: one cell, used at each depth.

A state stands for a text. The first is what the target made of the text before the last token, passed through a block
of its own; the cell makes of a state and a token the state behind that token, and a language head says of each state
what comes next. In training and in use the module is this one.

A checkpoint is a folder with ``config.json`` and tensors of the module's own names; `CloverShape` says what their sizes
are. Embeddings are the target's and are not in it.

Source: "Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge", arXiv 2405.00263: the
augmenting block, and the regressive connection; "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv
2402.05109: a token's embedding beside the state as what a head reads. Deviations: one cell for all depths, so that
trees may be deeper than training was; a gated MLP where Clover's cell attends to the branch's tokens and its augmenting
block to the text, so that nothing is kept between steps; one shortened language head, whose rows are the target's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import rms_norm, silu

from vllm_ext.engine.models.checkpoint import Checkpoint, likeliest, product

WAY_OUT = "Name a folder that `vllm-ext train heads --kind clover` has made for this model."
ARCHITECTURE = "CloverHeads"
EPS = 1e-6


class CloverShape(NamedTuple):
    """Of a checkpoint's config."""

    hidden_size: int
    intermediate_size: int  # of the cell's MLP
    vocab_size: int
    num_rows: int  # of the language head


class CloverHeads(torch.nn.Module):
    """The heads.

    Args:
        shape: their sizes.
    """

    token_map: torch.Tensor  # int64 [num_rows] ids of the tokens that the language head says

    def __init__(self, shape: CloverShape) -> None:
        super().__init__()
        self.shape = shape
        size, inner = shape.hidden_size, shape.intermediate_size
        self.augment = _linear(size, size)
        self.regress = _linear(2 * size, size)
        self.gate_up = _linear(size, 2 * inner)
        self.down = _linear(inner, size)
        self.norm = torch.nn.Parameter(torch.ones(size))
        self.lm_head = _linear(size, shape.num_rows)
        self.register_buffer("token_map", torch.arange(shape.num_rows))

    @property
    def num_bytes(self) -> int:
        """Of their weights."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def first(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """The states behind texts.

        Args:
            hidden: ``[num_rows, hidden_size]`` of the target, behind its last norm, of the last token but one.
            embeds: ``[num_rows, hidden_size]`` of the last token, at any scale.

        Returns:
            ``[num_rows, hidden_size]``.
        """
        return self.following(hidden + silu(product(self.augment, hidden)), embeds)

    def following(self, states: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """The states one token on.

        Args:
            states: ``[num_rows, hidden_size]``.
            embeds: ``[num_rows, hidden_size]`` of the tokens, at any scale.

        Returns:
            ``[num_rows, hidden_size]``.
        """
        read = torch.cat([_normed(states), _normed(embeds).to(states.dtype)], 1)
        states = states + product(self.regress, read)
        gate, up = product(self.gate_up, _normed(states)).chunk(2, 1)
        return states + product(self.down, silu(gate) * up)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[num_rows, rows of the language head]`` of what comes next."""
        weight = self.norm.to(states.dtype)
        return product(self.lm_head, _normed(states) * weight)

    def distributions(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes next: see `checkpoint.likeliest`."""
        return likeliest(self.logits(states), self.token_map)


def _linear(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, bias=False)


def _normed(rows: torch.Tensor) -> torch.Tensor:
    return rms_norm(rows, rows.shape[1:], eps=EPS)


def read_shape(name: str) -> tuple[Checkpoint, CloverShape]:
    """The folder of heads and their shape.

    Raises:
        ValueError: there is no such folder, or its config is none of such heads.
    """
    checkpoint = Checkpoint(name, WAY_OUT)
    checkpoint.expect(ARCHITECTURE, "Clover heads")
    return checkpoint, CloverShape(*checkpoint.numbers(CloverShape._fields))


def check(vllm_config: Any, name: str) -> CloverShape:
    """Refuse at start-up heads that do not fit the target.

    Raises:
        ValueError: naming what does not, and the way out.
    """
    checkpoint, shape = read_shape(name)
    checkpoint.check_sizes(vllm_config, shape.hidden_size, shape.vocab_size)
    return shape


def load(name: str, dtype: torch.dtype, device: torch.device) -> CloverHeads:
    """The heads of a folder.

    Args:
        name: folder or hub name, which was checked.
        dtype: of the target.
        device: of the target.

    Raises:
        ValueError: weights are missing, or have other shapes than the config says.
    """
    checkpoint, shape = read_shape(name)
    with torch.device("meta"):
        heads = CloverHeads(shape)
    stored = checkpoint.tensors()
    taken = {key: checkpoint.take(stored, key, value.shape) for key, value in heads.state_dict().items()}
    taken["token_map"] = taken["token_map"].long()
    if not 0 <= int(taken["token_map"].min()) <= int(taken["token_map"].max()) < shape.vocab_size:
        raise checkpoint.error(f": token_map has ids that are not below vocab_size={shape.vocab_size}")
    heads.load_state_dict(taken, assign=True)
    return heads.requires_grad_(False).to(device, dtype)
