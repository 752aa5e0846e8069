# SPDX-License-Identifier: Apache-2.0
"""The demo's two real servers and the client that talks to them: what is measured, not how it looks."""

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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType

SERVED_NAME = "demo"
START_TIMEOUT_S = 300

PROMPTS = (
    "Write a Python class for a bank account with deposit, withdraw and balance methods, then show its use.",
    "List the planets of the solar system. For each give its name, its type and one fact, in one format.",
    "Explain step by step how to multiply 24 by 17, then check the result by multiplying 17 by 24.",
    "Write a short story about a fox who learns to swim.",
    "Repeat this text and correct the spelling: The wether in the mountians changes quikly. In the morning "
    "the wether can be sunny and in the evning the wether can bring snow to the mountians.",
    "What are the advantages and the disadvantages of working from home?",
)


@dataclass
class Answer:
    """One streamed completion."""

    text: str
    num_tokens: int
    decode_seconds: float  # from the first token to the last


class Server:
    """One ``vllm serve`` process on a free port; a context manager that ends it."""

    def __init__(self, label: str, model: str, dtype: str, method: dict[str, object] | None) -> None:
        self.label = label
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.mkdtemp(prefix="vllm-ext-demo-")) / f"{label.replace(' ', '-')}.log"
        self.command = [
            *_serve(model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--served-model-name", SERVED_NAME, "--dtype", dtype),
            *("--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager"),
        ]
        if method is not None:
            self.command += ["--speculative-config", json.dumps(method)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
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
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ready(self) -> bool:
        """Whether it answers; raises RuntimeError, with the log's end, when it has died."""
        assert self._process is not None
        if self._process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{self.label} did not start (log: {self.log}):\n{tail}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def stream(self, prompt: str, max_tokens: int) -> Iterator[str | Answer]:
        """Pieces of the answer as they come, then the `Answer`."""
        body = {
            "model": SERVED_NAME,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        text, num_tokens, first, last = "", 0, 0.0, 0.0
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len("data: ") :])
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece or choice["finish_reason"]:
                        last = time.perf_counter()
                        first = first or last
                    text += piece
                    if piece:
                        yield piece
        yield Answer(text, num_tokens, last - first)

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a counter over its labels, or those with ``label="value"``, from the server's own /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            page = response.read().decode()
        return sum(
            float(value)
            for labels, value in re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", page, re.M)
            if label in labels
        )


def _serve(model: str) -> list[str]:
    """`vllm serve MODEL`; the same server as a module where vllm-cpu's `vllm` command cannot start."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [str(Path(sys.executable).with_name("vllm")), "serve", model]


def wait_until_ready(servers: Sequence[Server]) -> Iterator[None]:
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
