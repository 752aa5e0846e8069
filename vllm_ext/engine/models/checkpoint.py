# SPDX-License-Identifier: Apache-2.0
"""Folders of heads: what reading them has in common, and linear layers of what was read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from vllm_ext.data import model_files
from vllm_ext.kernels.likeliest import likeliest as best_of
from vllm_ext.kernels.top_k import MAX_K

FIELD = "speculative_config.model"


class Checkpoint:
    """A folder with ``config.json`` and weights.

    Args:
        name: folder or hub name.
        way_out: the last sentence of every error.

    Raises:
        ValueError: there is no such folder, or its ``config.json`` cannot be read.
    """

    def __init__(self, name: str, way_out: str) -> None:
        self.name, self._way_out = name, way_out
        try:
            self.folder = model_files.snapshot(name)
            self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise self.error(f" cannot be read: {error}") from None
        if not isinstance(self.config, dict):
            raise self.error(" cannot be read: its config.json holds no object")

    def error(self, problem: str) -> ValueError:
        """One that names the field, its value, the problem and the way out."""
        return ValueError(f"{FIELD}={self.name!r}{problem}. {self._way_out}")

    def expect(self, architecture: str, what: str) -> None:
        """Refuse a folder of anything else.

        Args:
            architecture: that its config must name.
            what: how errors call such a checkpoint.

        Raises:
            ValueError: it is none.
        """
        given = self.config.get("architectures")
        if not isinstance(given, list) or architecture not in given:
            raise self.error(
                f" is no checkpoint of {what}: architectures={given!r} in its config.json, not [{architecture!r}]"
            )

    def numbers(self, fields: Sequence[str]) -> list[int]:
        """These fields of its config.

        Raises:
            ValueError: one is missing, or is no integer of at least 1.
        """
        found = [self.config.get(field) for field in fields]
        for field, number in zip(fields, found, strict=True):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise self.error(f": its config.json has {field}={number!r}, not an integer of at least 1")
        return found  # type: ignore[return-value]  # none is None

    def check_sizes(self, vllm_config: Any, hidden_size: int, vocab_size: int) -> None:
        """Refuse sizes that are not the target's.

        Raises:
            ValueError: naming the size, and the target's.
        """
        model = vllm_config.model_config
        for what, own, its in (
            ("hidden_size", hidden_size, model.get_hidden_size()),
            ("vocab_size", vocab_size, model.get_vocab_size()),
        ):
            if own != its:
                raise self.error(f": its {what} is {own}, that of {model.model} {its}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights by their keys, on the CPU.

        Raises:
            ValueError: the folder has none.
        """
        from safetensors.torch import load_file

        stored: dict[str, torch.Tensor] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            stored |= load_file(file)
        if not stored:
            for file in sorted([*self.folder.glob("*.bin"), *self.folder.glob("*.pt")]):
                stored |= torch.load(file, map_location="cpu", weights_only=True)
        if not stored:
            raise self.error(f": {self.folder} has no weights (*.safetensors, *.bin, *.pt)")
        return stored

    def take(self, stored: dict[str, torch.Tensor], key: str, shape: Sequence[int | None]) -> torch.Tensor:
        """One of its weights.

        Args:
            stored: of `tensors`.
            key: its name.
            shape: that it must have; None: any size.

        Raises:
            ValueError: it is missing, or has another shape.
        """
        found = stored.get(key)
        if found is None:
            raise self.error(f": its weights have no {key}")
        if found.dim() != len(shape) or any(
            wanted is not None and wanted != size for wanted, size in zip(shape, found.shape, strict=True)
        ):
            wanted = " x ".join("any" if size is None else str(size) for size in shape)
            raise self.error(f": {key} is {list(found.shape)}, not {wanted}")
        return found


def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer's product, by the kernel for few rows where it was taken over (`cpu_linear.take_over`)."""
    ours = getattr(layer, "cpu_linear", None)
    result: torch.Tensor = layer(x) if ours is None else ours(x, layer.weight, layer.bias)
    return result


def likeliest(logits: torch.Tensor, token_map: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of a language head.

    Args:
        logits: ``[num_rows, rows of the head]``.
        token_map: int64, which tokens its rows are; None: all, in order.

    Returns:
        int32 token ids, and float32 log-probabilities among the tokens that the head knows, both
        ``[num_rows, support]``, likeliest first.
    """
    ids, log_q = best_of(logits, min(MAX_K, logits.shape[1]))
    if token_map is not None:
        ids = token_map[ids.long()].to(torch.int32)
    return ids, log_q
