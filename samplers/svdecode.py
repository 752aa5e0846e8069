# SPDX-License-Identifier: Apache-2.0
"""Rule svdecode: logits moved along a task's direction, which was taken from a tuned model and the one before.

``delta``, a vector over the vocabulary, says which tokens tuning has made likelier over a task's texts; ``p`` is the
softmax of ``z + mu delta``, where ``delta`` counts for plausible tokens only. A file holds it and the strength that is
best on those texts to first order; ``vllm-ext svdecode build`` makes it.

Source: "Distribution-Aligned Decoding" (SVDecode), arXiv 2509.15888. The tuned model is served. For each position of
the task's texts, ``p`` its distribution and ``q`` the original's, the gradient of ``KL(p || q)`` by ``p`` is
``log(p / q) + 1``; the softmax's Jacobian ``diag(p) - p p^T`` takes it to logits, and ``delta`` is the mean. The best
strength is one Newton step of the texts' log-likelihood from ``mu = 0``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pydantic import Field

from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.samplers import artifact_file
from vllm_ext.samplers.base import Row, RuleParams, Vocabulary
from vllm_ext.samplers.plausible import plausible_mask
from vllm_ext.samplers.steering import SteeringOptions, SteeringRule


class SvdecodeOptions(SteeringOptions):
    file: UserPath = Field(min_length=1, description="the direction, as `vllm-ext svdecode build` makes it")
    strength: float = Field(
        default=1.0,
        ge=-100.0,
        le=100.0,
        description="of the direction, beside the best one that its file has",
    )
    alpha: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description="plausible tokens have this part of the likeliest one's probability",
    )


class SvdecodeParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    svdecode: bool = Field(default=True, description="whether the request is under the rule")
    svdecode_strength: float | None = Field(default=None, ge=-100.0, le=100.0)
    svdecode_alpha: float | None = Field(default=None, gt=0.0, le=1.0)


class SvdecodeRule(SteeringRule):
    """A constant direction."""

    name = "svdecode"
    summary = "moves logits along a direction learnt from tuning"
    paper = "arXiv 2509.15888"
    reads_tokens = False
    Options = SvdecodeOptions
    Params = SvdecodeParams

    def __init__(self, options: SvdecodeOptions) -> None:
        super().__init__(options)
        arrays, _ = artifact_file.read("file", options.file, self.name)
        self._step = arrays["delta"].float() * float(arrays["mu"])

    @classmethod
    def check(cls, options: SvdecodeOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See `Rule.check`."""
        arrays, _ = artifact_file.read("file", options.file, cls.name)
        if len(arrays["delta"]) > vocab_size:
            raise ValueError(
                f"file={options.file!r} has {len(arrays['delta'])} tokens, the model {vocab_size}; make it again with "
                "`vllm-ext svdecode build`"
            )

    @classmethod
    def from_options(cls, options: SvdecodeOptions, vocabulary: Vocabulary) -> SvdecodeRule:
        """See the base class; reads the file."""
        return cls(options)

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        kept = plausible_mask(logits, self.values(rows, "alpha", logits))[:, : len(self._step)]
        self._step = self._step.to(logits.device)
        step = self._step * self.values(rows, "strength", logits)
        logits[:, : len(self._step)] += torch.where(kept, step, 0.0)


def direction(tuned: torch.Tensor, original: torch.Tensor, alpha: float) -> torch.Tensor:
    """What tuning has done at some positions, in logits: float64 ``[num_rows, vocab]``, each row adding up to 0.

    Args:
        tuned: ``[num_rows, vocab]`` logits.
        original: the same of the model before.
        alpha: tokens that are not plausible by this have no part.
    """
    log_p, log_q = tuned.double().log_softmax(1), original.double().log_softmax(1)
    gradient = log_p - log_q + 1.0
    gradient = torch.where(plausible_mask(log_p, torch.full_like(log_p[:, :1], alpha)), gradient, 0.0)
    p = log_p.exp()
    return p * (gradient - (p * gradient).sum(1, keepdim=True))


def best_strength(tuned: torch.Tensor, delta: torch.Tensor, tokens: torch.Tensor) -> float:
    """One Newton step from 0 of ``sum log softmax(tuned + mu delta)[token]``.

    Args:
        tuned: ``[num_rows, vocab]`` logits.
        delta: ``[vocab]``.
        tokens: int64 ``[num_rows]`` what came next.
    """
    p = tuned.double().softmax(1)
    mean = p @ delta.double()
    slope = (delta.double()[tokens] - mean).sum()
    curvature = (p @ delta.double().square() - mean.square()).sum()
    return float(slope / curvature) if float(curvature) > 0.0 else 0.0
