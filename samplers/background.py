# SPDX-License-Identifier: Apache-2.0
"""Work beside the engine: in a thread while others' rows go on, and in a process that can be ended.

A rule asks for what it needs and may be told that it is not there yet; then its row waits (`Rule.waiting`), and nobody
else does. What may never end, or eat all memory, runs in a process first, which is killed at a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import IO, Any, Generic, TypeVar

from vllm_ext.samplers.kept import Kept

T = TypeVar("T")
MOST_PENDING = 64  # results that nobody has taken, of requests that are gone
_START = "from vllm_ext.samplers.background import serve; serve()"


class Making(Generic[T]):
    """Values that are made in a thread, one after the other, and kept."""

    def __init__(self, kept: Kept[T]) -> None:
        self.kept = kept
        self._pending: dict[bytes, Future[T]] = {}
        self._pool = ThreadPoolExecutor(1, "vllm-ext-beside")

    def get(self, key: bytes, make: Callable[[], T], patience: float | None) -> T | None:
        """The value of a key; None where it is not there in time.

        Args:
            key: see `vllm_ext.samplers.kept.digest`.
            make: makes it; what that raises is raised here, and not kept.
            patience: seconds to wait; None: make it here and now.
        """
        if patience is None or key in self.kept:
            return self.kept.of(key, make)
        if key not in self._pending:
            for done in [each for each, future in self._pending.items() if future.done()][:-MOST_PENDING]:
                del self._pending[done]
            self._pending[key] = self._pool.submit(make)
        future = self._pending[key]
        with contextlib.suppress(Exception):
            future.exception(patience)
        if not future.done():
            return None
        del self._pending[key]
        value = future.result()
        return self.kept.of(key, lambda: value)


class Process:
    """A Python of the server's that calls functions, one at a time; started when it is first asked.

    Args:
        first: what it calls first of all, and its arguments, made then; see `call`.
    """

    def __init__(self, first: Callable[[], tuple[str, Sequence[Any]]] | None = None) -> None:
        self._first = first
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, where: str, arguments: Sequence[Any], seconds: float | None) -> Any:
        """What a function returns.

        Args:
            where: ``package.module:function``.
            arguments: what JSON can say.
            seconds: after which the process is killed; its start does not count.

        Raises:
            TimeoutError: it took longer.
            RuntimeError: it raised; or the process ended, by itself or out of memory.
        """
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                child = self._child = self._start()
                if self._first is not None:
                    self._ask(child, *self._first(), None)
            return self._ask(child, where, arguments, seconds)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._ask(child, "builtins:len", [""], None)
        return child

    def _ask(
        self, child: subprocess.Popen[bytes], where: str, arguments: Sequence[Any], seconds: float | None
    ) -> Any:
        assert child.stdin is not None
        assert child.stdout is not None
        late = threading.Timer(seconds, child.kill) if seconds is not None else None
        if late is not None:
            late.start()
        try:
            child.stdin.write(json.dumps([where, list(arguments)]).encode() + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = b""
        finally:
            if late is not None:
                late.cancel()
        if not line:
            self._child = None
            code = child.wait()
            if late is not None and late.finished.is_set() and code == -9:
                raise TimeoutError(f"it took more than {seconds:g} s")
            raise RuntimeError(f"its process ended with status {code}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def serve() -> None:
    """What the process does: call what it is told, until nobody tells it any more."""
    answers: IO[bytes] = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints is no answer
    for line in sys.stdin.buffer:
        where, arguments = json.loads(line)
        module, _, name = where.partition(":")
        try:
            answer = {"result": getattr(import_module(module), name)(*arguments)}
            text = json.dumps(answer)
        except Exception as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})
        answers.write(text.encode() + b"\n")
        answers.flush()
