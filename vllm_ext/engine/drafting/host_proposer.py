# SPDX-License-Identifier: Apache-2.0
"""A proposer on the host: which requests it has been told of, what it keeps over restarts, and its faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger

from vllm_ext.config.speculative import Settings
from vllm_ext.engine.state.keeper import Checkpointer
from vllm_ext.proposers.base import Proposer, Request, Sampling, propose_apart
from vllm_ext.proposers.tree import DraftTree

logger = init_logger("vllm.vllm_ext")

STEP_FAULT = "drafting failed; this step goes on without drafts"


class HostProposer:
    """One proposer. Its faults are logged and counted: they cost speed, never a request.

    Args:
        vllm_config: the engine's.
        settings: the method and its options.
        count: adds one to a counter.
    """

    def __init__(self, vllm_config: Any, settings: Settings, count: Callable[[str], None]) -> None:
        self._settings, self._count = settings, count
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.proposer = self._make()
        self.checkpointer = Checkpointer(
            vllm_config, settings.method, settings.options, settings.own_options, count
        )
        # By request id, of those that the proposer has been told of: how each samples.
        self.known: dict[str, Sampling] = {}

    def _make(self) -> Proposer:
        return self._settings.proposer_class.from_options(self._settings.options, self._vocab_size)

    def load(self) -> None:
        """Compile what would else stall the first request, and take over what was saved."""
        self.proposer.warm_up()
        self.proposer = self.checkpointer.restore(self.proposer, self._make)

    def forget(self) -> None:
        """Begin again with a proposer that knows nothing. Call while there are no requests."""
        self.proposer = self._make()
        self.proposer.warm_up()
        self.known.clear()

    def start(self, request: Request) -> bool:
        """Tell the proposer of a request, once. Call with the checkpointer's lock held.

        Returns:
            Whether the proposer knows it now; if not, it is told again with the next step.
        """
        name = request.request_id
        if name not in self.known:
            with self.forgiving(of_request(name)):
                self.proposer.start(request)
                self.known[name] = request.sampling
        return name in self.known

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """A tree for each request; none for those at which it fails. Call with the checkpointer's lock held."""
        return propose_apart(self.proposer, requests, self.fault_of)

    def finish(self, request_id: str) -> bool:
        """A request is gone, or goes on with another text; whether the proposer knew it."""
        if self.known.pop(request_id, None) is None:
            return False
        with self.forgiving("a finished request was not forgotten"), self.checkpointer.lock:
            self.proposer.finish(request_id)
            self.checkpointer.mark_dirty()
        return True

    @contextmanager
    def forgiving(self, what: str) -> Iterator[None]:
        """Go on behind the block where it raises."""
        try:
            yield
        except Exception:
            self.fault(what)

    def fault(self, what: str) -> None:
        """Log the exception in hand and count it. Call in an except block."""
        logger.exception("vllm-ext: %s", what)
        self._count("fallbacks:proposer_error")

    def fault_of(self, request_id: str) -> None:
        """The same of one request."""
        self.fault(of_request(request_id))


def of_request(request_id: str) -> str:
    """What is logged of a fault that costs one request its drafts."""
    return f"drafting failed for request {request_id}; it goes on without drafts in this step"
