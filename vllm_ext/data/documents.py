# SPDX-License-Identifier: Apache-2.0
"""The text of files and folders as a stream of documents, in pieces that fit into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# A document goes to the tokenizer in pieces of about this many characters, cut behind a line's end.
PIECE_CHARACTERS = 1 << 14
READ_CHARACTERS = 1 << 18
RECORDS = (".jsonl", ".parquet")


class InputError(ValueError):
    """An input that cannot be read with the given options; the message names file, value and way out."""


class RecordError(InputError):
    """A file cannot be read as records with the requested field. In a folder, such a file is left out."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document."""

    text: str
    ends_document: bool
    num_bytes: int  # of the input that have been read for it; an estimate, for the progress bar


@dataclass
class Sources:
    """Files to read, and what was left out on the way."""

    files: list[Path]
    num_bytes: int
    skipped: list[str]  # "FILE: reason" of what could not be read
    num_binary: int = 0  # files found in folders that hold no text


def find_files(inputs: Sequence[Path], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Sources:
    """Expand folders, links followed, each file once; hidden files and folders inside are left out.

    Args:
        inputs: files and folders.
        include: patterns; of the files in folders those that match one. None: all.
        exclude: patterns; of the files and folders in folders those that match none.

    Raises:
        InputError: an input does not exist, or the patterns leave no file.
    """
    sources = Sources([], 0, [])
    seen: set[tuple[int, int]] = set()  # of folders too: a link may lead back to one above it

    def visit(path: Path, inside: str) -> None:
        if inside and _matches(inside, exclude):
            return
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:
                return
            if path.is_dir():
                seen.add((status.st_dev, status.st_ino))
                for name in sorted(os.listdir(path)):
                    if not name.startswith("."):
                        visit(path / name, f"{inside}/{name}" if inside else name)
            elif path.is_file() and (not inside or not include or _matches(inside, include)):
                seen.add((status.st_dev, status.st_ino))
                sources.files.append(path)
                sources.num_bytes += status.st_size
        except OSError as error:
            sources.skipped.append(f"{path}: {error.strerror}")

    for path in inputs:
        if not path.exists():
            raise InputError(f"INPUT={str(path)!r} does not exist; name files or folders that do")
        visit(path, "")
    if (include or exclude) and not sources.files:
        raise InputError(
            f"--include={list(include)} and --exclude={list(exclude)} leave no file of {', '.join(map(str, inputs))}; "
            "a pattern such as '*.py' is compared with a file's name, and with its path in the folder"
        )
    return sources


def _matches(inside: str, patterns: Sequence[str]) -> bool:
    """Whether a path inside a folder, or its last name, is like one of the patterns."""
    name = inside.rpartition("/")[2]
    return any(fnmatchcase(inside, pattern) or fnmatchcase(name, pattern) for pattern in patterns)


def check_field(inputs: Sequence[Path], field: str) -> None:
    """Look at the first record of each of ``inputs`` that holds records, before hours of others are read.

    Raises:
        InputError: it has no such field, or pyarrow is missing.
    """
    for path in inputs:
        reader = READERS.get(path.suffix.lower())
        if reader is not None and path.is_file():
            next(reader(path, field), None)


def read_pieces(sources: Sources, inputs: Sequence[Path], field: str) -> Iterator[Piece]:
    """All documents of all files.

    A file that cannot be read, one of ``inputs`` that is no text, or one in a folder whose records have no such field
    is left out and named in ``sources.skipped``; one in a folder that is no text is counted in ``sources.num_binary``.

    Args:
        sources: from `find_files`; written to.
        inputs: what it was called with.
        field: of .jsonl records, and column of .parquet files: a string, or a list of strings, each a document.

    Raises:
        InputError: a record of one of ``inputs`` has no such field, or pyarrow is missing.
    """
    for path in sources.files:
        started = False
        try:
            for piece in READERS.get(path.suffix.lower(), _text)(path, field):
                started = True
                yield piece
        except UnicodeDecodeError as error:
            if started or path in inputs:
                what = "the rest of it" if started else "it"
                sources.skipped.append(
                    f"{path}: {what} is left out, as it is not UTF-8 text ({error.reason})"
                )
            else:
                sources.num_binary += 1
            yield Piece("", True, 0)
        except RecordError as error:
            if path in inputs:
                raise
            sources.skipped.append(f"{error} ({'the rest of the' if started else 'the'} file is left out)")
            yield Piece("", True, 0)
        except OSError as error:
            sources.skipped.append(f"{path}: {error.strerror or error}")
            yield Piece("", True, 0)


def _text(path: Path, field: str) -> Iterator[Piece]:
    with path.open("rb") as binary:
        if (zero := binary.read(8192).find(b"\0")) >= 0:
            raise UnicodeDecodeError("utf-8", b"\0", 0, 1, f"byte {zero} is zero")
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _cut(iter(lambda: file.read(READ_CHARACTERS), ""))


def json_lines(path: Path) -> Iterator[tuple[str, Any, int]]:
    """The records of a .jsonl file: where each stands, for messages, the record, and how many bytes it has.

    Raises:
        RecordError: a line is no JSON.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecordError(f"{where}: no JSON ({error}); correct or remove the line") from None
            yield where, record, len(line)


def json_fields(path: Path, field: str) -> Iterator[tuple[str, Any, int]]:
    """The same of one field of each record.

    Raises:
        RecordError: a line is no JSON, or has no such field.
    """
    for where, record, num_bytes in json_lines(path):
        if not isinstance(record, dict) or field not in record:
            fields = ", ".join(record) if isinstance(record, dict) else "none, it is no object"
            raise RecordError(f"{where}: there is no field {field!r}; its fields: {fields}. Use --field")
        yield where, record[field], num_bytes


def _json_documents(path: Path, field: str) -> Iterator[Piece]:
    for where, given, num_bytes in json_fields(path, field):
        yield from _documents(given, where, field, num_bytes)


def _parquet(path: Path, field: str) -> Iterator[Piece]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: reading it needs pyarrow: pip install 'vllm-ext[datastore]'") from None
    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's own are subclasses
        raise RecordError(f"{path}: no Parquet file ({error}); correct or remove it") from None
    with file:
        columns = file.schema_arrow.names
        if field not in columns:
            raise RecordError(
                f"{path}: there is no column {field!r}; its columns: {', '.join(columns)}. Use --field"
            )
        num_bytes = path.stat().st_size // max(file.metadata.num_rows, 1)
        row = 0
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            for value in batch.column(0).to_pylist():
                yield from _documents(value, f"{path}, row {row}", field, num_bytes)
                row += 1


def _documents(value: Any, where: str, field: str, num_bytes: int) -> Iterator[Piece]:
    texts = [] if value is None else value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise RecordError(
                f"{where}: field {field!r} holds {text!r:.80}; a string or a list of strings is needed. Use --field"
            )
        # JSON can hold half a surrogate pair, which is no text.
        yield from _cut(iter([text.encode("utf-8", "replace").decode()]), counted=False)
    yield Piece("", True, num_bytes)


def _cut(chunks: Iterator[str], counted: bool = True) -> Iterator[Piece]:
    """One document, behind the ends of lines where there are any. At a cut its tokens may not be the whole's."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        while len(rest) - start > PIECE_CHARACTERS:
            end = rest.rfind("\n", start, start + PIECE_CHARACTERS) + 1
            if end == 0:  # a line longer than a piece
                end = start + PIECE_CHARACTERS
            yield Piece(rest[start:end], False, (end - start) * counted)
            start = end
        rest = rest[start:]
    yield Piece(rest, True, len(rest) * counted)


READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {".jsonl": _json_documents, ".parquet": _parquet}
