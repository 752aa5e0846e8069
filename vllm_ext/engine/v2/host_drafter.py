# SPDX-License-Identifier: Apache-2.0
"""A proposer on the host beside an engine that keeps its requests' texts on the device: arrays in, trees out.

So the texts are kept here too, by request id: the prompt from when a request comes, then what the steps put out. A
request that was preempted comes back with all it had; what the proposer knows of it stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from vllm_ext.config.speculative import Settings
from vllm_ext.engine import sampling_params
from vllm_ext.engine.state.keeper import Checkpointer
from vllm_ext.proposers.base import Proposer, Request, VerifiedRows, chains_where_asked, propose_apart
from vllm_ext.proposers.tree import DraftTree, Float32, Int32

logger = init_logger("vllm.vllm_ext")


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


class _Text:
    """One request."""

    def __init__(self, request: Any, chain: bool, most_depth: int, max_model_len: int) -> None:
        self.params = request.sampling_params
        self.length = len(request.prefill_token_ids)
        # The system gives memory for what is written alone.
        self._tokens: Int32 = np.empty(max(max_model_len, self.length), np.int32)
        self._tokens[: self.length] = request.prefill_token_ids
        # Where a prompt is embeddings it has no tokens.
        self._num_prompt = len(request.prompt_token_ids or request.prefill_token_ids)
        self._max_model_len = max_model_len
        self._sampling = sampling_params.sampling_of(self.params)
        self._chain, self._most_depth = chain, most_depth
        self.structured = self.params.structured_outputs is not None
        self.started = False  # the proposer knows it
        self.ended = False  # steps scheduled before that was known still put out tokens, which nobody gets

    @property
    def tokens(self) -> Int32:
        """int32 ``[length]``, a view."""
        return self._tokens[: self.length]

    def take(self, sampled: Sequence[int]) -> list[int]:
        """Go on by what a step has put out; those of its tokens that reach the output."""
        if self.ended or not sampled:
            return []
        tokens = list(sampled)[: max(self._left, 0)]
        tokens = tokens[: sampling_params.num_kept(self.params, tokens)]
        self._tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
        self.ended = self._left <= 0 or tokens[-1] in sampling_params.ends_of(self.params)
        return tokens

    @property
    def _left(self) -> int:
        return sampling_params.tokens_left(
            self.params, self.length, self.length - self._num_prompt, self._max_model_len
        )

    def request(self, name: str, level: int) -> Request:
        """As it is drafted for, with so many nodes at most."""
        # A step that accepts n drafts puts out n + 1 tokens; each node takes a slot behind the root, accepted or not.
        max_depth = 0 if self.ended else min(max(self._left - 1, 0), self._most_depth)
        return Request(
            request_id=name,
            tokens=self.tokens,
            num_prompt_tokens=self._num_prompt,
            budget_tokens=min(level, self._max_model_len - self.length) if max_depth else 0,
            max_depth=max_depth,
            sampling=self._sampling,
            chain=self._chain,
        )


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
        self._settings, self._count = settings, count
        self.proposer = self._make()
        self._checkpointer = Checkpointer(
            vllm_config, settings.method, settings.options, settings.own_options, count
        )
        self._texts: dict[str, _Text] = {}
        self._serves = False

    def _make(self) -> Proposer:
        return self._settings.proposer_class.from_options(self._settings.options, self._vocab_size)

    def load(self) -> None:
        """Compile what would else stall the first request, and take over what was saved."""
        self.proposer.warm_up()
        self.proposer = self._checkpointer.restore(self.proposer, self._make)

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
        before = self._texts.get(request.req_id)
        text = self._texts[request.req_id] = _Text(request, chain, most_depth, self._max_model_len)
        if before is not None and before.started:
            text.started = np.array_equal(before.tokens, text.tokens[: before.length])
            if not text.started:  # it goes on from something else than what the proposer has seen
                self._tell_finished(request.req_id)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests are gone."""
        # vLLM gives a set, whose order differs between ranks.
        for name in sorted(request_ids):
            text = self._texts.pop(name, None)
            if text is not None and text.started:
                self._tell_finished(name)

    def close(self) -> None:
        """Save what was learnt, running requests' text too."""
        if self._checkpointer.keeps:
            self.finish(list(self._texts))
        self._checkpointer.close()

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
            with (
                self._forgiving("drafting failed; this step goes on without drafts"),
                self._checkpointer.lock,
            ):
                self.proposer.observe(_rows(names, texts, verified, emitted))
                drafted = [place for place, tokens in enumerate(emitted) if tokens]
                trees = self._propose(names, texts, drafted, level)
                self._checkpointer.mark_dirty()
        last = [0 if text is None or not text.length else text.tokens[-1] for text in texts]
        return trees, np.array(last, np.int32)

    def _propose(
        self, names: Sequence[str], texts: Sequence[_Text | None], drafted: list[int], level: int
    ) -> list[DraftTree]:
        requests = {}
        for place in drafted:
            text = texts[place]
            assert text is not None
            request = text.request(names[place], level)
            with self._forgiving(_of_request(names[place])):
                if not text.started:
                    self.proposer.start(request)
                    text.started = True
                requests[place] = request
        own = list(requests.values())
        proposals = propose_apart(self.proposer, own, lambda name: self._fault(_of_request(name)))
        trees = [DraftTree.empty() for _ in names]
        for place, request, tree in zip(requests, own, chains_where_asked(own, proposals), strict=True):
            with self._forgiving(_of_request(names[place])):
                trees[place] = _checked(tree, request, self._vocab_size)
        return trees

    def _tell_finished(self, name: str) -> None:
        with self._forgiving("a finished request was not forgotten"), self._checkpointer.lock:
            self.proposer.finish(name)
            self._checkpointer.mark_dirty()

    @contextmanager
    def _forgiving(self, what: str) -> Iterator[None]:
        """A proposer's fault costs speed, never a request."""
        try:
            yield
        except Exception:
            self._fault(what)

    def _fault(self, what: str) -> None:
        """Log the exception in hand and count it. Call in an except block."""
        logger.exception("vllm-ext: %s", what)
        self._count("fallbacks:proposer_error")


def _of_request(name: str) -> str:
    return f"drafting failed for request {name}; it goes on without drafts in this step"


def _rows(
    names: Sequence[str],
    texts: Sequence[_Text | None],
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
