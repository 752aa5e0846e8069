# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-ext adadec learn`` reads in vLLM's V1 worker: of each token of given texts two numbers.

A text is a prompt, which is read in one pass. Where vLLM would look up the log-probabilities of its tokens, the whole
vocabulary is at hand for a few rows at a time: of each row the entropy and whether the text's own token is the
likeliest are kept, and nothing else leaves the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_ext.samplers.adadec import entropy_of

ASKED = "vllm_ext_adadec"  # of a request's ``extra_args``: its number, and its first token that counts
ROWS = 128  # of the vocabulary at a time: with 150,000 tokens 80 MB in float32


class EntropyReader:
    """A ``worker_extension_cls``: vLLM mixes it into the worker."""

    model_runner: Any  # the worker's

    def vllm_ext_adadec_read(self) -> dict[str, tuple[list[float], list[bool]]]:
        """Of the texts since the last call, by number: entropies and whether rank is 1, at each token that counts.

        The first call begins. Empty on ranks that have no logits.
        """
        reader: _Reader | None = getattr(self, "_vllm_ext_adadec_reader", None)
        if reader is None:
            reader = self._vllm_ext_adadec_reader = _Reader(self.model_runner)
        return reader.take()


class _Reader:
    """Stands before the runner's ``_get_prompt_logprobs_dict``."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._look_up = runner._get_prompt_logprobs_dict
        self._found: dict[str, tuple[Any, Any]] = {}
        runner._get_prompt_logprobs_dict = self

    def take(self) -> dict[str, tuple[list[float], list[bool]]]:
        """What was read, which is then forgotten."""
        found = {text: (entropy.tolist(), first.tolist()) for text, (entropy, first) in self._found.items()}
        self._found.clear()
        return found

    def __call__(self, hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]) -> Any:
        for request_id, num_tokens in num_scheduled_tokens.items():
            request = self._runner.requests[request_id]
            params = request.sampling_params
            asked = None if params is None else (params.extra_args or {}).get(ASKED)
            if asked is not None:
                self._read(request_id, request, num_tokens, hidden_states, *asked)
        return self._look_up(hidden_states, num_scheduled_tokens)

    def _read(
        self,
        request_id: str,
        request: Any,
        num_tokens: int,
        hidden_states: torch.Tensor,
        text: str,
        counts_from: int,
    ) -> None:
        """Of the rows of a request in this step: that at a place says what comes behind it."""
        runner, tokens = self._runner, request.prompt_token_ids
        start = request.num_computed_tokens
        row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]]) - start
        end = min(start + num_tokens, len(tokens) - 1)
        for at in range(max(start, counts_from - 1), end, ROWS):
            until = min(at + ROWS, end)
            logits = runner.model.compute_logits(hidden_states[row + at : row + until])
            if logits is None:  # another rank has them
                continue
            if text not in self._found:
                count = len(tokens) - counts_from
                self._found[text] = (np.full(count, np.nan, np.float32), np.zeros(count, np.bool_))
            entropy, first = self._found[text]
            own = torch.tensor(tokens[at + 1 : until + 1], device=logits.device)
            log_p = logits.float().log_softmax(1)
            place = slice(at + 1 - counts_from, until + 1 - counts_from)
            entropy[place] = entropy_of(log_p).cpu().numpy()
            first[place] = (log_p.argmax(1) == own).cpu().numpy()
