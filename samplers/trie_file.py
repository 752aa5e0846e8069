# SPDX-License-Identifier: Apache-2.0
"""A trie on disk: one safetensors file, mapped by all who use it, that belongs to a tokenizer.

Its metadata holds a BLAKE3 checksum over all else that counts, looked at when a server starts. Files of the first
format have none, and load as they did; what compiled loops would stumble over is looked for in both.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_ext.kernels.trie import Trie

FORMAT, OLD_FORMAT = "vllm-ext trie 2", "vllm-ext trie 1"
DTYPES = {"I32": np.dtype("<i4"), "BOOL": np.dtype(np.bool_)}
MAX_HEADER_BYTES = 1 << 20
WAY_OUT = "make it again with `vllm-ext trie build`"


class Header(BaseModel):
    """What is known of a file besides its arrays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    created: str  # UTC, ISO 8601
    tokenizer: str  # the name it was given by; for people
    tokenizer_hash: str  # vllm_ext.data.model_files.vocabulary_hash
    vocab_size: int  # one more than the largest token id
    num_sequences: int  # different ones
    longest: int  # tokens of the longest


def write(file: Path, trie: Trie, header: Header) -> None:
    """Replace the file in one step; what is there stays as it was until then."""
    from safetensors.numpy import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    building = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        text = header.model_dump_json()
        metadata = {"format": FORMAT, "header": text, "checksum": _checksum(text, trie)}
        save_file(trie._asdict(), building, metadata=metadata)
        with building.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(building, file)
    finally:
        building.unlink(missing_ok=True)


class _File(NamedTuple):
    trie: Trie
    header: Header
    text: str  # the header's
    checksum: str | None  # of an old file none


def open_trie(file: str | Path) -> tuple[Trie, Header]:
    """Map a file; all who do share its pages. What is in its arrays is not looked at, see `verify`.

    Raises:
        ValueError: it is no such file, or not whole; the message says which, and the way out.
    """
    opened = _open(file)
    return opened.trie, opened.header


def _open(file: str | Path) -> _File:
    path = Path(file)
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError(
                f"is no file of a trie, but something else than a file; {WAY_OUT}, or correct the path"
            )
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            whole = 0 < size <= min(path.stat().st_size, MAX_HEADER_BYTES)
            head = stream.read(size) if whole else b""
            mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) if whole else None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}); {WAY_OUT}, or correct the path") from None
    try:
        entries = json.loads(head)
        metadata = entries["__metadata__"]
        text, checksum = metadata["header"], metadata.get("checksum")
        header = Header.model_validate_json(text)
        if (metadata["format"], isinstance(checksum, str)) not in ((FORMAT, True), (OLD_FORMAT, False)):
            raise ValueError("format")
    # Whatever it holds instead of objects and texts, however deep.
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ValidationError):
        raise ValueError(f"is no file of a trie; {WAY_OUT}") from None
    try:
        trie = Trie(*(_array(mapped, 8 + size, entries[name]) for name in Trie._fields))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
        raise ValueError(f"is not whole; {WAY_OUT}") from None
    return _File(trie, header, text, checksum)


def check(what: str, file: str, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
    """Refuse at start-up a file that cannot be used; reads all of it.

    Raises:
        ValueError: see `open_trie`; or it was made for another tokenizer, or is damaged.
    """
    try:
        opened = _open(file)
        header = opened.header
        if header.tokenizer_hash != tokenizer_hash():
            raise ValueError(
                f"was made with another tokenizer ({header.tokenizer}) than the model's; "
                "make one with `vllm-ext trie build --model MODEL`"
            )
        if header.vocab_size > vocab_size:
            raise ValueError(
                f"has ids up to {header.vocab_size - 1}, the model up to {vocab_size - 1}; {WAY_OUT}"
            )
        _verify(opened)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def verify(file: str | Path) -> tuple[Trie, Header]:
    """Map a file, and look at all of it.

    Raises:
        ValueError: see `open_trie`; or it is damaged.
    """
    opened = _open(file)
    _verify(opened)
    return opened.trie, opened.header


def _verify(opened: _File) -> None:
    """Compare the checksum, and look at each number of the arrays, which loops without bounds checks will believe.

    Raises:
        ValueError: one cannot be right.
    """
    trie, header = opened.trie, opened.header
    if opened.checksum is not None and opened.checksum != _checksum(opened.text, trie):
        raise ValueError(f"is damaged: its checksum does not fit; {WAY_OUT}")
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


def _array(mapped: Any, start: int, entry: dict[str, Any]) -> Any:
    begin, end = entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    (count,) = entry["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, count)):
        raise ValueError("no size")
    if end - begin != count * dtype.itemsize or start + end > len(mapped):
        raise ValueError("size")
    return np.frombuffer(mapped, dtype, count, start + begin)


def _checksum(header: str, trie: Trie) -> str:
    """Over the header's text and the arrays."""
    from blake3 import blake3

    digest = blake3(header.encode(), max_threads=blake3.AUTO)
    for name, array in trie._asdict().items():
        digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
