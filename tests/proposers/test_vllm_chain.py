# SPDX-License-Identifier: Apache-2.0
"""Chains that vLLM's proposers say, in a hybrid: when they are asked for, how long, and what they are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scripted import Scripted, request, tree, verified

from vllm_ext.proposers.hybrid import Hybrid
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.proposers.vllm_chain import ALL, NONE, SOME, VllmChain, VllmChainOptions


def chain_of(method: str = "draft_model", most: int = 4) -> VllmChain:
    made = VllmChain(VllmChainOptions(speculative_config={"method": method, "model": "m"}))
    made.most, made.varies = most, True
    return made


class Asked:
    """vLLM's proposer, which always says the same."""

    def __init__(self, tokens: list[int], *names: str) -> None:
        self.tokens, self.names, self.lengths = tokens, names or ("r",), list[int]()

    def __call__(self, length: int) -> dict[str, list[int]]:
        self.lengths.append(length)
        return dict.fromkeys(self.names, self.tokens[:length])


def drafted(chain: VllmChain, others: DraftTree, *requests: Any) -> list[DraftTree]:
    return Hybrid([Scripted(others), chain]).propose(requests or (request(),))


def test_the_chain_is_a_path_of_the_tree() -> None:
    chain, ask = chain_of(), Asked([5, 6, 7, 8])
    chain.ask = ask
    (fused,) = drafted(chain, tree([5, 9], [-1, -1], [0.5, 0.1]))
    assert ask.lengths == [4]
    assert len(fused.path([5, 6, 7, 8])) == 4
    assert len(fused.path([9])) == 1


def test_it_is_not_asked_where_the_others_are_sure() -> None:
    """Nor where none has room; and one that keeps nothing is asked whatever the others say."""
    sure = tree([5], [-1], [1.0])
    chain, ask = chain_of("medusa"), Asked([5, 6, 7, 8])
    chain.ask, chain.least_first, chain.reads = ask, 0.05, False
    hybrid = Hybrid([Scripted(sure), chain])
    for _ in range(40):  # what they promise is believed once it was right
        hybrid.propose([request()])
        hybrid.observe(verified([5, 1]))
    ask.lengths.clear()
    hybrid.propose([request()])
    assert ask.lengths == []
    hybrid.propose([request(budget=0)])
    assert ask.lengths == []
    free, ask = chain_of("ngram"), Asked([5, 6])
    free.ask = ask
    drafted(free, sure)
    assert ask.lengths == [4]


def test_it_is_asked_for_as_many_tokens_as_pay() -> None:
    none = DraftTree.empty()
    chain, ask = chain_of(), Asked([5, 6, 7, 8])
    chain.ask, chain.reads = ask, False
    chain.least_each = 0.2  # 0.6 of it all is expected of the first token, and half of that of each after it
    drafted(chain, none)
    assert ask.lengths == [2]
    chain.least_first = 0.9
    drafted(chain, none)
    assert ask.lengths == [2]
    # Several requests share the pass.
    ask.names = ("r", "s")
    trees = drafted(chain, none, request(), request(name="s"))
    assert ask.lengths[1:] == [3]
    assert [len(each) for each in trees] == [3, 3]
    chain.varies = False
    chain.least_first = chain.least_each = 0.0
    drafted(chain, none)
    assert ask.lengths[2:] == [4]


def test_one_that_reads_is_not_given_up_for_one_step() -> None:
    """But for many; and is tried again with a request that it knows."""
    chain, ask = chain_of(), Asked([5, 6, 7, 8])
    chain.ask = ask
    hybrid = Hybrid([Scripted(DraftTree.empty()), chain])

    def asked(steps: int, least: float) -> int:
        chain.least_first = least
        ask.lengths.clear()
        for _ in range(steps):
            hybrid.propose([request()])
        return len(ask.lengths)

    assert asked(20, 0.0) == 20
    assert asked(1, 3.0) == 1
    assert asked(19, 0.0) == 19
    assert asked(40, 3.0) < 20
    assert asked(40, 0.0) < 40
    assert asked(300, 0.0) > 200


def test_of_requests_that_it_has_not_read_it_says_nothing() -> None:
    chain, ask = chain_of(), Asked([5, 6, 7, 8], "r", "s")
    chain.ask = ask
    chain.blind.add("r")
    blind, seeing = drafted(chain, DraftTree.empty(), request(), request(name="s"))
    assert (len(blind), len(seeing)) == (0, 4)
    ask.lengths.clear()
    drafted(chain, DraftTree.empty(), request())
    assert ask.lengths == []
    chain.finish("r")
    assert not chain.blind


@pytest.mark.parametrize(
    ("emitted", "kind"), [([5, 6, 7, 9], ALL), ([5, 6, 9], SOME), ([9], NONE), ([5], ALL)]
)
def test_its_worth_depends_on_what_became_of_the_last(emitted: list[int], kind: int) -> None:
    """Also where the step has ended before the chain had."""
    chain = chain_of()
    chain.ask = Asked([5, 6, 7])
    chain.propose([request()])
    chain.observe(verified(emitted))
    assert chain._class["r"] == kind
    before = np.array(chain.chances("r", 3))
    assert (np.diff(before) < 0).all()
    for _ in range(30):
        chain.propose([request()])
        chain.observe(verified([5, 6, 7, 1]))
    assert chain.chances("r", 3)[0] > 0.9


def test_its_counts_can_be_kept() -> None:
    one, other = chain_of(), chain_of()
    one.ask = Asked([5, 6, 7])
    one.propose([request()])
    one.observe(verified([5, 6, 7, 1]))
    assert one.chances("x", 3) != other.chances("x", 3)
    other.load_state_dict(one.state_dict())
    assert one.chances("x", 3) == other.chances("x", 3)
    with pytest.raises(ValueError, match="hits is missing"):
        other.load_state_dict({})
