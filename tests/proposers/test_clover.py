# SPDX-License-Identifier: Apache-2.0
"""Method `clover_tree` against a small draft: it grows trees as `eagle_tree` does, alone and in a hybrid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from toy_draft import Draft, request

from vllm_ext.proposers.clover import Clover, CloverOptions
from vllm_ext.proposers.hybrid import HybridOptions, draft_of


def test_trees_of_a_mixed_batch() -> None:
    proposer = Clover(CloverOptions(model="m", max_depth=4))
    draft = proposer.draft = Draft()
    requests = [
        request("greedy"),
        request("drawn", 1.0),
        request("seeded", 1.0, seed=3),
        request("chain", chain=True),
    ]
    trees = proposer.propose(requests)
    assert [tree.drawn is not None for tree in trees] == [False, True, False, False]
    assert trees[0].tokens.tolist() == trees[2].tokens.tolist()
    assert trees[3].is_chain
    assert [len(tree) > 0 for tree in trees] == [True] * 4
    assert proposer.passes == draft.passes == 3  # as deep as they are, less the roots'
    # A node's children are those that the draft says behind its own token.
    tree = trees[0]
    for node, parent in enumerate(tree.parents.tolist()):
        row = draft.model.rows[0 if parent < 0 else int(tree.tokens[parent])]
        assert int(tree.tokens[node]) in np.argsort(-row)[:8]


def test_in_a_hybrid() -> None:
    head: dict[str, Any] = {"method": "clover_tree", "model": "m", "max_depth": 4}
    options = HybridOptions(drafters=["suffix_tree", head], num_speculative_tokens=8)
    assert draft_of(options) == CloverOptions(model="m", max_depth=4)


def test_options() -> None:
    with pytest.raises(ValidationError, match="model"):
        CloverOptions.model_validate({})
    drafters: list[dict[str, Any] | str] = [
        {"method": "clover_tree", "model": "m"},
        {"method": "eagle_tree", "model": "h"},
    ]
    with pytest.raises(ValidationError, match="clover_tree and eagle_tree both draft with passes of a model"):
        HybridOptions(drafters=drafters)
