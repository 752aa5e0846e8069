# SPDX-License-Identifier: Apache-2.0
"""Making a datastore, or adding to one: tokenise into one file, cut that into segments, sort each."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vllm_ext.data import atomic_files as files
from vllm_ext.data import model_files
from vllm_ext.data.atomic_files import CHUNK, Output, Progress
from vllm_ext.data.documents import (
    PIECE_CHARACTERS,
    InputError,
    Piece,
    Sources,
    check_field,
    find_files,
    read_pieces,
)
from vllm_ext.proposers import datastore
from vllm_ext.proposers.datastore import Header, SegmentInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Tokenised at once: some pieces for each core. An encoding takes about 100 bytes a token.
BATCH_CHARACTERS = 8 * PIECE_CHARACTERS * len(os.sched_getaffinity(0))
# A build makes up to 3 segments and sorts one at a time: that bounds its memory, and 3 look-ups cost little.
NUM_PARTS = 3
PART_TOKENS = 1 << 22  # too few to cut
MAX_PART_TOKENS = 1 << 29  # libdivsufsort's positions are bytes, in an int32, and a token has up to 4


def build(
    inputs: Sequence[Path],
    folder: Path,
    tokenizer_name: str | None,
    field: str,
    append: bool,
    progress: Progress,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> tuple[Header, Sources]:
    """Make a store of the texts, or add them to one.

    Args:
        inputs: files and folders, see `documents`.
        folder: of the store; made if it is missing.
        tokenizer_name: the model's folder or Hugging Face id; None, when appending: the one the store names.
        field: of .jsonl records and .parquet files.
        append: keep what the store holds.
        progress: called as the work goes on.
        include: see `documents.find_files`.
        exclude: likewise.

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
        raise ValueError("--model is missing; name the model that the store is for")
    sources = find_files(inputs, include, exclude)
    check_field(inputs, field)
    tokenizer = model_files.load_tokenizer(tokenizer_name)
    tokenizer_hash = model_files.vocabulary_hash(tokenizer)
    with files.writing(folder):
        if append:
            before = datastore.read_header(folder)  # once more: now nobody else writes
            datastore.check_tokenizer(folder, before, tokenizer_hash)
        header = Header(
            created=files.now(),
            tokenizer=before.tokenizer if before else tokenizer_name,
            tokenizer_hash=tokenizer_hash,
            vocab_size=model_files.vocab_size(tokenizer),
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
            left_out = f"; left out: {sources.skipped[0]}" if sources.skipped else ""
            raise InputError(f"INPUT={named}: there is no text in it; nothing was built{left_out}")
        header = header.model_copy(update={"segments": [*header.segments, *segments]})
        files.commit(folder, header)
    return header, sources


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
    name = files.next_name(folder)
    with Output(folder / f"{name}.tokens") as tokens_file:
        tokens_file.write(tokens)
    # The library sorts bytes: of the reversed text's tokens, highest byte first. Of the result only positions at
    # a token's start are meant.
    text, width = _reversed_bytes(tokens, header.separator)
    del tokens
    order = sort(text)
    del text
    with Output(folder / f"{name}.suffixes") as suffixes_file:
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


def _suffix_sorter() -> Callable[[Any], Any]:
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise ValueError(
            "building a datastore needs pydivsufsort: pip install 'vllm-ext[datastore]'"
        ) from None
    sort: Callable[[Any], Any] = divsufsort
    return sort
