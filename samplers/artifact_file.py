# SPDX-License-Identifier: Apache-2.0
"""What was made beforehand for rules caad and svdecode: arrays in one safetensors file that belongs to one model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

FORMAT = "vllm_ext guide 1"


class Header(BaseModel):
    """What is known of a file besides its arrays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str  # in the registry
    created: str  # UTC, ISO 8601
    model: str  # the name it was given by; for people
    fingerprint: str  # of its weights: vllm_ext.engine.models.exit_heads.fingerprint
    made_of: int  # positions that were looked at


def write(file: Path, arrays: Mapping[str, torch.Tensor], header: Header) -> None:
    """Replace the file in one step; what is there stays as it was until then."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    building = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(dict(arrays), building, metadata={"format": FORMAT, "header": header.model_dump_json()})
        os.replace(building, file)
    finally:
        building.unlink(missing_ok=True)


def read(field: str, file: str, rule: str) -> tuple[dict[str, torch.Tensor], Header]:
    """The arrays of a file.

    Args:
        field: the option that names it.
        file: its name.
        rule: whose it must be.

    Raises:
        ValueError: it is no such file, or not whole; the message says which, and the way out.
    """
    from safetensors import SafetensorError, safe_open

    way_out = f"make it again with `vllm-ext {rule} build`"
    if Path(file).exists() and not Path(file).is_file():  # a pipe would be waited for
        raise ValueError(f"{field}={file!r} is no file; {way_out}")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{field}={file!r} cannot be read ({error}); {way_out}") from None
    try:
        if metadata.get("format") != FORMAT:
            raise ValueError(f"it is not in the format {FORMAT!r}")
        header = Header.model_validate_json(metadata["header"])
    except (KeyError, ValueError, ValidationError) as error:
        raise ValueError(f"{field}={file!r} is no file of rule {rule} ({error}); {way_out}") from None
    if header.rule != rule:
        raise ValueError(f"{field}={file!r} is a file of rule {header.rule}, not of {rule}; {way_out}")
    return arrays, header
