# SPDX-License-Identifier: Apache-2.0
"""What may be drafted: trees that keep to their requests' grammars and sampling rules, with what those make certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_ext.config import rules
from vllm_ext.config.asked import asked_of
from vllm_ext.config.rules import Asking, RuleSettings
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine.structured_output.grammar import Grammar, Grammars, Masks, in_worker
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.base import Request
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.proposers.under_grammar import under_grammar
from vllm_ext.samplers.base import Asked, Row
from vllm_ext.samplers.messages import quoted

logger = init_logger("vllm.vllm_ext")


class DraftConstraints:
    """Grammars and rules of the running requests.

    Args:
        vllm_config: the engine's.
        count: adds to counters, by name.
        fault_of: logs the exception in hand for a request.
    """

    def __init__(
        self,
        vllm_config: Any,
        count: Callable[[dict[str, int]], None],
        fault_of: Callable[[str], None],
    ) -> None:
        self._count, self._fault_of = count, fault_of
        # None: structured requests have chains, which the engine core masks.
        self.grammars = Grammars(vllm_config) if in_worker(vllm_config) else None
        self._ruled: RuledRequests | None = None
        if (ruled := rules.of_vllm_config(vllm_config)) is not None:
            model = vllm_config.model_config
            self._ruled = RuledRequests(ruled, ModelVocabulary.of(model), model.get_vocab_size())

    def start(self, request_id: str, params: Any) -> None:
        """A request has come, and none of it is computed yet."""
        if self.grammars is not None:
            self.grammars.start(request_id, params)
        if self._ruled is not None:
            self._ruled.start(request_id, params)

    def finish(self, request_id: str) -> None:
        """A request is gone."""
        if self.grammars is not None:
            self.grammars.finish(request_id)
        if self._ruled is not None:
            self._ruled.finish(request_id)

    def has(self, request_id: str) -> bool:
        """Whether a request is under a grammar or a rule, so that `apply` may prune its tree."""
        structured = self.grammars is not None and self.grammars.has(request_id)
        return structured or (self._ruled is not None and self._ruled.has(request_id))

    def apply(
        self, requests: Sequence[Request], outputs: Sequence[Sequence[int]], trees: Sequence[DraftTree]
    ) -> list[DraftTree]:
        """The trees, of requests under a grammar or rule what that allows and demands."""
        return [self._one(*each) for each in zip(requests, outputs, trees, strict=True)]

    def _one(self, request: Request, output: Sequence[int], tree: DraftTree) -> DraftTree:
        name = request.request_id
        structured = self.grammars if self.grammars is not None and self.grammars.has(name) else None
        try:
            if structured is not None:
                grammar = structured.of(name, output)
                if grammar is not None:
                    return structured.tree(grammar, request, tree)
                self._count({"fallbacks:no_grammar": 1})
                return DraftTree.empty()
            return tree if self._ruled is None else self._ruled.tree(request, output, tree)
        except Exception:
            if structured is not None:
                structured.give_up(name)
            self._fault_of(name)
            return DraftTree.empty()

    def masks(self, runner: Any, trees: StepTrees) -> Masks | None:
        """Of the structured requests that have drafts in this step; None where there are none."""
        if self.grammars is None:
            return None
        found: dict[int, Grammar] = {}
        for index, name in enumerate(runner.input_batch.req_ids):
            rows = trees.rows(index)
            # Rows that vLLM has filled up have no tokens; the core masks those.
            if self.grammars.has(name) and rows.stop - rows.start > 1 and trees.tokens[rows.start + 1] >= 0:
                grammar = self.grammars.of(name, runner.requests[name].output_token_ids)
                assert grammar is not None  # it had drafts
                found[index] = grammar
        return self.grammars.masks(found) if found else None


class RuledRequests:
    """The drafts that sampling rules allow, of the running requests that are under rules."""

    def __init__(self, settings: RuleSettings, vocabulary: ModelVocabulary, vocab_size: int) -> None:
        self._settings, self._vocab_size = settings, vocab_size
        self._rules = rules.load(settings.as_json, vocabulary)
        self._asking: dict[str, tuple[list[Asking], Asked, int]] = {}  # by request id; and what ends it
        self._kept: dict[str, dict[str, dict[int, Any]]] = {}  # by request id, by rule; see `Row.kept`

    def start(self, request_id: str, params: Any) -> None:
        """A request has come."""
        self.finish(request_id)
        if asking := self._settings.of_request(params):
            self._asking[request_id] = asking, asked_of(params), params.eos_token_id

    def finish(self, request_id: str) -> None:
        """A request is gone."""
        self._asking.pop(request_id, None)
        self._kept.pop(request_id, None)

    def has(self, request_id: str) -> bool:
        """Whether a request is under a rule."""
        return request_id in self._asking

    def tree(self, request: Request, output: Sequence[int], tree: DraftTree) -> DraftTree:
        """What may be verified of a tree, with what is certain."""
        if request.request_id not in self._asking or not request.has_room:
            return tree
        asking, asked, end = self._asking[request.request_id]
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        for name, its in asking:
            kept = self._kept.setdefault(request.request_id, {}).setdefault(name, {})
            row = Row(prompt, output, end, its, asked, kept=kept)
            try:
                constraint = self._rules[name].constraint(row)
                if constraint is not None:
                    most = min(request.budget_tokens, request.max_depth)
                    forced = constraint.forced(most)
                    tree = under_grammar(
                        constraint, tree, forced, request.budget_tokens, request.max_depth, self._vocab_size
                    )
            except Exception as error:  # of the drafts alone: the row itself says what becomes of the request
                logger.warning(
                    "vllm-ext: rule %r failed for a draft, which the request goes without: %s",
                    name,
                    quoted(error),
                )
                return DraftTree.empty()
        return tree
