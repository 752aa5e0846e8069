# SPDX-License-Identifier: Apache-2.0
"""Versions of a draft's weights in a folder: a trainer writes them, a server reads the newest.

A version is a safetensors file, complete or not there, for this user alone. Its metadata names the draft that it was
trained from (`vllm_ext.data.model_files.fingerprint`): those of another draft are left alone. Old ones are deleted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SUFFIX = ".safetensors"
DRAFT = "draft"  # the metadata's key
# Of an engine's folder.
ANSWERS, VERSIONS, LOG = "answers", "versions", "trainer.log"


def numbers(folder: Path) -> list[int]:
    """Of the versions in a folder, ascending."""
    return sorted(int(file.stem) for file in folder.glob(f"*{SUFFIX}") if file.stem.isdecimal())


def path(folder: Path, number: int) -> Path:
    """The file of a version."""
    return folder / f"{number:08d}{SUFFIX}"


def publish(folder: Path, weights: Mapping[str, torch.Tensor], draft: str, kept: int) -> int:
    """Write a version after the newest one, and delete all but the newest.

    Args:
        folder: of the versions, which is there.
        weights: by name.
        draft: fingerprint of the draft.
        kept: at most so many versions are left.

    Returns:
        Its number.

    Raises:
        OSError: it cannot be written; then nothing has changed but what is left of a part.
    """
    from safetensors.torch import save

    there = numbers(folder)
    number = there[-1] + 1 if there else 1
    part = path(folder, number).with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(save({name: tensor.contiguous() for name, tensor in weights.items()}, {DRAFT: draft}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path(folder, number))
    for old in [*there, number][:-kept]:
        path(folder, old).unlink(missing_ok=True)
    return number


def read(file: Path, draft: str) -> dict[str, torch.Tensor]:
    """A version's weights, by name.

    Args:
        file: of the version.
        draft: fingerprint of the draft that they must be of.

    Raises:
        ValueError: it cannot be read, or is of another draft.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as weights:
            found = (weights.metadata() or {}).get(DRAFT)
            if found != draft:
                raise ValueError(f"{file} is of another draft ({found}, and not {draft})")
            return {name: weights.get_tensor(name) for name in list(weights.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
