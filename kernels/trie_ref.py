# SPDX-License-Identifier: Apache-2.0
"""The readable form of `trie.py`: a dictionary a prefix."""

from collections.abc import Iterable, Sequence


class Node(dict[int, "Node"]):
    """What may come next, and whether a sequence ends here."""

    final = False


def build(sequences: Iterable[Sequence[int]]) -> Node:
    """The trie of some sequences."""
    root = Node()
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, Node())
        node.final = True
    return root


def allowed(root: Node, prefix: Sequence[int], end: int) -> set[int]:
    """What may come behind a prefix; nothing where the prefix itself may not."""
    node = root
    for token in prefix:
        if token not in node:
            return set()
        node = node[token]
    return set(node) | ({end} if node.final else set())
