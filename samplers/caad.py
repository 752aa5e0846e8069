# SPDX-License-Identifier: Apache-2.0
"""Rule caad: logits drawn towards what came next in true answers, where the context is like theirs.

A store has, for each token of a few annotated answers, the hidden state before it and the model's likeliest next tokens
there. A row's hidden state finds its nearest ones by cosine; with ``w`` the softmax of the similarities and ``g`` their
log-probabilities, ``p`` is the softmax of ``z + strength * similarity * sum w g``, where ``similarity`` is the nearest
one's. Where none is near enough the row stays as it is.

Source: "CAAD: Context-Aware Adaptive Decoding for Truthful Text Generation", arXiv 2508.02184, sections 3.1 and 3.2. Of
each next-token distribution the likeliest tokens are kept, and ``g`` is how far each is above the last of them, nothing
for all others: so nothing depends on where logits begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pydantic import Field

from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.samplers import artifact_file
from vllm_ext.samplers.base import Row, RuleParams
from vllm_ext.samplers.steering import SteeringOptions, SteeringRule


class CaadOptions(SteeringOptions):
    file: UserPath = Field(min_length=1, description="the store, as `vllm-ext caad build` makes it")
    strength: float = Field(default=0.5, ge=0.0, le=100.0, description="of what is found")
    neighbours: int = Field(default=8, ge=1, le=1024, description="how many of the nearest contexts count")
    threshold: float = Field(default=0.7, ge=-1.0, le=1.0, description="least cosine of the nearest one")
    temperature: float = Field(default=0.1, gt=0.0, le=100.0, description="of the softmax over similarities")


class CaadParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    caad: bool = Field(default=True, description="whether the request is under the rule")
    caad_strength: float | None = Field(default=None, ge=0.0, le=100.0)
    caad_threshold: float | None = Field(default=None, ge=-1.0, le=1.0)


class CaadRule(SteeringRule):
    """A look into a store of contexts."""

    name = "caad"
    summary = "draws logits towards what came next in similar true answers"
    paper = "arXiv 2508.02184"
    reads_tokens = False
    Options = CaadOptions
    Params = CaadParams

    def __init__(self, options: CaadOptions) -> None:
        super().__init__(options)
        self._store, _ = artifact_file.read("file", options.file, self.name)

    @classmethod
    def check(cls, options: CaadOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See `Rule.check`."""
        artifact_file.read("file", options.file, cls.name)

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        if self._store["contexts"].device != logits.device:
            self._store = {name: array.to(logits.device) for name, array in self._store.items()}
        contexts, ids, gains = (self._store[name] for name in ("contexts", "ids", "gains"))
        found = nearest(contexts, self.aux_logits.hidden(), self.options.neighbours)
        weights = (found.values / self.options.temperature).softmax(1)
        close = found.values[:, :1]
        strength = self.values(rows, "strength", logits) * close.clamp_min(0.0)
        strength = torch.where(close >= self.values(rows, "threshold", logits), strength, 0.0)
        weighted = gains[found.indices] * (weights * strength)[:, :, None]
        logits.scatter_add_(1, ids[found.indices].flatten(1).long(), weighted.flatten(1))


def nearest(contexts: torch.Tensor, hidden: torch.Tensor, most: int) -> torch.return_types.topk:
    """Cosines and places of the most similar contexts, ``[num_rows, min(most, num_contexts)]``.

    Args:
        contexts: float32 ``[num_contexts, hidden_size]`` of length 1.
        hidden: ``[num_rows, hidden_size]``.
        most: how many.
    """
    unit = torch.nn.functional.normalize(hidden.float(), dim=1)
    return (unit @ contexts.T).topk(min(most, len(contexts)), 1)
