# SPDX-License-Identifier: Apache-2.0
"""Heads of early exits: an affine map each, from the normed hidden states of an exit to what the model's head wants.

A file belongs to one model: it carries a fingerprint of the weights it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from vllm_ext.data import model_files

FORMAT = "vllm_ext exit heads 1"
Head = Callable[[torch.Tensor], torch.Tensor]  # [num_rows, hidden] both


def save(file: Path, heads: Mapping[int, tuple[torch.Tensor, torch.Tensor]], model: Path) -> None:
    """Write the file.

    Args:
        file: its name.
        heads: by exit, float32 weight ``[hidden, hidden]`` and bias ``[hidden]``.
        model: the folder of the model they were made for.
    """
    from safetensors.torch import save_file

    tensors = {}
    for exit_layer, (weight, bias) in heads.items():
        tensors[f"{exit_layer}.weight"] = weight.detach().float().cpu().contiguous().clone()
        tensors[f"{exit_layer}.bias"] = bias.detach().float().cpu().contiguous().clone()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": FORMAT, "model": model_files.fingerprint(model)})


def exits_of(file: str, model: Path) -> list[int]:
    """The exits that a file has heads for.

    Raises:
        ValueError: it cannot be read, is no such file, or was made for another model; the message says what to do.
    """
    from safetensors import safe_open

    if Path(file).exists() and not Path(file).is_file():  # a pipe would be waited for
        raise ValueError(f"heads={file!r} is no file. {_way_out(model)}")
    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            names = list(stored.keys())
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"heads={file!r} cannot be read: {error}. {_way_out(model)}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"heads={file!r} is no file of exit heads. {_way_out(model)}")
    if metadata.get("model") != model_files.fingerprint(model):
        raise ValueError(f"heads={file!r} was made for another model than {model}. {_way_out(model)}")
    return sorted({int(name.split(".")[0]) for name in names})


def check(file: str, exits: Sequence[int], model: Path) -> None:
    """Refuse at start-up a file that cannot be used.

    Raises:
        ValueError: see `exits_of`; or an exit has no head in it.
    """
    there = exits_of(file, model)
    if missing := sorted(set(exits) - set(there)):
        raise ValueError(
            f"heads={file!r} has heads for exits after {there} layers, none after {missing}. Choose those it has, "
            f"or train more: `vllm-ext train exits --exits {','.join(map(str, exits))}`."
        )


def load(file: str, exits: Sequence[int], dtype: torch.dtype, device: torch.device) -> dict[int, Head]:
    """By exit, its map; of a file that was checked."""
    from safetensors import safe_open

    def head(weight: torch.Tensor, bias: torch.Tensor) -> Head:
        return lambda normed: torch.nn.functional.linear(normed, weight, bias)

    with safe_open(file, framework="pt") as stored:
        return {
            exit_layer: head(
                *(stored.get_tensor(f"{exit_layer}.{part}").to(device, dtype) for part in ("weight", "bias"))
            )
            for exit_layer in exits
        }


def _way_out(model: Path) -> str:
    return f"Make one: `vllm-ext train exits --model {model}`; or remove heads from --speculative-config."
