# SPDX-License-Identifier: Apache-2.0
"""What transformers uses of torchvision to look at a picture, for tests alone.

vLLM's Qwen-VL models want transformers' processors of images and video, which want torchvision. It is no part of the
environment: PyPI has the CUDA build alone, which does not load beside a CPU torch. There are no videos here.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__version__ = "0.28.0+cpu"  # also in the folder beside it, where versions are looked for
__path__: list[str] = []  # a package, so that its modules can be imported


class InterpolationMode(enum.Enum):
    """See torchvision."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(image: Any) -> torch.Tensor:
    """``[channels, height, width]``, of 8 bits."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resize(image: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
    """By cubes, whatever is asked for."""
    made = torch.nn.functional.interpolate(
        image.reshape(-1, *image.shape[-3:]).float(), size, mode="bicubic", antialias=True
    )
    return made.round().clamp(0, 255).to(image.dtype).view(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Sequence[float], std: Sequence[float], **_: Any) -> torch.Tensor:
    """To a mean of 0, by channel."""
    means, stds = (torch.as_tensor(each).view(-1, 1, 1) for each in (mean, std))
    return (image - means) / stds


def pad(image: torch.Tensor, padding: Sequence[int], fill: float = 0, **_: Any) -> torch.Tensor:
    """By columns on the left, rows above, columns on the right, rows below."""
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom), value=fill)


def _put(name: str, *values: Any) -> None:
    """A module of that name, behind the one that it belongs to."""
    made = types.ModuleType(f"{__name__}.{name}")
    vars(made).update({value.__name__: value for value in values}, __path__=[])
    sys.modules[made.__name__] = made
    parent, _, last = made.__name__.rpartition(".")
    setattr(sys.modules[parent], last, made)


def decode_image(*_: Any) -> Any:
    """Nobody asks for it here."""
    raise NotImplementedError


class ImageReadMode:
    """See torchvision."""


def to_pil_image(*_: Any) -> Any:
    """Nobody asks for it here."""
    raise NotImplementedError


_put("io", decode_image, ImageReadMode)
_put("transforms", InterpolationMode)
_put("transforms.functional", InterpolationMode, pil_to_tensor, to_pil_image)
_put("transforms.v2")
_put("transforms.v2.functional", InterpolationMode, pil_to_tensor, resize, normalize, pad)
