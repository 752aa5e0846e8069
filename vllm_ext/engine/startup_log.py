# SPDX-License-Identifier: Apache-2.0
"""What a server's log says at start-up: one closing line of ours, and no warning of vLLM's that we make untrue."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import logging

OUR_VARIABLES = "VLLM_EXT_"  # environment variables that begin so are ours
# By vLLM's loggers, how warnings begin that do not hold with our methods.
MIN_P = ("vllm.v1.sample.logits_processor", "min_p and logit_bias parameters won't work with speculative")
CUSTOM_CLASS = ("vllm.config.speculative", "Using a custom class-based proposer backend")
CUSTOM_SCHEDULER = ("vllm.config.scheduler", "Using custom scheduler class")


class Started(NamedTuple):
    """What a worker is ready to do."""

    method: str | None = None
    runner: str = "V1"
    num_nodes: int = 0  # most of one request
    budget: str = ""
    chain_reason: str | None = None  # why drafts are chains; None: they are trees
    memory_bytes: int = 0  # of the drafter
    memory_of: str = "host"
    rules: Sequence[str] = ()
    kv: str | None = None  # the method that encodes the KV cache, or chooses what is read of it

    def __str__(self) -> str:
        parts, off, more = [], [], []
        if self.method is not None:
            shape = "trees" if self.chain_reason is None else f"chains, not trees, as {self.chain_reason}:"
            parts.append(
                f"{self.method} drafts {shape} of up to {self.num_nodes} tokens (budget {self.budget}) on vLLM's "
                f"{self.runner} runner, with {self.memory_bytes / 1e6:.1f} MB of {self.memory_of} memory"
            )
            off.append("--speculative-config")
            more.append(f"vllm-ext methods {self.method}")
        if self.rules:
            parts.append(f"sampling rules {', '.join(self.rules)}")
            more.append(f"vllm-ext rules {self.rules[0]}")
        if self.kv is not None:
            parts.append(f"KV cache by {self.kv}")
            more.append(f"vllm-ext kv methods {self.kv}")
        if self.rules or self.kv is not None:
            off.append('"vllm_ext" in --additional-config')
        return (
            f"vllm-ext is ready: {'; '.join(parts)}. To switch off: leave out {' and '.join(off)}. "
            f"More: {', '.join(more)}, docs/usage.md"
        )


def admit_our_variables(known: dict[str, Callable[[], object]]) -> None:
    """Enter the variables of ours that are set into vLLM's table of its own: others it warns of, or refuses.

    Their values read as None there, so that a compile cache does not depend on them.
    """
    for name in os.environ:
        if name.startswith(OUR_VARIABLES):
            known.setdefault(name, lambda: None)


@contextmanager
def without(*warnings: tuple[str, str]) -> Iterator[None]:
    """Keep warnings out of the log for a while: each the name of its logger, and how it begins."""
    import logging

    dropped = [(logging.getLogger(name), _all_but(start)) for name, start in warnings]
    for logger, rest in dropped:
        logger.addFilter(rest)
    try:
        yield
    finally:
        for logger, rest in dropped:
            logger.removeFilter(rest)


def _all_but(start: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not str(record.msg).startswith(start)


def trust_our_schedulers() -> None:
    """Keep the warning of custom schedulers out of the log where the scheduler is ours. Idempotent.

    vLLM gives it in a process and at a moment in which nothing of ours runs.
    """
    import logging

    logging.getLogger(CUSTOM_SCHEDULER[0]).addFilter(_not_of_ours)


def _not_of_ours(record: logging.LogRecord) -> bool:
    return not (str(record.msg).startswith(CUSTOM_SCHEDULER[1]) and "vllm_ext." in str(record.args))
