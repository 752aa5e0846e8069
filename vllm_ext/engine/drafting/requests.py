# SPDX-License-Identifier: Apache-2.0
"""Requests as proposers are told of them: their texts, and how far their drafts may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_ext.config import kv_cache, request_options, speculative
from vllm_ext.engine import sampling_params
from vllm_ext.engine.lossy import reflective
from vllm_ext.proposers.base import Request, Sampling
from vllm_ext.proposers.reflection import ReflectionRule, most_drafts
from vllm_ext.proposers.sure_text import EntropyRule
from vllm_ext.proposers.tree import Int32


def drafted_for(
    request_id: str,
    tokens: Int32,
    num_prompt_tokens: int,
    sampling: Sampling,
    *,
    left: int,
    nodes: int,
    chain: bool,
    most_depth: int | None = None,
    may_draw: bool = False,
    entropy_rule: EntropyRule | None = None,
    reflection: ReflectionRule | None = None,
) -> Request:
    """A request at the moment it is drafted for.

    Args:
        request_id: vLLM's.
        tokens: int32 ``[num_tokens]``, its prompt and output.
        num_prompt_tokens: of these its prompt.
        sampling: how it samples.
        left: tokens that it may still put out; none once it has ended.
        nodes: most of its tree.
        chain: a tree cannot be verified for it.
        most_depth: of a node that can be, where that is not all there is room for.
        may_draw: see `Request`.
        entropy_rule: likewise.
        reflection: likewise; ``nodes`` are then those of the whole step.
    """
    # A step that accepts n drafts puts out n + 1 tokens.
    max_depth = max(left - 1, 0)
    if most_depth is not None:
        max_depth = min(max_depth, most_depth)
    if reflection is not None:
        nodes, chain = most_drafts(nodes, reflection), True
    return Request(
        request_id=request_id,
        tokens=tokens,
        num_prompt_tokens=num_prompt_tokens,
        budget_tokens=nodes if max_depth else 0,
        max_depth=max_depth,
        sampling=sampling,
        chain=chain,
        may_draw=may_draw,
        entropy_rule=entropy_rule,
        reflection=reflection,
    )


class BatchTexts:
    """Requests of the V1 runner's batch, which has their texts.

    Args:
        vllm_config: the engine's.
        per_node: slots behind the root that each node takes, accepted or not.
    """

    def __init__(self, vllm_config: Any, per_node: int) -> None:
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._per_node = per_node
        # By batch index, tokens and nodes that whoever asks a model for nodes has slots for; None: nobody does.
        self.room_of: Callable[[int], int] | None = None
        encoded = kv_cache.from_config(vllm_config) is not None
        settings = speculative.from_vllm_config(vllm_config)
        assert settings is not None
        self._options, self._model_config = settings.options, vllm_config.model_config
        reflective.check(self._model_config, self._options)
        self._encoded_block: int | None = vllm_config.cache_config.block_size if encoded else None

    def request(
        self,
        runner: Any,
        slot: int,
        emitted: Sequence[int],
        num_kept: int,
        nodes: int,
        sampling: Sampling | None,
        chain: bool,
        may_draw: bool,
    ) -> Request:
        """A request as it is drafted for, after a step that put out tokens.

        Args:
            runner: vLLM's.
            slot: the request's, in the batch.
            emitted: the step's tokens, which the batch already holds.
            num_kept: of these, how many reach the output.
            nodes: most of its tree.
            sampling: how it samples, where that is known.
            chain: a tree cannot be verified for it.
            may_draw: see `Request`.
        """
        batch = runner.input_batch
        name: str = batch.req_ids[slot]
        state = runner.requests[name]
        params = state.sampling_params
        num_tokens = int(batch.num_tokens_no_spec[slot]) - (len(emitted) - num_kept)
        left = sampling_params.tokens_left(
            params, num_tokens, len(state.output_token_ids), self._max_model_len
        )
        if emitted[num_kept - 1] in sampling_params.ends_of(params):
            left = 0
        if self._encoded_block is not None:
            # Drafts end before the last place of a block, which is encoded when a settled token takes it.
            left = min(left, self._encoded_block - 1 - (num_tokens - 1) % self._encoded_block)
        room = self._max_model_len
        if self.room_of is not None:
            room = min(room, self.room_of(slot))
        return drafted_for(
            name,
            batch.token_ids_cpu[slot, :num_tokens],
            state.num_prompt_tokens,
            sampling or sampling_params.sampling_of(params),
            left=left,
            nodes=min(nodes, max(room - num_tokens, 0) // self._per_node),
            chain=chain,
            may_draw=may_draw,
            entropy_rule=request_options.entropy_rule(self._options, params),
            reflection=reflective.rule(self._model_config, self._options, params),
        )


class Text:
    """A request of an engine that keeps its text on the device: the prompt from when it comes, then what steps put out.

    Args:
        request: vLLM's ``NewRequestData``.
        chain: a tree cannot be verified for it.
        most_depth: of a node that can be.
        max_model_len: the engine's.
    """

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
        self._most_nodes = request_options.most_nodes(self.params)
        self.structured = self.params.structured_outputs is not None
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
        if self._most_nodes is not None:
            level = min(level, self._most_nodes)
        return drafted_for(
            name,
            self.tokens,
            self._num_prompt,
            self._sampling,
            left=0 if self.ended else self._left,
            # Each node takes a slot behind the root, accepted or not.
            nodes=min(level, self._max_model_len - self.length),
            chain=self._chain,
            most_depth=self._most_depth,
        )
