# SPDX-License-Identifier: Apache-2.0
"""Reflective verification: a chain of drafts, a short prompt to think again, and the chain once more, in one step.

What the target says of the second copy, which sees the first and the prompt, is mixed into what it says of the first:
``p_f = (1 - weight) * p + weight * p_again`` (`vllm_ext.samplers.reflective`). Drafts are verified with ``p_f``. Lossy.

The rows behind the first copy are scratch: no token of theirs is ever put out, so that their KV is given up as that of
rejected drafts is.

Source: "Reflective Verification", arXiv 2505.18629, whose abstract alone was read. Its prompt and weight are not
known to us: these are ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vllm_ext.proposers.tree import DraftTree, ReadAgain


class ReflectionRule(NamedTuple):
    """How a request's drafts are judged twice."""

    weight: float  # 0 to 1, of the second judgement
    prompt: tuple[int, ...]  # token ids between the copies


def most_drafts(num_nodes: int, rule: ReflectionRule) -> int:
    """How long a chain may be, of a step that verifies so many nodes."""
    return max((num_nodes - len(rule.prompt)) // 2, 0)


def read_again(tree: DraftTree, rule: ReflectionRule | None) -> DraftTree:
    """A chain with the prompt and its second copy behind it; without a rule, or drafts, as it is.

    Such chains are chosen, not drawn.
    """
    if rule is None or not len(tree):
        return tree
    scratch = len(rule.prompt) + len(tree)
    tokens = np.concatenate([tree.tokens, np.array(rule.prompt, np.int32), tree.tokens])
    whole = DraftTree.chain(tokens, np.append(tree.probabilities, np.zeros(scratch, np.float32)))
    return replace(whole, again=ReadAgain(len(tree), rule.weight))
