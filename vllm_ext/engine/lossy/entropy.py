# SPDX-License-Identifier: Apache-2.0
"""Entropy-adaptive decoding in the V1 runner: of the drafts that are sure, those that a request's parameters let be.

A sure token comes from the draft model's distribution, which knows the request's temperature, top-k, top-p and min-p,
and nothing else of it. So it is taken only where penalties, masks, biases, rules and grammars have not lowered the
target's logit of it; where they have, the target answers, as if the token were not sure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_ext.config.request_options import LEAST_TEMPERATURE
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.tree import Float32, Int32

ROUNDING = 1e-3  # of a logit that was divided by a temperature, and is multiplied by it


class EntropyStep:
    """Of one step.

    Args:
        trees: the step's; ``sure`` says of which requests what is taken.
        tokens: int32 ``[num_rows]``, the drafts that may be accepted.
        logits: ``[num_rows, vocab]``, the target's; they stay as they are.
        temperature: float32 ``[num_requests]``.
    """

    def __init__(self, trees: StepTrees, tokens: Int32, logits: torch.Tensor, temperature: Float32) -> None:
        self.num_kept = 0  # so far
        self._trees, self._tokens, self._logits = trees, tokens, logits
        self._temperature = temperature

    def choose(
        self, visited: Sequence[tuple[int, int]], logits: torch.Tensor, *, greedy: bool
    ) -> dict[int, int]:
        """The tokens that are taken without asking the target.

        Args:
            visited: request and row of each row of logits.
            logits: ``[num_visited, vocab]``, with all that the sampler does to them before top-k and top-p.
            greedy: the requests to answer for are those that are, whose logits are not divided by a temperature; or
                the others.

        Returns:
            By row of logits.
        """
        places, rows, tokens, scale = [], [], [], []
        for place, (request, row) in enumerate(visited):
            sure, temperature = self._trees.sure.get(request), float(self._temperature[request])
            if (
                sure is None
                or row >= len(sure)
                or not sure[row]
                or greedy != (temperature < LEAST_TEMPERATURE)
            ):
                continue
            here = int(self._trees.row_start[request]) + row
            if 0 <= (token := int(self._tokens[here + 1])) < logits.shape[1]:
                places.append(place)
                rows.append(here)
                tokens.append(token)
                scale.append(1.0 if greedy else temperature)
        if not places:
            return {}
        index = torch.from_numpy(np.array([places, rows, tokens], np.int64)).to(logits.device)
        pair = torch.stack([logits[index[0], index[2]].float(), self._logits[index[1], index[2]].float()])
        now, before = pair.cpu().numpy()
        let_be = np.isfinite(now) & (now * np.array(scale) >= before - ROUNDING)
        kept = {
            place: token for place, token, let in zip(places, tokens, let_be.tolist(), strict=True) if let
        }
        self.num_kept += len(kept)
        return kept
