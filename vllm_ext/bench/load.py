# SPDX-License-Identifier: Apache-2.0
"""Requests to a running server, as many at once or as many a second; each timed by vLLM's own bench client.

So times mean the same as with ``vllm bench serve``: time to first token, time per output token, and the latency from
one piece of an answer to the next, which with speculation holds several tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext.bench.local_server import metrics_page, total

# What a server counts; the last is the number of engine steps.
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "engine_steps": "vllm:iteration_tokens_total_count",
}


@dataclass(frozen=True)
class Load:
    """How requests come: a new one when one is answered, or by chance at a rate."""

    concurrency: int | None = None
    rate: float | None = None  # requests a second, Poisson arrivals; None: by concurrency alone

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate is not None else f"concurrency {self.concurrency}"


@dataclass
class Reply:
    """One answered request, by the client's clock."""

    prompt: int
    text: str
    num_tokens: int
    prompt_tokens: int
    ttft_s: float
    latency_s: float
    gaps_s: list[float]  # between the pieces of the answer

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for one token."""
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass
class Turn:
    """What one server answered before it was the next one's turn."""

    replies: list[Reply]
    wall_s: float
    counted: dict[str, float]  # of `COUNTERS`, how much was added
    errors: list[str]


@dataclass(frozen=True)
class Target:
    """A server, and how it is asked."""

    url: str
    model: str  # the name that it serves
    max_tokens: int
    temperature: float
    ignore_eos: bool


def drive(target: Target, prompts: Sequence[tuple[int, list[int]]], load: Load, seed: int) -> Turn:
    """Send prompts, and wait for all answers.

    Args:
        target: the server.
        prompts: numbers and token ids, in the order they are sent.
        load: how they are sent.
        seed: of arrivals; the same for all servers.

    Raises:
        OSError: the server's counters cannot be read.
    """
    before = metrics_page(target.url)
    started = time.perf_counter()
    outputs = asyncio.run(_send(target, prompts, load, random.Random(seed)))
    wall_s = time.perf_counter() - started
    after = metrics_page(target.url)
    return Turn(
        replies=[
            Reply(
                number,
                output.generated_text,
                output.output_tokens,
                len(token_ids),
                output.ttft,
                output.latency,
                output.itl,
            )
            for (number, token_ids), output in zip(prompts, outputs, strict=True)
            if output.success
        ],
        wall_s=wall_s,
        counted={name: total(after, counter) - total(before, counter) for name, counter in COUNTERS.items()},
        errors=[output.error.strip() for output in outputs if not output.success],
    )


async def _send(
    target: Target, prompts: Sequence[tuple[int, list[int]]], load: Load, chance: random.Random
) -> list[Any]:
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import (
        AIOHTTP_TIMEOUT,
        RequestFuncInput,
        async_request_openai_completions,
    )

    room = asyncio.Semaphore(load.concurrency or len(prompts))
    # Arrivals are drawn before anything is sent, so that servers that are slow get the same ones.
    gaps_s = [0.0 if load.rate is None else chance.expovariate(load.rate) for _ in prompts]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=AIOHTTP_TIMEOUT, trust_env=False
    ) as session:

        async def ask(token_ids: list[int]) -> Any:
            async with room:
                return await async_request_openai_completions(
                    RequestFuncInput(
                        prompt=token_ids,
                        api_url=f"{target.url}/v1/completions",
                        prompt_len=len(token_ids),
                        output_len=target.max_tokens,
                        model=target.model,
                        ignore_eos=target.ignore_eos,
                        extra_body={"temperature": target.temperature},
                    ),
                    session,
                )

        started, arrival_s, tasks = time.perf_counter(), 0.0, []
        for (_, token_ids), gap_s in zip(prompts, gaps_s, strict=True):
            arrival_s += gap_s
            if (early_s := started + arrival_s - time.perf_counter()) > 0:
                await asyncio.sleep(early_s)
            tasks.append(asyncio.create_task(ask(token_ids)))
        return list(await asyncio.gather(*tasks))
