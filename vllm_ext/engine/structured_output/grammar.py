# SPDX-License-Identifier: Apache-2.0
"""Structured output beside trees: the worker has each request's grammar, and masks the rows it samples.

vLLM's engine core masks along the flat list of drafts and cuts off what is no legal chain, which is wrong for trees;
and it sees drafts only when they are made. So the worker compiles the grammar too, by vLLM's own backend, drafts what
it allows (`proposers/under_grammar.py`), and masks rows, each behind its own path: on V1 those that the walk visits
(`Masks`), on V2 those of the whole tree (`known_trees`). What is left to the core is what it does without speculation:
rows of requests that have no drafts, and the end of a request. `scheduler.structured_drafts` is the other half of this
agreement.

Not with a reasoning parser, which says where a grammar begins: there the core masks chains, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.composed import scheduler
from vllm_ext.kernels.token_mask import mask_rows
from vllm_ext.proposers.base import Request
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.proposers.under_grammar import under_grammar

# vLLM's names of its backends, by class.
BACKENDS = {
    "XgrammarBackend": "xgrammar",
    "GuidanceBackend": "guidance",
    "OutlinesBackend": "outlines",
    "LMFormatEnforcerBackend": "lm-format-enforcer",
}
ENDING = 8  # tokens before forced text that are tokenized with it
SPELLED = 4096  # forced texts whose tokens are kept; all are forgotten when there are more


def in_worker(vllm_config: Any) -> bool:
    """Whether workers mask the rows of structured requests that have drafts; the scheduler asks the same."""
    structured = vllm_config.structured_outputs_config
    return bool(
        scheduler.has(vllm_config, "StructuredDrafts")
        and (not structured.reasoning_parser or structured.enable_in_reasoning)
        and not vllm_config.model_config.skip_tokenizer_init
    )


class Grammar:
    """One request's, behind the tokens it has put out. A `vllm_ext.proposers.under_grammar.Matcher`."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar  # vLLM's StructuredOutputGrammar
        self._num_followed = 0

    def follow(self, output: Sequence[int]) -> bool:
        """Take the tokens of ``output`` that are new; False where the grammar forbids one."""
        self._num_followed += self.take(output[self._num_followed :])
        return self._num_followed == len(output) or bool(self._grammar.is_terminated())

    def take(self, tokens: Sequence[int]) -> int:
        """Take tokens that were masked by it, up to its end; how many, for `rollback`."""
        for count, token in enumerate(tokens):
            if self._grammar.is_terminated() or not self._grammar.accept_tokens("", [token]):
                return count
        return len(tokens)

    def accept(self, token: int) -> bool:
        """See `Matcher`. Nothing is allowed behind the end, nor, with some backends, the end token itself."""
        grammar = self._grammar
        if grammar.is_terminated() or not grammar.validate_tokens([token]):
            return False  # said so by `accept_tokens`, it would be logged as an error
        return bool(grammar.accept_tokens("", [token]))

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher`."""
        self._grammar.rollback(num_tokens)

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """One row of what may come next, a bit a token; everything behind the end, as vLLM has it."""
        if self._grammar.is_terminated():
            bitmask[row] = -1
        else:
            self._grammar.fill_bitmask(bitmask, row)

    def forced_text(self) -> str:
        """What the grammar demands next whatever comes; empty where a backend does not tell."""
        matcher: Any = getattr(self._grammar, "matcher", None)
        if self._grammar.is_terminated() or not hasattr(matcher, "find_jump_forward_string"):
            return ""
        try:
            return str(matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:
            # It tells bytes: those that all alternatives begin with may end inside a character.
            return error.object[: error.start].decode()


class Grammars:
    """Those of the running requests, compiled as they come."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._manager = StructuredOutputManager(vllm_config)
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        if vllm_config.parallel_config.world_size > 1:
            # All ranks must see the same trees: none may have its grammar a step before another.
            self._manager._use_async_grammar_compilation = False
        self._requests: dict[str, Any] = {}  # vLLM's StructuredOutputRequest, by request id
        self._grammars: dict[str, Grammar] = {}
        self._given_up: set[str] = set()
        self._spelled: dict[tuple[Any, ...], list[int]] = {}  # what `_tokens` has found
        self._bitmask: torch.Tensor | None = None  # int32 [rows, ceil(vocab / 32)]

    def start(self, request_id: str, params: Any) -> None:
        """A request has come: compile, beside the engine where that is allowed."""
        from vllm.v1.structured_output.request import StructuredOutputRequest

        self.finish(request_id)
        structured = StructuredOutputRequest.from_sampling_params(params)
        if structured is not None:
            self._requests[request_id] = structured
            self._manager.grammar_init(
                SimpleNamespace(
                    request_id=request_id, sampling_params=params, structured_output_request=structured
                )
            )

    def finish(self, request_id: str) -> None:
        """A request is gone."""
        self._requests.pop(request_id, None)
        self._grammars.pop(request_id, None)
        self._given_up.discard(request_id)

    def give_up(self, request_id: str) -> None:
        """A request's grammar has failed, and may be behind anything: no more drafts, and the core masks its rows."""
        self._given_up.add(request_id)

    def has(self, request_id: str) -> bool:
        """Whether a request is structured."""
        return request_id in self._requests

    def of(self, request_id: str, output: Sequence[int]) -> Grammar | None:
        """A request's grammar behind its output; None while it is compiled, and where that or the output failed.

        vLLM logs both failures, and ends the request itself. None, too, after `give_up`.
        """
        if request_id in self._given_up:
            return None
        if request_id not in self._grammars:
            compiled = self._requests[request_id].grammar
            if compiled is None or isinstance(compiled, Exception):
                return None
            self._grammars[request_id] = Grammar(compiled)
        grammar = self._grammars[request_id]
        return grammar if grammar.follow(output) else None

    def tree(self, grammar: Grammar, request: Request, tree: DraftTree) -> DraftTree:
        """What may be verified of a tree, with what the grammar demands."""
        if not request.has_room:
            return tree
        most = min(request.budget_tokens, request.max_depth)
        forced = self._only_choices(grammar, most)
        if not forced:
            forced = self._tokens(grammar.forced_text(), request.tokens[request.num_prompt_tokens :].tolist())
        return under_grammar(
            grammar, tree, forced, request.budget_tokens, request.max_depth, self._vocab_size
        )

    def _only_choices(self, grammar: Grammar, most: int) -> list[int]:
        """Tokens while each is the only one that is allowed."""
        bitmask = self.rows(1)
        tokens: list[int] = []
        while len(tokens) < most:
            grammar.fill(bitmask, 0)
            words = bitmask[0].numpy().view(np.uint32)
            (used,) = np.nonzero(words)
            if len(used) != 1 or (word := int(words[used[0]])) & (word - 1):
                break
            tokens.append(32 * int(used[0]) + word.bit_length() - 1)
            if not grammar.accept(tokens[-1]):
                tokens.pop()  # its end
                break
        grammar.rollback(len(tokens))
        return tokens

    def rows(self, count: int) -> torch.Tensor:
        """A bitmask of so many rows at least, whose values are anybody's; the same memory for all."""
        if self._bitmask is None or len(self._bitmask) < count:
            self._bitmask = self._manager.backend.allocate_token_bitmask(count)
        return self._bitmask

    def _tokens(self, text: str, output: Sequence[int]) -> list[int]:
        """Tokens of text behind some output, as the tokenizer would have them there."""
        if not text:
            return []
        key = (*output[-ENDING:], text)
        if key not in self._spelled:
            if len(self._spelled) >= SPELLED:
                self._spelled.clear()
            self._spelled[key] = self._spell(text, output[-ENDING:])
        return self._spelled[key]

    def _spell(self, text: str, output: Sequence[int]) -> list[int]:
        tokenizer = self._manager.tokenizer
        before = tokenizer.decode(output)
        start: list[int] = tokenizer.encode(before, add_special_tokens=False)
        whole: list[int] = tokenizer.encode(before + text, add_special_tokens=False)
        if whole[: len(start)] == start:
            return whole[len(start) :]
        alone: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return alone

    def masks(self, grammars: dict[int, Grammar]) -> Masks:
        """Of one step's walk.

        Args:
            grammars: by batch index, of the requests that have drafts, each behind all output before the step.
        """
        return Masks(grammars, self.rows(len(grammars)))


class Masks:
    """Masks of the rows that a walk visits; its grammars go down the tree with it, until `close`."""

    def __init__(self, grammars: dict[int, Grammar], bitmask: torch.Tensor) -> None:
        self._grammars = grammars
        self._bitmask = bitmask
        self._taken = dict.fromkeys(grammars, 0)  # tokens of this walk

    def has(self, request: int) -> bool:
        """Whether a request, by batch index, has a grammar."""
        return request in self._grammars

    def apply(self, logits: torch.Tensor, requests: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """Mask the rows that a grammar has, in place.

        Args:
            logits: ``[num_rows, vocab]``.
            requests: by row, the batch index of its request.
            emitted: by row, what the walk has put out for the request so far.
        """
        rows = [row for row, request in enumerate(requests) if request in self._grammars]
        for place, row in enumerate(rows):
            grammar, path = self._grammars[requests[row]], emitted[row]
            self._taken[requests[row]] += grammar.take(path[self._taken[requests[row]] :])
            grammar.fill(self._bitmask, place)
        if rows:
            mask_rows(logits, rows, self._bitmask)

    def close(self) -> None:
        """Grammars are again what they were: their owner follows the output."""
        for request, taken in self._taken.items():
            if taken:
                self._grammars[request].rollback(taken)
