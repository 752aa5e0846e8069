# SPDX-License-Identifier: Apache-2.0
"""A ``vllm serve`` process of our own on this machine: started, waited for, asked for its counters, ended."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

Own = TypeVar("Own", bound="LocalServer")

START_TIMEOUT_S = 600
END_TIMEOUT_S = 30


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LocalServer:
    """One server on a free port; a context manager that ends it.

    Args:
        label: what errors and the log call it.
        model: folder or id.
        arguments: of ``vllm serve``, besides address and speculation.
        speculative_config: None: plain.
    """

    def __init__(
        self, label: str, model: str, arguments: Sequence[str], speculative_config: dict[str, Any] | None
    ) -> None:
        self.label = label
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        name = re.sub(r"\W+", "-", label)
        self.log = Path(tempfile.mkdtemp(prefix="vllm-ext-server-")) / f"{name}.log"
        self.command = [*_serve(model), "--host", "127.0.0.1", "--port", str(port), *arguments]
        if speculative_config is not None:
            self.command += ["--speculative-config", json.dumps(speculative_config)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self: Own) -> Own:
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env={**environment, **os.environ}
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Of the API server; only while it runs."""
        assert self._process is not None
        return self._process.pid

    def ready(self) -> bool:
        """Whether it answers.

        Raises:
            RuntimeError: it has died; with the log's end.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{self.label} did not start (log: {self.log}):\n{tail}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a counter over its labels, or over those with ``label="value"``, from `/metrics`.

        Raises:
            OSError: the server does not answer.
        """
        return total(metrics_page(self.url), name, label)


def metrics_page(url: str) -> str:
    """The text of a server's ``/metrics``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        page: str = response.read().decode()
    return page


def total(page: str, name: str, label: str = "") -> float:
    """Sum of a counter over its labels, or over those with ``label="value"``, on a page of ``/metrics``."""
    return sum(value for labels, value in _lines(page, name) if label in labels)


def _lines(page: str, name: str) -> list[tuple[str, float]]:
    found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", page, re.M)
    return [(labels, float(value)) for labels, value in found]


def wait_until_ready(servers: Sequence[LocalServer]) -> Iterator[None]:
    """Yields twice a second until all servers answer.

    Raises:
        RuntimeError: one died, or took more than `START_TIMEOUT_S`.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = list(servers)
    while waiting := [server for server in waiting if not server.ready()]:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{waiting[0].label} did not start within {START_TIMEOUT_S} s (log: {waiting[0].log})"
            )
        yield
        time.sleep(0.5)


def _serve(model: str) -> list[str]:
    """`vllm serve MODEL`; the same server as a module where vllm-cpu's `vllm` command cannot start."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [str(Path(sys.executable).with_name("vllm")), "serve", model]
