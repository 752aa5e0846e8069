# SPDX-License-Identifier: Apache-2.0
"""A small file by which a worker's counters reach the processes that show them.

It lies in a folder that this user alone can write to, and is read and written by system calls, never mapped: a file
that somebody cuts short is an error to report, not a signal that ends the process. The worker holds a lock on its file
as long as it lives, whichever way it ends; files that nobody holds are removed when the next worker starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger("vllm.vllm_ext")

# Why a step of a request went on with less than the method could do: without drafts, or with a chain.
FALLBACK_REASONS = (
    "proposer_error",
    "structured_output_chain",
    "no_grammar",
    "model_chain",
    "hidden_states_missing",
)

DOCUMENTATION = {
    "spec_draft_tokens": "Draft tokens (tree nodes) verified by the target.",
    "spec_accepted_tokens": "Draft tokens accepted.",
    "spec_emitted_tokens": "Tokens emitted, accepted drafts and the target's own.",
    "spec_entropy_tokens": "Of the accepted, draft tokens taken because the draft model was sure, which is lossy.",
    "spec_typical_tokens": "Of the accepted, draft tokens kept by typical acceptance, which is lossy.",
    "spec_steps": "Steps of a request that emitted tokens; emitted / steps is tokens per step.",
    "spec_draft_passes": "Forward passes of a draft model, heads or an exit, each of a whole batch (V1 runner).",
    "state_loads": "Starts that took over what was learnt before.",
    "state_set_aside": "Starts that found saved state they could not use; the log has the file and the reason.",
    "state_saves": "Times what was learnt was saved.",
    "state_save_errors": "Times it could not be saved; the log has the cause.",
}
FALLBACK = "fallbacks"
COUNTERS = (*DOCUMENTATION, *(f"{FALLBACK}:{reason}" for reason in FALLBACK_REASONS))
_PLACES = {name: place for place, name in enumerate(COUNTERS)}

# What the goodput budget thinks, of the last step it decided.
GAUGES = {
    "spec_budget_nodes_per_request": "Draft nodes per request the goodput budget chose last.",
    "spec_budget_gain": "Tokens per second the budget expects, as a multiple of not speculating.",
    "spec_budget_step_seconds": "Step time the budget predicts for its choice.",
    "spec_budget_target_efficiency": "Predicted time of a step without drafts over that of the budget's choice.",
    "spec_budget_correction": "Accepted drafts as a multiple of those the drafter predicted, recently.",
}

# The file: what the worker counted, its gauges, and what was already exported; eight bytes each.
_COUNTED = struct.Struct(f"={len(COUNTERS)}q")
_FILE = struct.Struct(f"={len(COUNTERS)}q{len(GAUGES)}d{len(COUNTERS)}q")
_WORKER_BYTES = _FILE.size - _COUNTED.size
SUFFIX = ".counters"


def folder() -> Path:
    """Where this user's counter files are; the folder is made when it is missing.

    ``vllm-ext`` in ``XDG_RUNTIME_DIR``; where that is not set, or is no private folder, ``vllm-ext-UID`` in the
    temporary directory.

    Raises:
        OSError: it cannot be made, or others have access to it; the message says what to set.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _problem(runtime) is None:
        path = Path(runtime, "vllm-ext")
    else:
        path = Path(tempfile.gettempdir(), f"vllm-ext-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if (problem := _problem(path)) is not None:
        raise PermissionError(
            f"{path} {problem}; set XDG_RUNTIME_DIR or TMPDIR to a folder of this user's own (mode 0700)"
        )
    return path


def _problem(path: str | Path) -> str | None:
    """Why a folder cannot be trusted; None where it can."""
    try:
        status = os.lstat(path)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class WorkerCounts:
    """Totals of `COUNTERS` and the last of `GAUGES`, in a worker.

    Args:
        path: of the file, in `folder`; what stands there is replaced. None: they reach nobody.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path | None) -> None:
        self._cells = bytearray(_WORKER_BYTES)
        self._counted = memoryview(self._cells)[: _COUNTED.size].cast("q")
        self._gauges = memoryview(self._cells)[_COUNTED.size :].cast("d")
        self._path = path
        self._descriptor: int | None = None
        if path is not None:
            with _held(path.parent):
                _remove_abandoned(path.parent)
                path.unlink(missing_ok=True)  # of a worker of this engine that has ended: see above
                descriptor = _open(path, os.O_CREAT | os.O_EXCL)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                os.posix_fallocate(descriptor, 0, _FILE.size)
            except OSError:
                self.remove()
                os.close(descriptor)
                raise
            self._descriptor = descriptor

    def add(self, amounts: Mapping[str, int]) -> None:
        """Count. Keys are names of `COUNTERS`."""
        for name, amount in amounts.items():
            self._counted[_PLACES[name]] += amount
        self._write()

    def set_gauges(self, values: Mapping[str, float]) -> None:
        """Keys are names of `GAUGES`."""
        for place, name in enumerate(GAUGES):
            self._gauges[place] = values[name]
        self._write()

    def show_budget(self, state: Mapping[str, float]) -> None:
        """A budget's figures, as its ``state`` names them; 0 for what it does not say."""
        self.set_gauges({name: state.get(name.removeprefix("spec_budget_"), 0.0) for name in GAUGES})

    def totals(self) -> dict[str, int]:
        """All that was counted."""
        return dict(zip(COUNTERS, self._counted.tolist(), strict=True))

    def remove(self) -> None:
        """The worker ends: nobody can open the file any more. Whoever has it open can read on. May be called again."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _write(self) -> None:
        if self._descriptor is None:
            return
        try:
            os.pwrite(self._descriptor, self._cells, 0)
        except OSError as error:  # of a step, which goes on
            self._descriptor = None
            logger.warning("vllm-ext: counters reach nobody any more: %s", error)


class ServerCounts:
    """What a worker counts, in a process that shows it; of several each increment goes to one.

    Args:
        path: of the worker's file.

    Raises:
        OSError: it cannot be opened, as where the worker runs on another host. Methods: it was cut short.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path, 0)
        self._lock = threading.Lock()

    def close(self) -> None:
        """No method may be called after this."""
        os.close(self._descriptor)

    def totals(self) -> dict[str, int]:
        """All that was counted."""
        return dict(zip(COUNTERS, self._read()[0], strict=True))

    def gauges(self) -> dict[str, float]:
        """The values last set; zeros before."""
        return dict(zip(GAUGES, self._read()[1], strict=True))

    def take(self) -> dict[str, int]:
        """What was counted and not yet exported, now marked as exported."""
        counted, _, exported = self._read()
        if counted == exported:
            return {}
        with self._lock, _locked(self._descriptor):
            counted, _, exported = self._read()
            os.pwrite(self._descriptor, _COUNTED.pack(*map(max, counted, exported)), _WORKER_BYTES)
        return {
            name: total - before
            for name, total, before in zip(COUNTERS, counted, exported, strict=True)
            if total > before
        }

    def _read(self) -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
        data = os.pread(self._descriptor, _FILE.size, 0)
        if len(data) < _FILE.size:
            raise OSError(f"the counter file has {len(data)} bytes, not {_FILE.size}")
        values = _FILE.unpack(data)
        gauges = len(COUNTERS) + len(GAUGES)
        return values[: len(COUNTERS)], values[len(COUNTERS) : gauges], values[gauges:]


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Keep other processes out; a lock of another kind than the worker's, which it holds all the time."""
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def _held(parent: Path) -> Iterator[None]:
    """Keep workers out that start at the same time: a file just made is not yet locked."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Delete the files whose worker is gone."""
    for path in parent.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = _open(path, os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where the worker lives
                path.unlink()
            finally:
                os.close(descriptor)
