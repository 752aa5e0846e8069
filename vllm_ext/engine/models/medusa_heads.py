# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads, in the layout that vLLM reads: residual blocks, and a language head for all or for each.

Keys of a checkpoint: ``blocks.{head}.layers.{layer}.weight`` (and ``bias``), ``lm_heads.{head}.weight``; with
``original_lm_head`` in the config the first of these serves all heads. ``token_map`` says which tokens the rows of a
shortened language head are (``truncated_vocab_size``). The older keys of the paper's own code are read too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_ext.data import model_files
from vllm_ext.kernels.top_k import MAX_K, top_k_ids

FIELD = "speculative_config.model"
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


def read_shape(name: str) -> tuple[Path, HeadShape]:
    """The folder of heads and their shape.

    Raises:
        ValueError: there is no such folder, or its config is not Medusa's.
    """
    try:
        folder = model_files.snapshot(name)
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{FIELD}={name!r} cannot be read: {error}. {WAY_OUT}") from None
    num_heads = config.get("num_heads", config.get("medusa_num_heads"))
    if num_heads is None or not isinstance(config.get("hidden_size"), int):
        raise ValueError(
            f"{FIELD}={name!r} is no checkpoint of Medusa heads: its config.json has no num_heads or no hidden_size. "
            f"{WAY_OUT}"
        )
    vocab_size = int(config.get("vocab_size", 32001))  # as in vLLM's MedusaConfig
    rows = int(config.get("truncated_vocab_size") or vocab_size)
    layers = int(config.get("num_hidden_layers", config.get("medusa_num_layers", 1)))
    shared = bool(config.get("original_lm_head", False))
    return folder, HeadShape(int(num_heads), layers, config["hidden_size"], vocab_size, rows, shared)


def check(vllm_config: Any, name: str) -> HeadShape:
    """Refuse at start-up heads that do not fit the target.

    Raises:
        ValueError: naming what does not, and the way out.
    """
    _, shape = read_shape(name)
    model = vllm_config.model_config
    for what, own, its in (
        ("hidden_size", shape.hidden_size, model.get_hidden_size()),
        ("vocab_size", shape.vocab_size, model.get_vocab_size()),
    ):
        if own != its:
            raise ValueError(f"{FIELD}={name!r}: its {what} is {own}, that of {model.model} {its}. {WAY_OUT}")
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
        folder, self.shape = read_shape(name)
        shape = self.shape
        stored = _tensors(folder, name)
        self.token_map: torch.Tensor | None = None
        if shape.num_rows < shape.vocab_size:
            self.token_map = _take(stored, "token_map", (shape.num_rows,), name).to(device).long()
        square = shape.hidden_size, shape.hidden_size
        self.blocks = torch.nn.ModuleList()
        for head in range(shape.num_heads):
            layers = torch.nn.ModuleList()
            for layer in range(shape.num_layers):
                key = f"blocks.{head}.layers.{layer}"
                weight = _take(stored, f"{key}.weight", square, name)
                layers.append(_linear(weight, stored.get(f"{key}.bias"), dtype, device))
            self.blocks.append(layers)
        self.lm_heads = torch.nn.ModuleList()
        for head in range(1 if shape.shared else shape.num_heads):
            key = f"lm_heads.{head}.weight" if f"lm_heads.{head}.weight" in stored else "lm_head.weight"
            weight = _take(stored, key, (None, shape.hidden_size), name)
            if self.token_map is not None and len(weight) > shape.num_rows:
                weight = weight[self.token_map.cpu()]
            if len(weight) != shape.num_rows:
                raise ValueError(
                    f"{FIELD}={name!r}: {key} has {len(weight)} rows, the config {shape.num_rows}. {WAY_OUT}"
                )
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
                state = state + torch.nn.functional.silu(_product(layer, state))
            states.append(state)
        if self.shape.shared:
            logits = _product(self.lm_heads[0], torch.cat(states))
            return logits.view(len(states), len(hidden), -1)
        return torch.stack([_product(head, state) for head, state in zip(self.lm_heads, states, strict=True)])

    def distributions(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each head the likeliest tokens.

        Args:
            hidden: ``[num_rows, hidden_size]``, behind the target's last norm.

        Returns:
            int32 token ids, and float32 log-probabilities among the tokens the heads know, both
            ``[num_heads, num_rows, support]``, likeliest first.
        """
        logits = self(hidden).flatten(0, 1)
        ids = top_k_ids(logits, min(MAX_K, logits.shape[1]))
        total = torch.logsumexp(logits.float(), 1, keepdim=True)
        log_q = logits.gather(1, ids.long()).float() - total
        if self.token_map is not None:
            ids = self.token_map[ids.long()].to(torch.int32)
        shape = self.shape.num_heads, len(hidden), -1
        return ids.view(shape), log_q.view(shape)


def _product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer's product, by the kernel for few rows where it was taken over (`cpu_linear.take_over`)."""
    ours = getattr(layer, "cpu_linear", None)
    result: torch.Tensor = layer(x) if ours is None else ours(x, layer.weight, layer.bias)
    return result


def _linear(weight: torch.Tensor, bias: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(weight.to(device, dtype), requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.to(device, dtype), requires_grad=False)
    return layer


def _take(stored: dict[str, torch.Tensor], key: str, shape: tuple[Any, ...], name: str) -> torch.Tensor:
    found = stored.get(key)
    if found is None:
        raise ValueError(f"{FIELD}={name!r}: its weights have no {key}. {WAY_OUT}")
    if found.dim() != len(shape) or any(
        w is not None and w != f for w, f in zip(shape, found.shape, strict=True)
    ):
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{FIELD}={name!r}: {key} is {list(found.shape)}, not {wanted}. {WAY_OUT}")
    return found


def _tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """All weights of a folder by vLLM's keys."""
    from safetensors.torch import load_file

    stored: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    if not stored:
        for file in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]):
            stored |= torch.load(file, map_location="cpu", weights_only=True)
    if not stored:
        raise ValueError(f"{FIELD}={name!r}: {folder} has no weights (*.safetensors, *.bin, *.pt). {WAY_OUT}")
    return {_new_key(key.removeprefix("medusa_heads.")): value for key, value in stored.items()}


def _new_key(key: str) -> str:
    """vLLM's name for a weight of the paper's own code: blocks by number, the language head behind them."""
    old = OLD_KEY.fullmatch(key)
    if old is None:
        return key
    head, layer, is_block, part = old.groups()
    return f"blocks.{head}.layers.{layer}.{part}" if is_block else f"lm_heads.{head}.{part}"
