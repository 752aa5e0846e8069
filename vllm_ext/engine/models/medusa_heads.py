# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads, in the layout that vLLM reads: residual blocks, and a language head for all or for each.

Keys of a checkpoint: ``blocks.{head}.layers.{layer}.weight`` (and ``bias``), ``lm_heads.{head}.weight``; with
``original_lm_head`` in the config the first of these serves all heads. ``token_map`` says which tokens the rows of a
shortened language head are (``truncated_vocab_size``). The older keys of the paper's own code are read too.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from vllm_ext.engine.models.checkpoint import Checkpoint, likeliest, product

WAY_OUT = "Name a folder that `vllm-ext train heads --kind medusa` has made for this model, or heads published for it."
OLD_KEY = re.compile(r"(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")


class HeadShape(NamedTuple):
    """Of a checkpoint's config."""

    num_heads: int
    num_layers: int  # of each residual block
    hidden_size: int
    vocab_size: int
    num_rows: int  # of a language head
    shared: bool  # whether one language head serves all


def read_shape(name: str) -> tuple[Checkpoint, HeadShape]:
    """The folder of heads and their shape.

    Raises:
        ValueError: there is no such folder, or its config is not Medusa's.
    """
    checkpoint = Checkpoint(name, WAY_OUT)
    config = checkpoint.config
    num_heads = config.get("num_heads", config.get("medusa_num_heads"))
    if num_heads is None or not isinstance(config.get("hidden_size"), int):
        raise checkpoint.error(
            " is no checkpoint of Medusa heads: its config.json has no num_heads or no hidden_size"
        )
    vocab_size = int(config.get("vocab_size", 32001))  # as in vLLM's MedusaConfig
    rows = int(config.get("truncated_vocab_size") or vocab_size)
    layers = int(config.get("num_hidden_layers", config.get("medusa_num_layers", 1)))
    shared = bool(config.get("original_lm_head", False))
    return checkpoint, HeadShape(int(num_heads), layers, config["hidden_size"], vocab_size, rows, shared)


def check(vllm_config: Any, name: str) -> HeadShape:
    """Refuse at start-up heads that do not fit the target.

    Raises:
        ValueError: naming what does not, and the way out.
    """
    checkpoint, shape = read_shape(name)
    checkpoint.check_sizes(vllm_config, shape.hidden_size, shape.vocab_size)
    return shape


class MedusaHeads(torch.nn.Module):
    """Read from a folder; `distributions` is one pass of all heads.

    Args:
        name: folder or hub name, which was checked.
        dtype: of the target.
        device: of the target.

    Raises:
        ValueError: weights are missing or have other shapes than the config says.
    """

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        checkpoint, self.shape = read_shape(name)
        shape = self.shape
        stored = _renamed(checkpoint.tensors())
        self.token_map: torch.Tensor | None = None
        if shape.num_rows < shape.vocab_size:
            self.token_map = checkpoint.take(stored, "token_map", (shape.num_rows,)).to(device).long()
        square = shape.hidden_size, shape.hidden_size
        self.blocks = torch.nn.ModuleList()
        for head in range(shape.num_heads):
            layers = torch.nn.ModuleList()
            for layer in range(shape.num_layers):
                key = f"blocks.{head}.layers.{layer}"
                weight = checkpoint.take(stored, f"{key}.weight", square)
                layers.append(_linear(weight, stored.get(f"{key}.bias"), dtype, device))
            self.blocks.append(layers)
        self.lm_heads = torch.nn.ModuleList()
        for head in range(1 if shape.shared else shape.num_heads):
            key = f"lm_heads.{head}.weight" if f"lm_heads.{head}.weight" in stored else "lm_head.weight"
            weight = checkpoint.take(stored, key, (None, shape.hidden_size))
            if self.token_map is not None and len(weight) > shape.num_rows:
                weight = weight[self.token_map.cpu()]
            if len(weight) != shape.num_rows:
                raise checkpoint.error(f": {key} has {len(weight)} rows, the config {shape.num_rows}")
            self.lm_heads.append(_linear(weight, None, dtype, device))

    @property
    def num_bytes(self) -> int:
        """Of their weights."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[num_heads, num_rows, rows of a language head]`` of ``hidden``, ``[num_rows, hidden_size]``."""
        states = []
        for layers in self.blocks:
            state = hidden
            for layer in layers:  # type: ignore[attr-defined]  # a ModuleList in a ModuleList
                state = state + torch.nn.functional.silu(product(layer, state))
            states.append(state)
        if self.shape.shared:
            logits = product(self.lm_heads[0], torch.cat(states))
            return logits.view(len(states), len(hidden), -1)
        return torch.stack([product(head, state) for head, state in zip(self.lm_heads, states, strict=True)])

    def distributions(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each head the likeliest tokens.

        Args:
            hidden: ``[num_rows, hidden_size]``, behind the target's last norm.

        Returns:
            int32 token ids, and float32 log-probabilities among the tokens the heads know, both
            ``[num_heads, num_rows, support]``, likeliest first.
        """
        ids, log_q = likeliest(self(hidden).flatten(0, 1), self.token_map)
        shape = self.shape.num_heads, len(hidden), -1
        return ids.view(shape), log_q.view(shape)


def _linear(weight: torch.Tensor, bias: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(weight.to(device, dtype), requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.to(device, dtype), requires_grad=False)
    return layer


def _renamed(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights by vLLM's keys."""
    return {_new_key(key.removeprefix("medusa_heads.")): value for key, value in stored.items()}


def _new_key(key: str) -> str:
    """vLLM's name for a weight of the paper's own code: blocks by number, the language head behind them."""
    old = OLD_KEY.fullmatch(key)
    if old is None:
        return key
    head, layer, is_block, part = old.groups()
    return f"blocks.{head}.layers.{layer}.{part}" if is_block else f"lm_heads.{head}.{part}"
