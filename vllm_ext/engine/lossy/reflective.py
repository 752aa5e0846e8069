# SPDX-License-Identifier: Apache-2.0
"""Reflective verification in the V1 runner: whose drafts are read twice, and what the target says of them mixed."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.config import request_options, speculative
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.reflection import ReflectionRule, most_drafts
from vllm_ext.samplers.reflective import mixed


def prompt_of(model_config: Any, options: MethodOptions) -> tuple[int, ...]:
    """Token ids of the text between the copies."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    return tuple(tokenizer.encode(options.verify_prompt, add_special_tokens=False))


def check(model_config: Any, options: MethodOptions) -> None:
    """Refuse a server whose steps are too small for two copies.

    Raises:
        ValueError: naming what would do.
    """
    if options.verify != speculative.REFLECTIVE:
        return
    rule = ReflectionRule(options.verify_weight, prompt_of(model_config, options))
    if not most_drafts(options.num_speculative_tokens, rule):
        raise ValueError(
            f"num_speculative_tokens={options.num_speculative_tokens} is too small for verify='reflective': "
            f"verify_prompt has {len(rule.prompt)} tokens, and two copies of k drafts are 2 k more. Allowed: at least "
            f"{len(rule.prompt) + 2}. Raise it, or shorten verify_prompt."
        )


def rule(model_config: Any, options: MethodOptions, params: Any) -> ReflectionRule | None:
    """By which a request's drafts are read twice; None: once."""
    weight = request_options.reflection_weight(options, params)
    return None if weight is None else ReflectionRule(weight, prompt_of(model_config, options))


def mix(trees: StepTrees, logits: torch.Tensor) -> None:
    """Write the mixture over the target's logits of each first copy.

    Args:
        trees: the step's. Row j of a request says what follows its first j drafts, and as many rows before the end of
            the second copy as of the first say it again.
        logits: ``[num_rows, vocab]``; those of rows before a draft are written to.
    """
    for request, (num_drafts, weight) in trees.again.items():
        rows = trees.rows(request)
        first = slice(rows.start, rows.start + num_drafts)
        again = slice(rows.stop - 1 - num_drafts, rows.stop - 1)
        logits[first] = mixed(logits[first], logits[again], weight).to(logits.dtype)
