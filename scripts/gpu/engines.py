# SPDX-License-Identifier: Apache-2.0
"""The suite's results file, and engines in processes of their own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ANSWERING_S = 150.0


class Results:
    """The file, and how much time is left."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._file = path.open("a", buffering=1)
        self._started = time.monotonic()
        self._seconds = seconds
        self.num_failed = 0

    def add(self, stage: str, **values: Any) -> None:
        """One result, on disk when this returns."""
        self.num_failed += stage == "failed"
        line = json.dumps({"stage": stage, "at_s": round(time.monotonic() - self._started, 1), **values})
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        print(line[:300], flush=True)

    @property
    def left_s(self) -> float:
        """Seconds of the run that are left."""
        return self._seconds - (time.monotonic() - self._started)


class Failed(RuntimeError):
    """An engine did not start, or did not answer; with its own words."""


class Engine:
    """One engine, in another process.

    Args:
        name: for the results and the log.
        options: of vLLM's ``LLM``.
        folder: where its log goes.
        environment: variables beside this process's.
    """

    def __init__(self, name: str, options: dict[str, Any], folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._listener = Listener(family="AF_UNIX")
        self._log = (folder / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "engine_process.py"),
                str(self._listener.address),
                json.dumps(options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # so that all of its processes can be ended
        )
        self._connection: Connection[Any, Any] | None = None
        self._broken = False

    def wait(self, seconds: float) -> dict[str, Any]:
        """Until it has started; what it has become."""
        deadline = time.monotonic() + seconds
        while not select.select([self._listener._listener._socket], [], [], 1.0)[0]:  # type: ignore[attr-defined]
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{self.name}: no connection, exit {self._process.poll()}")
        self._connection = self._listener.accept()
        facts: dict[str, Any] = self._receive(max(deadline - time.monotonic(), 1.0))
        return facts

    def ask(self, request: str, seconds: float = ANSWERING_S, **arguments: Any) -> Any:
        """One of the methods of `engine_process`."""
        if self._connection is None or self._broken:
            raise Failed(f"{self.name} is not there")
        self._connection.send((request, arguments))
        return self._receive(seconds)["result"]

    def call(self, method: str, *args: Any) -> Any:
        """A method of the worker; see `probe`."""
        return self.ask("call", method=method, args=list(args))

    def _receive(self, seconds: float) -> Any:
        assert self._connection is not None
        deadline = time.monotonic() + seconds
        while not self._connection.poll(0.5):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._broken = True
                raise Failed(f"{self.name}: no answer within {seconds:.0f} s, exit {self._process.poll()}")
        try:
            answer = self._connection.recv()
        except EOFError:
            self._broken = True
            raise Failed(f"{self.name}: it ended") from None
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}")
        return answer

    def errors(self) -> list[str]:
        """Of its log, the last lines that name an error."""
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        return [line[-300:] for line in lines if "Error" in line][-8:]

    def end(self) -> None:
        """End all of its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._listener.close()
        self._log.close()
