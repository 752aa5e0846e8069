# SPDX-License-Identifier: Apache-2.0
"""Verification in the V1 runner: vLLM's own sampler, walked down the draft tree.

Instead of the rejection sampler. The stock ``Sampler`` runs on each visited row with that path's tokens
in its metadata, so penalties, bad words, minimum lengths, thinking budgets, logprobs and per-request generators are
handled by the code that handles them without speculation: seeded output is the same token for token. What vLLM keeps of
a request from step to step is in `row_states`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler

from vllm_ext.engine.lossy import reflective
from vllm_ext.engine.lossy.entropy import EntropyStep
from vllm_ext.engine.lossy.typical import TypicalRequests, TypicalStep
from vllm_ext.engine.structured_output.grammar import Masks
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.engine.v1.logits_processor import deferrals
from vllm_ext.engine.v1.multi_draft_sampler import MultiDraftSampler
from vllm_ext.engine.v1.row_states import RowStates, has_thinking_budget, is_idle
from vllm_ext.samplers.tree_walk import greedy_walk, walk

DEFERRED = -2  # instead of a token that a rule has put off; no draft is that
VERIFICATION = 0xACCE  # in the seed of its noise: apart from the draft's


class TreeSampler(RejectionSampler):  # type: ignore[misc]  # vLLM is untyped to us
    """A rejection sampler that rejects nothing: it samples, and looks whether the draft had it."""

    runner: Any
    row_states: RowStates
    typical: TypicalRequests
    _multi_draft_sampler: MultiDraftSampler | None = None

    def bind(self, runner: Any) -> None:
        """Verify the trees of this runner."""
        # Not a submodule: a runner is no nn.Module, and vLLM walks no module tree through its sampler.
        self.runner = runner
        self.row_states = RowStates(runner)
        self.typical = TypicalRequests(runner.vllm_config)

    def forward(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        """See the base class; ``draft_probs`` is None for all our methods."""
        trees = self.runner.step_trees
        if trees is None:  # vLLM's warm-up calls with made-up drafts
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        if trees.has_no_drafts:
            return self._without_drafts(trees, logits, sampling_metadata)
        for _, pair in self.runner.pairs:
            trees.drawn.pop(pair, None)
            trees.sure.pop(pair, None)
        if trees.again:
            self.runner.greedy_choice = None
            reflective.mix(trees, logits)
        logprobs = None
        masks = self.runner.drafter.constraints.masks(self.runner, trees)
        if not trees.sure and _is_plain_greedy(sampling_metadata):
            choice = self.runner.greedy_choice
            if choice is None:
                choice = self.sampler.greedy_sample(logits.to(torch.float32)).cpu().numpy()
            if masks is None:
                trees.accepted, emitted = greedy_walk(trees.row_start, trees.tokens, trees.parents, choice)
            else:
                draw = _GreedyRounds(choice, logits, trees.row_start, masks).draw
                trees.accepted, emitted = walk(trees.row_start, trees.tokens, trees.parents, draw)
        else:
            tokens = self._acceptable(trees, sampling_metadata)
            typical = self._typical_step(trees, tokens, logits, sampling_metadata)
            entropy = self._entropy_step(trees, tokens, logits)
            own = trees.drawn or typical or entropy
            sampler = self._verifier(trees, typical, entropy) if own else self.sampler
            rounds = _Rounds(
                self.runner, sampler, logits, trees.row_start, sampling_metadata, masks, self.row_states
            )
            try:
                trees.accepted, emitted = walk(trees.row_start, tokens, trees.parents, rounds.draw)
            finally:
                self.row_states.close()
            if self.runner.may_defer:
                emitted = [tokens[:-1] if tokens[-1] == DEFERRED else tokens for tokens in emitted]
            if typical is not None:
                self.runner.drafter.count("spec_typical_tokens", typical.num_kept)
            if entropy is not None:
                self.runner.drafter.count("spec_entropy_tokens", entropy.num_kept)
            logprobs = rounds.logprobs(max(1, *map(len, emitted)))
        if masks is not None:
            masks.close()
        width = max(1, *map(len, emitted))
        padded = np.full((len(emitted), width), PLACEHOLDER_TOKEN_ID, dtype=np.int32)
        for row, tokens in zip(padded, emitted, strict=True):
            row[: len(tokens)] = tokens
        return SamplerOutput(torch.from_numpy(padded).to(logits.device), logprobs)

    def _without_drafts(
        self, trees: StepTrees, logits: torch.Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        """One token for each request, by the stock sampler: such steps are plain's, and should cost what plain's do."""
        trees.accepted = [[] for _ in trees.query_row]
        choice = self.runner.greedy_choice
        if choice is not None and _is_plain_greedy(sampling_metadata):
            return SamplerOutput(torch.from_numpy(choice[:, None].astype(np.int32)).to(logits.device), None)
        output: SamplerOutput = self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        return output

    def _acceptable(self, trees: StepTrees, metadata: Any) -> Any:
        """int32 ``[num_rows]``: the drafts, less those of requests that get one token, or none, of this step.

        A request with explicit logprob token ids (a scoring one, which wants one token) has results of a width of its
        own. One whose token is thrown away is not to be taken further than that token.
        """
        single = set(metadata.logprob_token_ids or ())
        single.update(self.runner.discard_request_mask.np[: len(trees.query_row)].nonzero()[0].tolist())
        tokens = trees.tokens.copy() if single else trees.tokens
        for request in single:
            tokens[trees.rows(request)] = PLACEHOLDER_TOKEN_ID  # nothing matches
            trees.drawn.pop(request, None)
            trees.sure.pop(request, None)
        return tokens

    def _typical_step(
        self, trees: StepTrees, tokens: Any, logits: torch.Tensor, metadata: Any
    ) -> TypicalStep | None:
        """Typical acceptance for the requests that have it, however their trees came about."""
        rules = self.typical.of_step(self.runner.input_batch.req_ids)
        for request in rules:
            trees.drawn.pop(request, None)
        return TypicalStep(rules, trees, tokens, logits, metadata.temperature) if rules else None

    def _entropy_step(self, trees: StepTrees, tokens: Any, logits: torch.Tensor) -> EntropyStep | None:
        """Of the requests for which some of what the draft model says is taken."""
        if not trees.sure:
            return None
        return EntropyStep(trees, tokens, logits, self.runner.input_batch.temperature_cpu)

    def _verifier(
        self, trees: StepTrees, typical: TypicalStep | None, entropy: EntropyStep | None
    ) -> MultiDraftSampler:
        """The stock sampler, but for rows with children that were drawn, or that a lossy verification may keep."""
        if self._multi_draft_sampler is None:
            seed = self.runner.model_config.seed
            self._multi_draft_sampler = MultiDraftSampler(
                self.sampler, np.random.default_rng([VERIFICATION, seed])
            )
        self._multi_draft_sampler.step(trees, typical, entropy)
        return self._multi_draft_sampler


class _GreedyRounds:
    """The argmax of each row, of rows with a mask among the tokens it allows."""

    def __init__(self, choice: Any, logits: torch.Tensor, row_start: Any, masks: Masks) -> None:
        self._choice, self._logits, self._row_start, self._masks = choice, logits, row_start, masks

    def draw(
        self, requests: Sequence[int], rows: Sequence[int], emitted: Sequence[Sequence[int]]
    ) -> list[int]:
        """See `vllm_ext.samplers.tree_walk.Draw`."""
        index = self._row_start[list(requests)] + np.array(rows)
        tokens: list[int] = self._choice[index].tolist()
        masked = [place for place, request in enumerate(requests) if self._masks.has(request)]
        if masked:
            logits = self._logits[torch.from_numpy(index[masked]).to(self._logits.device)].to(torch.float32)
            self._masks.apply(logits, [requests[i] for i in masked], [emitted[i] for i in masked])
            for place, token in zip(masked, logits.argmax(-1).tolist(), strict=True):
                tokens[place] = token
        return tokens


class _Rounds:
    """One walk's draws: round r samples the r-th token of every request that got that far."""

    def __init__(
        self,
        runner: Any,
        sampler: Any,
        logits: torch.Tensor,
        row_start: Any,
        metadata: Any,
        masks: Masks | None,
        states: RowStates,
    ) -> None:
        self._runner = runner
        self._masks = masks
        self._sampler = sampler
        self._logits = logits
        self._row_start = row_start
        # All tokens in it are behind the row that is sampled: there are no drafts between them.
        self._metadata = replace(metadata, spec_token_ids=None)
        self._states = states
        self._parts: list[tuple[list[int], LogprobsTensors]] = []

    def draw(
        self, requests: Sequence[int], rows: Sequence[int], emitted: Sequence[Sequence[int]]
    ) -> list[int]:
        """See `vllm_ext.samplers.tree_walk.Draw`."""
        index = torch.from_numpy(self._row_start[list(requests)] + np.array(rows))
        first = not emitted[0]
        metadata = self._metadata if first else self._advanced(requests, emitted)
        if isinstance(self._sampler, MultiDraftSampler):
            self._sampler.at(requests, rows)
        logits = self._logits[index.to(self._logits.device)]
        if self._masks is not None:
            self._masks.apply(logits, requests, emitted)
        if self._runner.aux_logits is not None:
            self._runner.aux_logits.call(index.to(self._logits.device))
        noise = self._runner.noise(requests)
        output = self._sampler(logits=logits, sampling_metadata=metadata)
        if output.logprobs_tensors is not None:
            self._parts.append((list(requests), output.logprobs_tensors))
        tokens: list[int] = output.sampled_token_ids[:, 0].tolist()
        if self._runner.may_defer:
            for place, deferral in deferrals(metadata.logitsprocs).items():
                if self._runner.defer(requests[place], deferral):
                    tokens[place] = DEFERRED
                    if requests[place] in noise:
                        self._runner.input_batch.generators[requests[place]].set_state(noise[requests[place]])
        return tokens

    def logprobs(self, width: int) -> LogprobsTensors | None:
        """``[num_requests * width, ...]`` rows in the order of the padded output, or None."""
        if not self._parts:
            return None
        first = self._parts[0][1]
        if width == 1:
            return first
        num_requests = len(self._parts[0][0])
        # A round's have as many columns as its requests ask for.
        columns = max(part[0].shape[1] for _, part in self._parts)
        padded = [part.new_zeros((num_requests * width, columns)) for part in first[:2]]
        padded.append(first[2].new_zeros(num_requests * width))
        for place, (requests, (token_ids, values, ranks, *_)) in enumerate(self._parts[:width]):
            rows = torch.tensor(requests, device=first[0].device) * width + place
            padded[0][rows, : token_ids.shape[1]] = token_ids
            padded[1][rows, : values.shape[1]] = values
            padded[2][rows] = ranks
        return LogprobsTensors(*padded)

    def _advanced(self, requests: Sequence[int], emitted: Sequence[Sequence[int]]) -> Any:
        """The sampling metadata of some requests, each as if its tokens so far had been output."""
        whole = self._metadata
        index = torch.tensor(requests, device=self._logits.device)

        def pick(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[index]

        def renumber(values: dict[int, Any]) -> dict[int, Any]:
            return {new: values[old] for new, old in enumerate(requests) if old in values}

        outputs = self._states.grow(requests, emitted)
        if has_thinking_budget(whole):
            self._states.budgets(whole.thinking_budget_state_holder, requests)
        return replace(
            whole,
            temperature=pick(whole.temperature),
            top_p=pick(whole.top_p),
            top_k=pick(whole.top_k),
            generators=renumber(whole.generators),
            prompt_token_ids=pick(whole.prompt_token_ids),
            frequency_penalties=pick(whole.frequency_penalties),
            presence_penalties=pick(whole.presence_penalties),
            repetition_penalties=pick(whole.repetition_penalties),
            output_token_ids=outputs if whole.output_token_ids else [],
            allowed_token_ids_mask=pick(whole.allowed_token_ids_mask),
            bad_words_token_ids=renumber(whole.bad_words_token_ids),
            logitsprocs=self._states.processors(whole.logitsprocs, requests, outputs),
            logprob_token_ids=None,  # theirs have had their only token
        )


def _is_plain_greedy(metadata: Any) -> bool:
    """Whether every request's next token is the argmax of its raw logits."""
    return bool(
        metadata.all_greedy
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not has_thinking_budget(metadata)
        and all(map(is_idle, metadata.logitsprocs.non_argmax_invariant))
    )
