# SPDX-License-Identifier: Apache-2.0
"""A datastore's folder while it is written to: one writer, files that are on the disk, a header replaced in one step.

New files have new names, and count for nothing until the header that names them has replaced the old one. So a build
that ends early, by an error or a power cut, leaves the old store as it was; the next one removes what it left.
Servers that have mapped replaced files keep them until they end.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.proposers import datastore
from vllm_ext.proposers.datastore import DatastoreError, Header

# What is being done, and how much of it is done and is to do.
Progress = Callable[[str, int, int], None]

CHUNK = 1 << 20  # numbers copied at once

_OURS = re.compile(r"\d{6,}\.(tokens|suffixes)|building\..*|lock|header\.json")


class Output:
    """A file that is on the disk when it is closed, and its checksum."""

    def __init__(self, path: Path) -> None:
        from blake3 import blake3

        self._file = path.open("wb")
        self._digest = blake3()
        self.checksum = ""

    def write(self, values: Any) -> None:
        """Append an array."""
        content = values.tobytes()
        self._file.write(content)
        self._digest.update(content)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.checksum = self._digest.hexdigest()


def read_chunks(path: Path, dtype: np.dtype[Any]) -> Iterator[Any]:
    """A file's numbers, some at a time."""
    with path.open("rb") as file:
        while len(chunk := np.fromfile(file, dtype, CHUNK)):
            yield chunk


@contextmanager
def writing(folder: Path) -> Iterator[None]:
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
        if path.name not in kept and _OURS.fullmatch(path.name):
            path.unlink()


def next_name(folder: Path) -> str:
    """Of a segment that is to be written."""
    numbers = [int(path.stem) for path in folder.iterdir() if path.stem.isdecimal()]
    return f"{max(numbers, default=0) + 1:06d}"


def commit(folder: Path, header: Header) -> None:
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


def now() -> str:
    """For a header."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
