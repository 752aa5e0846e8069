# SPDX-License-Identifier: Apache-2.0
"""Trees of structured requests on the V2 runner, and the masks of their rows.

vLLM's scheduler sends masks along the flat list of drafts, right for a chain and wrong for a tree. Our part of the
scheduler (`scheduler.structured_drafts`) has it send the root's alone, and mark all drafts as not to be accepted. The
worker follows each request's text with a grammar of its own, cuts its trees to what that allows before they are laid
out, and puts in the masks behind the root. It does so only where its own mask of the root is vLLM's, bit for bit: where
it is not, the drafts stay marked, and the step puts out the one token that it does without drafts.

Arrays and ints: the device is `engine.v2`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.engine import sampling_params
from vllm_ext.engine.structured_output.grammar import Grammar, Grammars
from vllm_ext.proposers.base import Request, chains_where_asked
from vllm_ext.proposers.tree import DraftTree

GOES_WITHOUT = "a grammar failed for request {}; it goes on without drafts"


class _Known(NamedTuple):
    """A tree that the device has, or is being sent."""

    grammar: Grammar  # behind the root
    tree: DraftTree


class _Text(NamedTuple):
    """A request, as far as the host knows."""

    num_prompt: int
    output: list[int]
    params: Any  # vLLM's SamplingParams


class KnownTrees:
    """Those of the running structured requests, by id.

    Args:
        vllm_config: the engine's.
        count: adds one to a counter.
        fault: logs the exception in hand, under what is said of it.
    """

    def __init__(self, vllm_config: Any, count: Callable[[str], None], fault: Callable[[str], None]) -> None:
        self._grammars = Grammars(vllm_config)
        self._count, self._fault = count, fault
        self._texts: dict[str, _Text] = {}
        self._known: dict[str, _Known] = {}

    def start(self, request: Any) -> None:
        """A request has come, or has come back; those that are not structured are no concern of ours.

        Args:
            request: vLLM's ``NewRequestData``.
        """
        name, params = request.req_id, request.sampling_params
        self.finish([name])
        if params.structured_outputs is not None:
            prompt = request.prompt_token_ids
            num_prompt = len(request.prefill_token_ids if prompt is None else prompt)
            self._texts[name] = _Text(num_prompt, list(request.prefill_token_ids[num_prompt:]), params)
            self._grammars.start(name, params)
            if prompt is None:  # embeddings: nobody says where the output begins
                self._grammars.give_up(name)

    def finish(self, names: Iterable[str]) -> None:
        """Requests are gone."""
        for name in names:
            self._texts.pop(name, None)
            self._known.pop(name, None)
            self._grammars.finish(name)

    def length(self, name: str) -> int:
        """Tokens of a request's text that are known here."""
        text = self._texts[name]
        return text.num_prompt + len(text.output)

    def forget(self, names: Iterable[str]) -> None:
        """The device has other trees for these, or none; their texts go on."""
        for name in names:
            self._known.pop(name, None)

    def draft(
        self, name: str, tokens: Sequence[int], tree: DraftTree, nodes: int, most_depth: int, chain: bool
    ) -> DraftTree:
        """What may be verified of a tree, with what the grammar demands.

        Args:
            name: the request's id.
            tokens: of its text, those that are not known here yet.
            tree: behind them.
            nodes: most of the result.
            most_depth: of a node of it.
            chain: the result must not branch.

        Returns:
            An empty tree where the grammar is not there, or what stands before is not by it.
        """
        text = self._texts[name]
        text.output.extend(tokens)
        self.forget([name])
        try:
            grammar = self._grammars.of(name, text.output)
            if grammar is None:
                self._count("fallbacks:no_grammar")
                return DraftTree.empty()
            request = Request(
                request_id=name,
                tokens=np.array(text.output, np.int32),
                num_prompt_tokens=0,  # of the text it is told of
                budget_tokens=nodes,
                max_depth=most_depth,
                sampling=sampling_params.sampling_of(text.params),
                chain=chain,
            )
            (made,) = chains_where_asked([request], [self._grammars.tree(grammar, request, tree)])
        except Exception:
            self._grammars.give_up(name)
            self._fault(GOES_WITHOUT.format(name))
            return DraftTree.empty()
        self._known[name] = _Known(grammar, made)
        return made

    def masked(self, output: Any, num_drafts: dict[str, int]) -> Any:
        """vLLM's ``GrammarOutput`` of a step, with the masks behind the roots of those trees that are known.

        Args:
            output: as our part of the scheduler has it sent; left as it is.
            num_drafts: by request, rows behind its root.
        """
        names = output.structured_output_request_ids
        if self._known.keys().isdisjoint(names):
            return output
        counts = [num_drafts[name] for name in names]
        masks = output.grammar_bitmask.copy()  # it may be memory that is shared with the scheduler's process
        first = _first_rows(counts, len(masks))
        accepted = list(output.num_acceptable_drafts or [0] * len(names))
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            known = self._known.get(name)
            if not count or known is None or not len(known.tree):
                continue
            try:
                rows = self._rows(known, count)
            except Exception:
                self._grammars.give_up(name)
                self._fault(GOES_WITHOUT.format(name))
                continue
            at = first[place]
            if np.array_equal(rows[0], masks[at]):
                masks[at + 1 : at + len(rows)] = rows[1:]
                accepted[place] = count
            else:
                self._count("fallbacks:no_grammar")
        return replace(output, grammar_bitmask=masks, num_acceptable_drafts=accepted)

    def _rows(self, known: _Known, count: int) -> npt.NDArray[np.int32]:
        """The masks of the root and of the first nodes of a tree, each behind its own path."""
        grammar, tree = known.grammar, known.tree.prefix(count)
        bitmask = self._grammars.rows(1 + len(tree))
        children: list[list[int]] = [[] for _ in range(1 + len(tree))]
        for node, parent in enumerate(tree.parents.tolist(), 1):
            children[parent + 1].append(node)
        tokens = tree.tokens.tolist()

        def visit(row: int) -> None:
            grammar.fill(bitmask, row)
            for node in children[row]:
                if not grammar.accept(tokens[node - 1]):
                    raise RuntimeError(f"its grammar forbids token {tokens[node - 1]}, which it allowed")
                visit(node)
                grammar.rollback(1)

        visit(0)
        rows: npt.NDArray[np.int32] = bitmask[: 1 + len(tree)].numpy()
        return rows


def _first_rows(counts: Sequence[int], total: int) -> list[int]:
    """Of each request its root's row in the bitmask.

    vLLM 0.32 has a row for each draft that was scheduled, and the root's; 0.33 as many for each request.
    """
    lengths = [1 + count for count in counts]
    if sum(lengths) != total:
        lengths = [total // len(counts)] * len(counts)
    first: list[int] = np.cumsum([0, *lengths[:-1]]).tolist()
    return first


def tree_of_rows(tokens: Any, parents: Any, nodes: int) -> DraftTree:
    """A slot's tree as the device has it (`kernels.device_trees.SlotTrees`), without padding.

    Args:
        tokens: int32 ``[nodes]`` of its rows behind the root.
        parents: int32 ``[nodes]`` their parents' rows; negative for padding.
        nodes: most of the result.
    """
    above = np.maximum(parents, 0) - 1
    # The device keeps no chances: the first are the likeliest.
    chances = np.linspace(1.0, 0.0, len(tokens) + 1, endpoint=False, dtype=np.float32)[1:]
    whole = DraftTree(np.asarray(tokens, np.int32), above.astype(np.int32), chances)
    return whole.where(np.asarray(parents) >= 0).prefix(nodes)
