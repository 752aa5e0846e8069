# SPDX-License-Identifier: Apache-2.0
"""Draft trees under a grammar: which nodes it allows, and what it leaves no choice about.

A draft that the grammar forbids is never accepted, so that its row is work for nothing. What is left of a tree is
verified by the walk as ever, with the mask of each row it visits: output is what it is without drafts.

Source: XGrammar, arXiv 2411.15100 (rollback; jump-forward strings, which here are drafts that the target
verifies and not text that is taken for granted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext.proposers.tree import DraftTree

BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


class Matcher(Protocol):
    """A grammar behind some tokens."""

    def accept(self, token: int) -> bool:
        """Take one token more; False, and nothing changes, where the grammar forbids it."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ones."""


def legal_nodes(matcher: Matcher, tree: DraftTree, vocab_size: int | None = None) -> npt.NDArray[np.bool_]:
    """bool ``[num_nodes]``: nodes whose whole path the grammar allows. Leaves the matcher as it was.

    Args:
        matcher: at the tree's root.
        tree: any.
        vocab_size: ids from there on are prompt tokens (`ppd`): no text, and allowed where the node above is.
    """
    legal = np.zeros(len(tree), dtype=np.bool_)
    tokens = tree.tokens.tolist()
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]  # the root's last, which index -1 reads
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent].append(node)

    def visit(parent: int) -> None:
        for node in children[parent]:
            if vocab_size is not None and tokens[node] >= vocab_size:
                legal[node] = True
                visit(node)
            elif matcher.accept(tokens[node]):
                legal[node] = True
                visit(node)
                matcher.rollback(1)

    visit(-1)
    return legal


def under_grammar(
    matcher: Matcher,
    tree: DraftTree,
    forced: Sequence[int],
    num_nodes: int,
    max_depth: int,
    vocab_size: int | None = None,
) -> DraftTree:
    """The tree without what the grammar forbids, and with what it demands.

    Args:
        matcher: at the tree's root; left as it was.
        tree: any.
        forced: the tokens of text that the grammar demands next. Other tokens may spell it too, so that they are drafts
            like others; as far as the grammar allows them, of probability 1.
        num_nodes: most nodes.
        max_depth: deepest node of the forced ones.
        vocab_size: see `legal_nodes`.
    """
    legal = tree.where(legal_nodes(matcher, tree, vocab_size))
    certain = np.array(forced[:max_depth], dtype=np.int32)
    if not len(certain):
        return legal.prefix(num_nodes)
    chain = DraftTree.chain(certain, np.ones(len(certain), dtype=np.float32))
    # Of equal probability the shallower stand first: a drafter that is certain must not push out what is forced.
    drafts = DraftTree(legal.tokens, legal.parents, np.minimum(legal.probabilities, BELOW_ONE))
    return DraftTree.merge([chain.where(legal_nodes(matcher, chain)), drafts], num_nodes)
