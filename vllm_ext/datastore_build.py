# SPDX-License-Identifier: Apache-2.0
"""Making a datastore: tokenise, sort, and put the new store in the old one's place in one step.

New files have new names, and count for nothing until the header that names them has replaced the old one. So a build
that ends early, by an error or a power cut, leaves the old store as it was; the next build removes what it left.
Servers that have mapped replaced files keep them until they end.
"""

from __future__ import annotations

import ctypes
import datetime
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vllm_ext import vocabulary
from vllm_ext.datastore_input import PIECE_CHARACTERS, InputError, Piece, Sources, find_files, read_pieces
from vllm_ext.proposers import datastore
from vllm_ext.proposers.datastore import DatastoreError, Header, SegmentInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What is being done, and how much of it is done and is to do.
Progress = Callable[[str, int, int], None]

# Tokenised at once: some pieces for each core. An encoding takes about 100 bytes a token.
BATCH_CHARACTERS = 8 * PIECE_CHARACTERS * len(os.sched_getaffinity(0))
# A build makes up to 3 segments and sorts one at a time: that bounds its memory, and 3 look-ups cost little.
NUM_PARTS = 3
PART_TOKENS = 1 << 22  # too few to cut
MAX_PART_TOKENS = 1 << 29  # libdivsufsort's positions are bytes, in an int32, and a token has up to 4
CHUNK = 1 << 20  # numbers copied at once

_OURS = re.compile(r"\d{6,}\.(tokens|suffixes)|building\..*|lock|header\.json")


def build(
    inputs: Sequence[Path],
    folder: Path,
    tokenizer_name: str | None,
    field: str,
    append: bool,
    progress: Progress,
) -> tuple[Header, Sources]:
    """Make a store of the texts, or add them to one.

    Args:
        inputs: files and folders, see `datastore_input`.
        folder: of the store; made if it is missing.
        tokenizer_name: the model's folder or Hugging Face id; None, when appending: the one the store names.
        field: of .jsonl records and .parquet files.
        append: keep what the store holds.
        progress: called as the work goes on.

    Raises:
        InputError: an input cannot be read as asked for, or there is no text.
        DatastoreError: ``folder`` holds something else, is being written to, or was made by another tokenizer.
        ValueError: no tokenizer is named, or it cannot be loaded.
    """
    sort = _suffix_sorter()
    before = datastore.read_header(folder) if append else None
    if tokenizer_name is None and before is not None:
        tokenizer_name = before.tokenizer
    if tokenizer_name is None:
        raise ValueError("--tokenizer is missing; name the model that the store is for")
    sources = find_files(inputs)
    tokenizer = vocabulary.load_tokenizer(tokenizer_name)
    tokenizer_hash = vocabulary.vocabulary_hash(tokenizer)
    with _writing(folder):
        if append:
            before = datastore.read_header(folder)  # once more: now nobody else writes
            datastore.check_tokenizer(folder, before, tokenizer_hash)
        header = Header(
            created=_now(),
            tokenizer=before.tokenizer if before else tokenizer_name,
            tokenizer_hash=tokenizer_hash,
            vocab_size=vocabulary.vocab_size(tokenizer),
            segments=list(before.segments) if before else [],
        )
        raw = folder / "building.tokens"
        with raw.open("wb") as file:
            pieces = read_pieces(sources, inputs, field)
            _tokenise(
                pieces, tokenizer, header, file, lambda done: progress("tokenising", done, sources.num_bytes)
            )
        del tokenizer, pieces
        _release_memory()
        segments = []
        for start, end in _parts(raw, header):
            progress("sorting", start, _num_tokens(raw, header))
            segments.append(_sort_part(folder, header, raw, start, end, sort))
        if not segments:
            named = ", ".join(map(str, inputs))
            raise InputError(f"INPUT={named}: there is no text in it; nothing was built")
        header = header.model_copy(update={"segments": [*header.segments, *segments]})
        _commit(folder, header)
    return header, sources


def merge(folder: Path, progress: Progress) -> Header:
    """Make one segment of all, or as few as positions of 32 bits allow: look-ups search each of them.

    Raises:
        DatastoreError: there is no such store, it is damaged, or being written to.
    """
    datastore.read_header(folder)  # before anything is written there
    with _writing(folder):
        header = datastore.verify(folder)  # new checksums must not cover old damage
        groups: list[list[SegmentInfo]] = [[]]
        for segment in header.segments:
            if sum(one.num_tokens for one in groups[-1]) + segment.num_tokens > datastore.MAX_SEGMENT_TOKENS:
                groups.append([])
            groups[-1].append(segment)
        segments = [
            group[0] if len(group) == 1 else _merge_group(folder, header, group, progress) for group in groups
        ]
        header = header.model_copy(update={"created": _now(), "segments": segments})
        _commit(folder, header)
    return header


def _tokenise(
    pieces: Iterator[Piece], tokenizer: Tokenizer, header: Header, file: BinaryIO, tick: Callable[[int], None]
) -> None:
    """Write documents' tokens, each document's followed by a separator."""
    # Some models' files ask for both, for the encoders they also serve.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    separator = np.array([header.separator], header.dtype).tobytes()
    num_bytes, in_document = 0, False
    batch: list[Piece] = []

    def write() -> None:
        nonlocal in_document
        encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            if ids:
                file.write(np.array(ids, header.dtype).tobytes())
                in_document = True
            if piece.ends_document and in_document:
                file.write(separator)
                in_document = False
        batch.clear()
        tick(num_bytes)

    size = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.num_bytes
        size += len(piece.text) + 1
        if size >= BATCH_CHARACTERS:
            write()
            size = 0
    write()


def _release_memory() -> None:
    """Give back what tokenising has freed, which glibc keeps for itself otherwise: some 40 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _num_tokens(raw: Path, header: Header) -> int:
    return raw.stat().st_size // header.dtype.itemsize


def _read(raw: Path, header: Header, start: int, end: int) -> Any:
    return np.fromfile(raw, header.dtype, end - start, offset=start * header.dtype.itemsize)


def _parts(raw: Path, header: Header) -> Iterator[tuple[int, int]]:
    """Cut the tokens into segments, behind documents' ends where there are any."""
    num_tokens = _num_tokens(raw, header)
    num_parts = max(-(-num_tokens // MAX_PART_TOKENS), min(NUM_PARTS, -(-num_tokens // PART_TOKENS)))
    start = 0
    for part in range(1, num_parts + 1):
        end = num_tokens * part // num_parts
        if part < num_parts:
            for high in range(end, start, -CHUNK):
                low = max(high - CHUNK, start)
                separators = np.flatnonzero(_read(raw, header, low, high) == header.separator)
                if len(separators):
                    end = low + int(separators[-1]) + 1
                    break
        if start < end:
            yield start, end
            start = end


def _sort_part(
    folder: Path, header: Header, raw: Path, start: int, end: int, sort: Callable[[Any], Any]
) -> SegmentInfo:
    """Write one segment's files."""
    separator = np.array([header.separator], header.dtype)
    tokens = np.concatenate([separator, _read(raw, header, start, end)])
    if tokens[-1] != header.separator:  # a document longer than a part
        tokens = np.concatenate([tokens, separator])
    num_tokens = len(tokens)
    num_documents = int(np.count_nonzero(tokens == header.separator)) - 1
    name = _next_name(folder)
    with _Output(folder / f"{name}.tokens") as tokens_file:
        tokens_file.write(tokens)
    # The library sorts bytes: of the reversed text's tokens, highest byte first. Of the result only positions at
    # a token's start are meant.
    text, width = _reversed_bytes(tokens, header.separator)
    del tokens
    order = sort(text)
    del text
    with _Output(folder / f"{name}.suffixes") as suffixes_file:
        for at in range(0, len(order), CHUNK):
            positions = order[at : at + CHUNK]
            positions = positions[positions % width == 0] // width
            suffixes_file.write((num_tokens - 1 - positions).astype("<i4"))
    return SegmentInfo(
        name=name,
        num_tokens=num_tokens,
        num_documents=num_documents,
        tokens_blake3=tokens_file.checksum,
        suffixes_blake3=suffixes_file.checksum,
    )


def _reversed_bytes(tokens: Any, separator: int) -> tuple[Any, int]:
    """The tokens from the last to the first as bytes of the same order, and how many bytes a token has.

    As few as can tell the tokens that occur: sorting takes 5 bytes of memory for each.
    """
    occurs = np.zeros(separator + 1, np.bool_)
    for at in range(0, len(tokens), CHUNK):  # numpy makes an index of 8 bytes of each
        occurs[tokens[at : at + CHUNK]] = True
    rank = np.cumsum(occurs, dtype=np.uint32) - np.uint32(1)
    width = (int(rank[-1]).bit_length() + 7) // 8 or 1
    digits = rank.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    text = np.empty((len(tokens), width), np.uint8)
    for at in range(0, len(tokens), CHUNK):
        part = tokens[at : at + CHUNK]
        text[len(tokens) - at - len(part) : len(tokens) - at] = digits[part[::-1]]
    return text.reshape(-1), width


def _merge_group(folder: Path, header: Header, group: list[SegmentInfo], progress: Progress) -> SegmentInfo:
    """Write the segment that holds what the group's hold."""
    from vllm_ext.kernels.suffix_array import merge_sorted

    name = _next_name(folder)
    with _Output(folder / f"{name}.tokens") as tokens_file:
        for segment in group:
            for chunk in _chunks(folder / f"{segment.name}.tokens", header.dtype):
                tokens_file.write(chunk)
    tokens = datastore.map_array(folder / f"{name}.tokens", header.dtype)
    offsets = np.cumsum([0] + [segment.num_tokens for segment in group])
    # File, what to add to its positions, and how many they are.
    runs = [
        (folder / f"{segment.name}.suffixes", int(offset), segment.num_tokens)
        for segment, offset in zip(group, offsets, strict=False)
    ]
    done, number = 0, 0
    total = len(tokens) * (len(runs) - 1)  # at most: the shortest are merged first
    while len(runs) > 1:
        runs.sort(key=lambda run: run[2])
        (left, left_offset, left_count), (right, right_offset, right_count), *runs = runs
        number += 1
        target = folder / (f"building.{number}" if runs else f"{name}.suffixes")
        with _Output(target) as output:
            rests = _chunks(left, np.dtype("<i4")), _chunks(right, np.dtype("<i4"))
            none = np.zeros(0, np.int32)
            a, b = none, none
            while True:
                if not len(a):
                    a = next(rests[0], none) + np.int32(left_offset)
                if not len(b):
                    b = next(rests[1], none) + np.int32(right_offset)
                if not len(a) or not len(b):
                    break
                out = np.empty(len(a) + len(b), np.int32)
                taken_a, taken_b = merge_sorted(tokens, header.separator, a, b, out)
                output.write(out[: taken_a + taken_b].astype("<i4", copy=False))
                a, b = a[taken_a:], b[taken_b:]
                done += taken_a + taken_b
                progress("merging", done, total)
            for rest, chunks, offset in ((a, rests[0], left_offset), (b, rests[1], right_offset)):
                output.write(rest)
                for chunk in chunks:
                    output.write(chunk + np.int32(offset))
        runs.append((target, 0, left_count + right_count))
    return SegmentInfo(
        name=name,
        num_tokens=len(tokens),
        num_documents=sum(segment.num_documents for segment in group),
        tokens_blake3=tokens_file.checksum,
        suffixes_blake3=output.checksum,
    )


class _Output:
    """A file that is on the disk when it is closed, and its checksum."""

    def __init__(self, path: Path) -> None:
        from blake3 import blake3

        self._file = path.open("wb")
        self._digest = blake3()
        self.checksum = ""

    def write(self, values: Any) -> None:
        content = values.tobytes()
        self._file.write(content)
        self._digest.update(content)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.checksum = self._digest.hexdigest()


def _chunks(path: Path, dtype: np.dtype[Any]) -> Iterator[Any]:
    with path.open("rb") as file:
        while len(chunk := np.fromfile(file, dtype, CHUNK)):
            yield chunk


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Keep other builds out, and leave nothing behind that the header does not name."""
    if folder.exists() and not folder.is_dir():
        raise DatastoreError(f"output={str(folder)!r} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if foreign := sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name)):
        raise DatastoreError(
            f"output={str(folder)!r} holds other files ({foreign[0]!r}); name a new folder, or a datastore's"
        )
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatastoreError(
                f"output={str(folder)!r} is being written to by another process; wait until it has ended"
            ) from None
        try:
            yield
        finally:
            _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    kept = {"lock", datastore.HEADER_FILE}
    if (folder / datastore.HEADER_FILE).exists():
        try:
            kept |= {name for name, _, _ in datastore.read_header(folder).files()}
        except DatastoreError:
            return  # who knows what a damaged header named
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()


def _next_name(folder: Path) -> str:
    numbers = [int(path.stem) for path in folder.iterdir() if path.stem.isdecimal()]
    return f"{max(numbers, default=0) + 1:06d}"


def _commit(folder: Path, header: Header) -> None:
    """Replace the header, once all that it names is on the disk."""
    new = folder / "building.header"
    with new.open("w") as file:
        file.write(header.to_json())
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
        os.replace(new, folder / datastore.HEADER_FILE)
        os.fsync(directory)
    finally:
        os.close(directory)


def _suffix_sorter() -> Callable[[Any], Any]:
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise ValueError(
            "building a datastore needs pydivsufsort: pip install 'vllm-ext[datastore]'"
        ) from None
    sort: Callable[[Any], Any] = divsufsort
    return sort


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
