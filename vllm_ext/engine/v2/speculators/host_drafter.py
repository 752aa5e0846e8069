# SPDX-License-Identifier: Apache-2.0
"""A proposer on the host beside an engine that keeps its requests' texts on the device: arrays in, trees out.

So the texts are kept here too, by request id. A request that was preempted comes back with all it had; what the
proposer knows of it stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.config.speculative import Settings
from vllm_ext.engine.drafting.host_proposer import STEP_FAULT, HostProposer, of_request
from vllm_ext.engine.drafting.requests import Text
from vllm_ext.proposers.base import Proposer, Request, VerifiedRows, chains_where_asked
from vllm_ext.proposers.tree import DraftTree, Float32, Int32


class Verified(NamedTuple):
    """What a step has verified, request after request; with rows that fill trees up."""

    row_start: Int32  # [requests + 1] rows of request i are row_start[i]:row_start[i + 1], its root first
    tokens: Int32  # [rows]
    parents: Int32  # [rows] as an offset inside the request; -1 for roots and padding
    drafted: npt.NDArray[np.bool_]  # [rows] neither a root nor padding
    accepted: npt.NDArray[np.bool_]  # [rows] on the path; roots are
    top_ids: Int32  # [rows, width]
    top_logits: Float32  # [rows, width]
    sampled: Sequence[
        Sequence[int]
    ]  # [requests] what each has put out; none as long as a prompt is incomplete


class HostDrafts:
    """One proposer, and the requests that there are.

    Args:
        vllm_config: the engine's.
        settings: the method and its options.
        count: adds one to a counter.
    """

    def __init__(self, vllm_config: Any, settings: Settings, count: Callable[[str], None]) -> None:
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._host = HostProposer(vllm_config, settings, count)
        self._texts: dict[str, Text] = {}
        self._serves = False

    @property
    def proposer(self) -> Proposer:
        """The method's."""
        return self._host.proposer

    def load(self) -> None:
        """Compile what would else stall the first request, and take over what was saved."""
        self._host.load()

    def forget(self) -> None:
        """Draft with a proposer that knows nothing, for benchmarks. No request may be under way."""
        self._host.forget()

    def serve(self) -> None:
        """From now on requests are real; the proposer has heard of none."""
        self._texts.clear()
        self._serves = True

    def admit(self, request: Any, chain: bool, most_depth: int) -> None:
        """A request has come, or has come back.

        Args:
            request: vLLM's ``NewRequestData``.
            chain: a tree cannot be verified for it.
            most_depth: of a node that can be.
        """
        name = request.req_id
        before = self._texts.get(name)
        text = self._texts[name] = Text(request, chain, most_depth, self._max_model_len)
        if before is not None and not np.array_equal(before.tokens, text.tokens[: before.length]):
            self._host.finish(name)  # it goes on from something else than what the proposer has seen

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests are gone."""
        # vLLM gives a set, whose order differs between ranks.
        for name in sorted(request_ids):
            self._texts.pop(name, None)
            self._host.finish(name)

    def close(self) -> None:
        """Save what was learnt, running requests' text too."""
        if self._host.checkpointer.keeps:
            self.finish(list(self._texts))
        self._host.checkpointer.close()

    def step(self, names: Sequence[str], verified: Verified, level: int) -> tuple[list[DraftTree], Int32]:
        """Learn from a step, and draft for the next.

        Args:
            names: ids of the step's requests.
            verified: what has come of them.
            level: most nodes of a tree. With 0 there are none; the proposer hears of the texts, as some read them
                only when they are asked.

        Returns:
            A tree for each request, and int32 ``[requests]`` their last tokens.
        """
        texts = [self._texts.get(name) for name in names]
        emitted = [
            [] if text is None else text.take(sampled)
            for text, sampled in zip(texts, verified.sampled, strict=True)
        ]
        trees = [DraftTree.empty() for _ in names]
        if self._serves:
            with self._host.forgiving(STEP_FAULT), self._host.checkpointer.lock:
                self.proposer.observe(_rows(names, texts, verified, emitted))
                drafted = [place for place, tokens in enumerate(emitted) if tokens]
                trees = self._propose(names, texts, drafted, level)
                self._host.checkpointer.mark_dirty()
        last = [0 if text is None or not text.length else text.tokens[-1] for text in texts]
        return trees, np.array(last, np.int32)

    def _propose(
        self, names: Sequence[str], texts: Sequence[Text | None], drafted: list[int], level: int
    ) -> list[DraftTree]:
        requests = {}
        for place in drafted:
            text = texts[place]
            assert text is not None
            request = text.request(names[place], level)
            if self._host.start(request):
                requests[place] = request
        own = list(requests.values())
        proposals = self._host.propose(own)
        trees = [DraftTree.empty() for _ in names]
        for place, request, tree in zip(requests, own, chains_where_asked(own, proposals), strict=True):
            with self._host.forgiving(of_request(names[place])):
                trees[place] = _checked(tree, request, self._vocab_size)
        return trees


def _rows(
    names: Sequence[str],
    texts: Sequence[Text | None],
    verified: Verified,
    emitted: Sequence[Sequence[int]],
) -> VerifiedRows:
    """As proposers are told: no padding, and nothing behind a request's end."""
    start = verified.row_start
    owner = np.repeat(np.arange(len(names)), np.diff(start))
    # A row's place on the path; of the path as many rows reached the output as tokens, the root in any case.
    so_far = np.cumsum(verified.accepted, dtype=np.int64)
    place = so_far - so_far[start[:-1]][owner]
    most = np.array([max(len(tokens), 1) for tokens in emitted])
    # The logits of a structured request have its grammar's mask: they say what may come, not what would.
    heard = [
        text is not None and not text.structured and (bool(tokens) or not text.ended)
        for text, tokens in zip(texts, emitted, strict=True)
    ]
    real = verified.drafted.copy()
    real[start[:-1]] = True
    return VerifiedRows(
        names,
        start,
        verified.tokens,
        verified.parents,
        verified.accepted & (place < most[owner]),
        verified.top_ids,
        verified.top_logits,
        emitted,
    ).where(real & np.array(heard, np.bool_)[owner])


def _checked(tree: DraftTree, request: Request, vocab_size: int) -> DraftTree:
    """The part of a tree that may be verified. What is wrong in it would end the engine, on the device.

    Raises:
        ValueError: a parent does not stand before its node, or a token is none.
    """
    tree = tree.prefix(request.budget_tokens)
    for name, values, end in (
        ("parents", tree.parents + 1, np.arange(1, 1 + len(tree))),
        ("tokens", tree.tokens, vocab_size),
    ):
        if ((values < 0) | (values >= end)).any():
            raise ValueError(
                f"{name}={getattr(tree, name)} of a tree for {request.request_id!r}: parents must be from -1 to the "
                f"node before, tokens from 0 to {vocab_size - 1}"
            )
    return tree.where(tree.depths() <= request.max_depth)
