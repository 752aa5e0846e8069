# SPDX-License-Identifier: Apache-2.0
"""A datastore: tokenised documents on disk, sorted for search, mapped read-only by all who use it.

A folder with ``header.json`` and, for each segment, two files of little-endian numbers without any frame:

- ``<name>.tokens``: uint16, or int32 where the vocabulary needs it. A separator, then each document and a
  separator behind it. The separator is the vocabulary's size, which is no token's id.
- ``<name>.suffixes``: int32, the positions of the tokens file in the order `kernels/suffix_array.py` defines.

The header names the segments that count; any other file is what an interrupted build left, and no part of the store.
It is replaced in one step, after everything it names is on the disk. Files never change once it names them.

Verified when a server starts: the header with its own checksum, each file's size, and each file's BLAKE3 checksum
(about 5 GB/s on one core when the file is in memory; what is read here need not be read again). A worker that opens
the store after that looks at header and sizes alone.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ext.kernels.suffix_array import Tokens
from vllm_ext.proposers.tree import Int32

FORMAT = "vllm-ext datastore"
VERSION = 1
HEADER_FILE = "header.json"
MAX_SEGMENT_TOKENS = 2**31 - 1  # positions are int32
MAX_HEADER_BYTES = 1 << 26
POPULATED_BYTES = 1 << 32

_T = TypeVar("_T")


class DatastoreError(ValueError):
    """A store that cannot be used; the message names it, what is wrong, and the way out."""


class SegmentInfo(BaseModel):
    """What the header says of a segment."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(pattern=r"^[0-9]{6,}$")
    num_tokens: int = Field(ge=1, le=MAX_SEGMENT_TOKENS)  # separators included
    num_documents: int = Field(ge=0)
    tokens_blake3: str
    suffixes_blake3: str


class Header(BaseModel):
    """What ``header.json`` holds, without its own checksum."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal["vllm-ext datastore"] = "vllm-ext datastore"
    version: Literal[1] = 1
    created: str  # UTC, ISO 8601
    tokenizer: str  # the name it was given by; for people
    tokenizer_hash: str  # vllm_ext.data.model_files.vocabulary_hash
    vocab_size: int = Field(ge=1, lt=2**31 - 1)  # one more than the largest token id
    segments: list[SegmentInfo]

    @property
    def separator(self) -> int:
        """Stands before, between and behind documents."""
        return self.vocab_size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens files."""
        return token_dtype(self.vocab_size)

    @property
    def num_tokens(self) -> int:
        """Of all segments, with separators."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_documents(self) -> int:
        """Of all segments."""
        return sum(segment.num_documents for segment in self.segments)

    def files(self) -> list[tuple[str, int, str]]:
        """Name, size in bytes and checksum of each file."""
        return [
            entry
            for segment in self.segments
            for entry in (
                (f"{segment.name}.tokens", segment.num_tokens * self.dtype.itemsize, segment.tokens_blake3),
                (f"{segment.name}.suffixes", segment.num_tokens * 4, segment.suffixes_blake3),
            )
        ]

    def to_json(self) -> str:
        """The file's content."""
        content = self.model_dump()
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type of a tokens file: the separator, which is ``vocab_size``, must fit."""
    return np.dtype("<u2" if vocab_size <= np.iinfo(np.uint16).max else "<i4")


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment's files, mapped; see `kernels/suffix_array.py`."""

    tokens: Tokens  # [num_tokens]
    suffixes: Int32  # [num_tokens]


@dataclass(frozen=True, slots=True)
class Datastore:
    """An open store."""

    header: Header
    segments: tuple[Segment, ...]

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """Map a store's files, after a look at header and sizes.

        Raises:
            DatastoreError: it is no store, or one that cannot be used.
        """
        folder = Path(folder).expanduser()

        def map_all(header: Header) -> Datastore:
            _check_sizes(folder, header)
            segments = tuple(
                Segment(
                    map_array(folder / f"{segment.name}.tokens", header.dtype),
                    map_array(folder / f"{segment.name}.suffixes", np.dtype("<i4")),
                )
                for segment in header.segments
            )
            return cls(header, segments)

        return _by_header(folder, map_all)


def open_for(folder: str, vocab_size: int) -> Datastore:
    """Open the store of an option.

    Raises:
        DatastoreError: it cannot be used. Its checksums are not looked at, see `check`.
    """
    store = Datastore.open(folder)
    check_vocabulary(Path(folder), store.header, vocab_size)
    return store


def check(folder: str, vocab_size: int, tokenizer_hash: str) -> None:
    """Read the whole store of an option, which also brings it into memory.

    Raises:
        DatastoreError: the store is damaged, or another tokenizer's.
    """
    path = Path(folder).expanduser()
    header = read_header(path)
    check_tokenizer(path, header, tokenizer_hash)
    check_vocabulary(path, header, vocab_size)
    verify(path)


def read_header(folder: Path) -> Header:
    """Read and check a store's header.

    Raises:
        DatastoreError: there is none, or it cannot be used.
    """
    path = folder / HEADER_FILE
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MAX_HEADER_BYTES:  # a pipe would be waited for
            raise broken(folder, f"{HEADER_FILE} is no file of at most {MAX_HEADER_BYTES} bytes")
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise broken(folder, f"there is no store: {path} does not exist") from None
    except OSError as error:
        raise broken(folder, f"{path} cannot be read: {error.strerror}") from None
    except DatastoreError:
        raise
    except (ValueError, RecursionError):
        raise broken(folder, f"{HEADER_FILE} is damaged: it is no JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise broken(folder, f"{HEADER_FILE} is not that of a datastore")
    if content.get("version") != VERSION:
        raise broken(
            folder,
            f"its format has version {content.get('version')!r}, this vllm-ext reads version {VERSION}",
        )
    if content.pop("checksum", None) != _checksum(content):
        raise broken(folder, f"{HEADER_FILE} is damaged: its checksum does not fit")
    try:
        header = Header.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise broken(folder, f"{HEADER_FILE} is damaged: {field}: {problem['msg']}") from None
    if not header.segments:
        raise broken(folder, f"{HEADER_FILE} is damaged: segments: there are none")
    return header


def verify(folder: Path, checksums: bool = True) -> Header:
    """Compare every file's size, and its checksum and the range of its numbers if asked, with the header.

    Returns:
        That header.

    Raises:
        DatastoreError: naming the first file that is missing, truncated or damaged.
    """
    from blake3 import blake3

    def compare(header: Header) -> Header:
        _check_sizes(folder, header)
        for name, _, expected in header.files() if checksums else ():
            if blake3(max_threads=blake3.AUTO).update_mmap(folder / name).hexdigest() != expected:
                raise broken(folder, f"{name} is damaged: its checksum does not fit")
        for segment in header.segments if checksums else ():
            _check_numbers(folder, header, segment)
        return header

    return _by_header(folder, compare)


def check_vocabulary(folder: Path, header: Header, vocab_size: int) -> None:
    """Refuse a store with ids the model does not have.

    Raises:
        DatastoreError: its vocabulary is larger.
    """
    if header.vocab_size > vocab_size:
        raise broken(folder, f"it has token ids up to {header.vocab_size - 1}, the model only {vocab_size}")


def check_tokenizer(folder: Path, header: Header, tokenizer_hash: str) -> None:
    """Refuse a store whose ids stand for other tokens than the model's.

    Raises:
        DatastoreError: another tokenizer made it.
    """
    if header.tokenizer_hash != tokenizer_hash:
        raise broken(
            folder,
            f"it was built with another tokenizer ({header.tokenizer!r}, hash {header.tokenizer_hash[:12]}) "
            f"than this model's (hash {tokenizer_hash[:12]})",
        )


def broken(folder: Path, problem: str) -> DatastoreError:
    """The error for a store that cannot be used, with the way out."""
    return DatastoreError(
        f"datastore={str(folder)!r}: {problem}. Name another folder, or build the store: "
        f"vllm-ext datastore build --model MODEL --output {folder} INPUT..."
    )


def _by_header(folder: Path, action: Callable[[Header], _T]) -> _T:
    """What ``action`` makes of the header's files; a build or merge may replace them meanwhile."""
    header = read_header(folder)
    try:
        return action(header)
    except (DatastoreError, FileNotFoundError):
        if (newer := read_header(folder)) == header:
            raise
        return action(newer)


def _check_sizes(folder: Path, header: Header) -> None:
    for name, size, _ in header.files():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise broken(folder, f"{name} is missing") from None
        if found != size:
            state = "truncated" if found < size else "damaged"
            raise broken(folder, f"{name} is {state}: it has {found} bytes, not {size}")


def _check_numbers(folder: Path, header: Header, segment: SegmentInfo) -> None:
    """Refuse tokens that the vocabulary does not have, and positions behind the end: a checksum proves neither."""
    for name, dtype, most in (
        (f"{segment.name}.tokens", header.dtype, header.separator),
        (f"{segment.name}.suffixes", np.dtype("<i4"), segment.num_tokens - 1),
    ):
        numbers = map_array(folder / name, dtype)
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high > most:
            raise broken(folder, f"{name} has numbers from {low} to {high}; allowed: 0 to {most}")


def map_array(path: Path, dtype: np.dtype[Any]) -> Any:
    """A file of numbers as a read-only array; the pages are shared by all who map it."""
    # Read and mapped now, not page by page while the first requests wait; a file that may not fit is left to them.
    populate = mmap.MAP_POPULATE if path.stat().st_size <= POPULATED_BYTES else 0
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | populate, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, dtype)


def _checksum(content: dict[str, Any]) -> str:
    from blake3 import blake3

    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()
