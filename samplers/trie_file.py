# SPDX-License-Identifier: Apache-2.0
"""A trie on disk: one safetensors file, mapped by all who use it, that belongs to a tokenizer."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_ext.kernels.trie import Trie

FORMAT = "vllm-ext trie 1"
DTYPES = {"I32": np.dtype("<i4"), "BOOL": np.dtype(np.bool_)}
WAY_OUT = "make it anew with `vllm-ext trie build`"


class Header(BaseModel):
    """What is known of a file besides its arrays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    created: str  # UTC, ISO 8601
    tokenizer: str  # the name it was given by; for people
    tokenizer_hash: str  # vllm_ext.vocabulary.vocabulary_hash
    vocab_size: int  # one more than the largest token id
    num_sequences: int  # different ones
    longest: int  # tokens of the longest


def write(file: Path, trie: Trie, header: Header) -> None:
    """Replace the file in one step; what is there stays as it was until then."""
    from safetensors.numpy import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    building = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(trie._asdict(), building, metadata={"format": FORMAT, "header": header.model_dump_json()})
        with building.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(building, file)
    finally:
        building.unlink(missing_ok=True)


def open_trie(file: str | Path) -> tuple[Trie, Header]:
    """Map a file; all who do share its pages.

    Raises:
        ValueError: it is no such file, or not whole; the message says which, and the way out.
    """
    path = Path(file)
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(size)) if size <= path.stat().st_size else None
            mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); {WAY_OUT}, or correct the path") from None
    except ValueError:
        entries = None
    try:
        metadata = entries["__metadata__"]  # type: ignore[index]
        header = Header.model_validate_json(metadata["header"]) if metadata["format"] == FORMAT else None
    except (TypeError, KeyError, ValidationError):
        header = None
    if header is None:
        raise ValueError(f"is no file of a trie; {WAY_OUT}")
    try:
        trie = Trie(*(_array(mapped, 8 + size, entries[name]) for name in Trie._fields))  # type: ignore[index]
    except (KeyError, ValueError):
        raise ValueError(f"is not whole; {WAY_OUT}") from None
    return trie, header


def check(what: str, file: str, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
    """Refuse at start-up a file that cannot be used; reads all of it.

    Raises:
        ValueError: see `open_trie`; or it was made for another tokenizer, or is damaged.
    """
    try:
        trie, header = open_trie(file)
        if header.tokenizer_hash != tokenizer_hash():
            raise ValueError(
                f"was made with another tokenizer ({header.tokenizer}) than the model's; "
                "make one with `vllm-ext trie build --tokenizer MODEL`"
            )
        if header.vocab_size > vocab_size:
            raise ValueError(
                f"has ids up to {header.vocab_size - 1}, the model up to {vocab_size - 1}; {WAY_OUT}"
            )
        verify(trie, header)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def verify(trie: Trie, header: Header) -> None:
    """Look at each number of the arrays, which loops without bounds checks will believe.

    Raises:
        ValueError: one cannot be right.
    """
    edges = trie.first_edge
    right = (
        len(trie.tokens) + 2 == len(edges) == trie.num_states + 1
        and edges[0] == 0
        and edges[-1] == len(trie.tokens)
        and bool((edges[1:] >= edges[:-1]).all())
        and bool((trie.tokens >= 0).all())
        and bool((trie.tokens < header.vocab_size).all())
        # No way back, so that no walk goes on for ever: an edge leads to the state after its number.
        and bool((edges[:-1] >= np.arange(trie.num_states)).all())
        and bool((trie.final | (np.diff(edges) > 0)).all())
    )
    if not right:
        raise ValueError(f"is damaged; {WAY_OUT}")


def _array(mapped: mmap.mmap, start: int, entry: dict[str, Any]) -> Any:
    begin, end = entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    (count,) = entry["shape"]
    if end - begin != count * dtype.itemsize:
        raise ValueError("size")
    return np.frombuffer(mapped, dtype, count, start + begin)
