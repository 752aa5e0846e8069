# SPDX-License-Identifier: Apache-2.0
"""What a method has learnt, on disk: it survives restarts.

One safetensors file for each combination of model, tokenizer, method, its options and data-parallel rank, so that
servers may share a folder; of two with one combination the last to save wins. A save writes another file in the same
folder, brings it to the disk and renames it over the old one in one step: whenever it is killed, there is one
complete file, the old or the new.

The file's metadata holds the format's version, the combination in full and a BLAKE3 checksum over everything else. What
cannot be used is renamed, with a warning, and the server starts without it. No proposer trusts the arrays either, see
`kernels/learned_arrays.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext import __version__
from vllm_ext.data import model_files
from vllm_ext.kernels.learned_arrays import Learned
from vllm_ext.kernels.user_paths import expand

logger = logging.getLogger("vllm.vllm_ext")

FORMAT = "vllm-ext state"
VERSION = "1"
SHUTDOWN_SECONDS = 10.0  # most that a server waits for an engine that shuts down, and saves
ABANDONED_SECONDS = 3600  # a temporary file as old as this belongs to no save that still runs


class StateError(ValueError):
    """Saved state that cannot be used; the message says why."""


@dataclass(frozen=True)
class Identity:
    """Whose state it is. Another's would be safe to use, and worth nothing."""

    model: str  # a folder's absolute path, or a hub's name
    revision: str
    tokenizer: str  # vllm_ext.data.model_files.vocabulary_hash
    vocab_size: int
    method: str  # or rule
    options: str  # its own, as JSON
    data_parallel_rank: int

    @classmethod
    def of(cls, vllm_config: Any, method: str, options: Mapping[str, Any]) -> Identity:
        """Of one engine; reads the tokenizer's file."""
        model = vllm_config.model_config
        try:
            tokenizer = model_files.hash_of(model.tokenizer, model.tokenizer_revision)
        except ValueError:  # no fast form: its name has to do
            tokenizer = f"{model.tokenizer}@{model.tokenizer_revision or ''}"
        return cls(
            str(Path(model.model).resolve()) if Path(model.model).is_dir() else model.model,
            model.revision or "",
            tokenizer,
            model.get_vocab_size(),
            method,
            json.dumps(options, sort_keys=True),
            vllm_config.parallel_config.data_parallel_index,
        )

    @property
    def file_name(self) -> str:
        """Readable in front; the hash behind decides."""
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        model = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(self.model).name)[:60]
        return f"{self.method}-{model}-{key[:16]}.safetensors"


def prepare_folder(path: str, field: str = "state_dir", option: str = "--speculative-config") -> Path:
    """The folder's absolute path; it is made, for this user alone, when it is missing.

    Args:
        path: the option's value.
        field: its name.
        option: of the server, that it stands in.

    Raises:
        ValueError: it is none, or nothing can be written there; the message names the field and the way out.
    """
    try:
        folder = expand(path)
    except ValueError as error:
        raise ValueError(f"{field}={path!r}: {error}, or remove {field} from {option}") from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{field}={path!r}: nothing can be written there ({error.strerror}); name a folder that this user "
            f"may write to, or remove {field} from {option}: then nothing is kept"
        ) from None
    return folder


class StateFile:
    """The file of one combination.

    Args:
        folder: where it is.
        identity: whose it is.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.identity = identity
        self.path = folder / identity.file_name

    def load(self) -> dict[str, Learned] | None:
        """The arrays that were saved; None where there is no file.

        Raises:
            StateError: there is one, and it cannot be used.
        """
        from safetensors import safe_open

        self._remove_abandoned()
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
                raise StateError("it is no file")
            if status.st_size > (most := _memory_bytes() // 2):
                raise StateError(
                    f"it has {status.st_size} bytes, more than half of this machine's memory ({most})"
                )
            with safe_open(self.path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except StateError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise StateError(f"it cannot be read: {error}") from None
        if metadata.get("format") != FORMAT:
            raise StateError("it is no state of vllm-ext")
        if metadata.get("version") != VERSION:
            raise StateError(
                f"its format has version {metadata.get('version')}, this vllm-ext reads version {VERSION}"
            )
        if metadata.pop("checksum", None) != _checksum(metadata, arrays):
            raise StateError("it is damaged: its checksum does not fit")
        for field, mine in self._metadata().items():
            if field != "vllm_ext" and metadata.get(field) != mine:
                raise StateError(
                    f"it was saved with {field}={metadata.get(field)!r}, this server has {mine!r}"
                )
        return arrays

    def save(self, arrays: Mapping[str, Learned]) -> None:
        """Replace the file in one step.

        Args:
            arrays: C-contiguous, and written to by nobody meanwhile.

        Raises:
            OSError: nothing was saved; the old file is as it was.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        metadata = self._metadata()
        metadata["checksum"] = _checksum(metadata, arrays)
        descriptor, name = tempfile.mkstemp(".tmp", self._temporary_prefix, self.path.parent)
        os.close(descriptor)  # the library takes a name; it copies nothing, and writes without Python's lock
        try:
            try:
                save_file(dict(arrays), name, metadata)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            _sync(name, os.O_RDONLY)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sync(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)

    def set_aside(self, reason: str) -> None:
        """Rename the file, and say so.

        Raises:
            OSError: it cannot be renamed.
        """
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = self.path.with_name(f"{self.path.name}.set-aside-{stamp}-{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # another server of the same combination was faster
            self.path.rename(aside)
        logger.warning(
            "vllm-ext: the saved state %s cannot be used: %s. It is set aside as %s, and the server starts without it.",
            self.path,
            reason,
            aside.name,
        )

    @property
    def _temporary_prefix(self) -> str:
        return f".{self.path.name}."

    def _remove_abandoned(self) -> None:
        """Delete what killed saves have left."""
        for file in self.path.parent.glob(f"{self._temporary_prefix}*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > ABANDONED_SECONDS:
                    file.unlink()

    def _metadata(self) -> dict[str, str]:
        identity = {field: str(value) for field, value in asdict(self.identity).items()}
        return {"format": FORMAT, "version": VERSION, "vllm_ext": __version__, **identity}


class Keeper:
    """Saves what a proposer or a rule learns, from a thread of its own, and once more at the end.

    Args:
        file: where to.
        learned: gives the arrays; called with the lock held.
        lock: keeps others from learning meanwhile.
        interval_seconds: from one save to the next; nothing is saved when nothing was learnt.
        count: told of each save, by the name of a counter.
    """

    def __init__(
        self,
        file: StateFile,
        state_dict: Callable[[], dict[str, Learned]],
        lock: threading.Lock,
        interval_seconds: float,
        count: Callable[[str], None],
    ) -> None:
        self._file = file
        self._learned = state_dict
        self._lock = lock
        self._interval = interval_seconds
        self._count = count
        self._changed = False
        self._saving = threading.Lock()
        self._ended = threading.Event()
        self._causes: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="vllm-ext-state", daemon=True)
        self._thread.start()

    def mark_dirty(self) -> None:
        """Something was learnt; called with the lock held."""
        self._changed = True

    def save(self) -> bool:
        """Save now, if anything was learnt since the last time; whether it was saved. Raises nothing."""
        with self._saving:
            try:
                with self._lock:
                    if not self._changed:
                        return False
                    started = time.perf_counter()
                    arrays = self._learned()
                    self._changed = False
                copied = time.perf_counter()
                self._file.save(arrays)
            except Exception as error:
                self._changed = True
                self._count("state_save_errors")
                if (cause := repr(error)) not in self._causes:
                    self._causes.add(cause)
                    logger.warning(
                        "vllm-ext: what was learnt could not be saved to %s: %s. The last save stays; the next is "
                        "tried in %g s, and the same fault not logged again.",
                        self._file.path,
                        error,
                        self._interval,
                    )
                return False
            self._count("state_saves")
            logger.info(
                "vllm-ext: saved %.1f MB of what was learnt to %s: %.0f ms to copy, %.0f ms to write",
                sum(array.nbytes for array in arrays.values()) / 1e6,
                self._file.path,
                1e3 * (copied - started),
                1e3 * (time.perf_counter() - copied),
            )
            return True

    def close(self) -> None:
        """Save once more, behind a save that is under way, and end the thread."""
        self._ended.set()
        self.save()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self.save()


def _sync(path: str | Path, flags: int) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _checksum(metadata: Mapping[str, str], arrays: Mapping[str, Learned]) -> str:
    from blake3 import blake3

    digest = blake3(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
