# SPDX-License-Identifier: Apache-2.0
"""The demo's two real servers and the client that talks to them: what is measured, not how it looks."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ext.bench.local_server import LocalServer

SERVED_NAME = "demo"

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


class Server(LocalServer):
    """A server that the demo talks to."""

    def __init__(self, label: str, model: str, dtype: str, method: dict[str, object] | None) -> None:
        arguments = [
            *("--served-model-name", SERVED_NAME, "--dtype", dtype),
            *("--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager"),
        ]
        super().__init__(label, model, arguments, method)

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
