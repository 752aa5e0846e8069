# SPDX-License-Identifier: Apache-2.0
"""Fusion of several drafters' trees: the union as a trie, and what each drafter turns out to be worth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scripted import Scripted, paths, request, tree, trees, verified

from vllm_ext.kernels.fuse_trees import fuse_trees
from vllm_ext.kernels.fuse_trees_ref import fuse_trees_ref
from vllm_ext.proposers.calibration import NUM_DEPTHS
from vllm_ext.proposers.hybrid import BOUNDS, Hybrid, HybridOptions
from vllm_ext.proposers.tree import DraftTree

NGRAM = {"method": "vllm", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(-1, 40), st.integers(0, 99))
@settings(deadline=None)
def test_fusion_equals_the_reference(parts: list[DraftTree], budget: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (2 ** len(parts) - 1, 3, 2)
    estimates = rng.choice(np.array([0, 0.25, 0.5, 0.75, 1.0], np.float32), shape)
    bounds = np.array([0.3, 0.7], np.float32)
    fused = fuse_trees(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.parents for part in parts]),
        np.concatenate([part.probabilities for part in parts]),
        np.cumsum([0, *map(len, parts)], dtype=np.int32),
        estimates,
        bounds,
        budget,
    )
    expected = fuse_trees_ref(
        [(p.tokens.tolist(), p.parents.tolist(), p.probabilities.tolist()) for p in parts],
        estimates,
        bounds.tolist(),
        budget,
    )
    assert list(zip(*(part.tolist() for part in fused), strict=True)) == expected
    DraftTree(*fused[:3]).validate()
    if budget >= sum(map(len, parts)):  # the union, no more and no less
        assert set(paths(DraftTree(*fused[:3]))) == set().union(*(paths(part) for part in parts))


def test_fusion_with_nothing_keeps_the_paths() -> None:
    chain = tree([5, 6, 7], [-1, 0, 1], [0.9, 0.8, 0.2])
    for parts in ([chain, DraftTree.empty()], [DraftTree.empty(), chain]):
        fused = Hybrid([Scripted(part) for part in parts]).propose([request()])[0]
        assert set(paths(fused)) == set(paths(chain))
    assert len(Hybrid([Scripted(DraftTree.empty())]).propose([request()])[0]) == 0


def test_agreement_counts_and_common_prefixes_are_shared() -> None:
    hybrid = Hybrid(
        [Scripted(tree([5, 6], [-1, 0], [0.5, 0.4])), Scripted(tree([7, 5, 8], [-1, -1, 1], [0.5, 0.5, 0.4]))]
    )
    chances = paths(hybrid.propose([request()])[0])
    assert set(chances) == {(5,), (7,), (5, 6), (5, 8)}
    assert chances[5,] > chances[7,]
    assert [len(part) for part in hybrid.propose([request(2), request(0)])] == [2, 0]


def test_the_estimates_learn_who_is_right() -> None:
    """Two drafters promise 0.85; one is right 70 % of the time, the other 10 %, both at once never."""
    hybrid = Hybrid([Scripted(tree([5], [-1], [0.85])), Scripted(tree([6], [-1], [0.85]))])
    rng = np.random.default_rng(0)
    for _ in range(2000):
        hybrid.propose([request()])
        hybrid.observe(verified([int(rng.choice([5, 6, 7], p=[0.7, 0.1, 0.2]))]))
    chances = paths(hybrid.propose([request()])[0])
    # A fading mean has the variance p (1 - p) (1 - fade) / (1 + fade): 4 sigma are 0.1 at most.
    assert chances[5,] == pytest.approx(0.7, abs=0.1)
    assert chances[6,] == pytest.approx(0.1, abs=0.06)


def test_a_tree_is_judged_once_and_forgotten_with_its_request() -> None:
    part = Scripted(tree([5], [-1], [0.5]))
    hybrid = Hybrid([part])
    hybrid.propose([request()])
    hybrid.observe(verified([]))  # an unfinished prompt says nothing
    before = hybrid.calibration.trials.sum()
    hybrid.observe(verified([5]))
    after = hybrid.calibration.trials.sum()
    assert after > before
    hybrid.observe(verified([5]))
    assert hybrid.calibration.trials.sum() == after
    hybrid.propose([request()])
    hybrid.finish("r")
    hybrid.finish("never seen")
    hybrid.observe(verified([5]))
    assert hybrid.calibration.trials.sum() == after
    assert part.finished == ["r", "never seen"]


def test_each_drafter_sees_as_many_logits_as_it_asked_for() -> None:
    parts = [Scripted(DraftTree.empty(), 2), Scripted(DraftTree.empty(), 5), Scripted(DraftTree.empty())]
    hybrid = Hybrid(parts)
    assert hybrid.verified_top_k == 5
    hybrid.observe(verified([3], width=5))
    assert [part.rows[0].top_ids.tolist() for part in parts] == [[[0, 1]], [[0, 1, 2, 3, 4]], [[]]]
    assert [part.rows[0].top_logits.shape for part in parts] == [(1, 2), (1, 5), (1, 0)]


def test_there_is_a_group_for_every_set_of_drafters_in_a_byte() -> None:
    most = HybridOptions.model_json_schema()["properties"]["drafters"]["maxItems"]
    assert ((1 << most) - 1) * (len(BOUNDS) + 1) <= 256
    assert Hybrid([Scripted(DraftTree.empty())] * most).calibration.estimates.shape[2] == NUM_DEPTHS


def test_warm_up_changes_nothing() -> None:
    hybrid = Hybrid([Scripted(DraftTree.empty())])
    before = hybrid.calibration.hits.copy(), hybrid.calibration.trials.copy()
    hybrid.warm_up()
    assert (hybrid.calibration.hits == before[0]).all()
    assert (hybrid.calibration.trials == before[1]).all()


def test_options_make_the_drafters() -> None:
    options = HybridOptions.model_validate(
        {"drafters": ["stand", {"method": "token_recycling", "matrix_width": 3}]}
    )
    hybrid = Hybrid.from_options(options, 100)
    assert [type(drafter).__name__ for drafter in hybrid.drafters] == ["Stand", "TokenRecycling"]
    assert hybrid.drafters[1].verified_top_k == 3
    assert hybrid.memory_bytes > sum(drafter.memory_bytes for drafter in hybrid.drafters)


@pytest.mark.parametrize(
    ("drafters", "says"),
    [
        (["token_recyclin"], r"unknown method 'token_recyclin'.*Did you mean 'token_recycling'"),
        (["hybrid"], r"'hybrid' cannot be one of its own"),
        (
            [{"method": "rsd_s", "model": "m"}],
            r"'rsd_s' cannot be fused with others; 'dyspec' drafts with the same model",
        ),
        (["unified_skip"], r"'unified_skip' cannot be fused with others; leave it out"),
        ([{"method": "layerskip", "width": 2}], r"layerskip\.width needs layerskip alone"),
        (
            [{"method": "dyspec", "model": "m", "export_dir": "d"}],
            r"dyspec\.export_dir needs dyspec alone",
        ),
        (
            [{"method": "dyspec", "model": "m", "online": {"dir": "d"}}],
            r"dyspec\.online needs dyspec alone",
        ),
        (
            [{"method": "dyspec", "model": "m"}, {"method": "eagle_tree", "model": "m"}],
            "dyspec and eagle_tree both draft with passes",
        ),
        (
            [NGRAM, {"method": "vllm", "speculative_config": {"method": "ngram"}}],
            "'vllm: ngram' is there more than once",
        ),
        (
            [
                {"method": "dyspec", "model": "m"},
                {"method": "vllm", "speculative_config": {"method": "eagle3", "model": "m"}},
            ],
            "dyspec and vllm: eagle3 both draft with passes",
        ),
        (["vllm"], r"vllm\.speculative_config=.*Field required"),
        (
            [{"method": "vllm", "speculative_config": {"method": "ngram_gpu"}}],
            "method='ngram_gpu' is not allowed; allowed: ngram, suffix, draft_model",
        ),
        (
            [{"method": "vllm", "speculative_config": {"method": "draft_model", "parallel-drafting": True}}],
            "parallel_drafting=True is not allowed: drafts of one pass",
        ),
        ([{"matrix_width": 3}], r"unknown method None"),
        (
            [{"method": "token_recycling", "matrix_width": 0}],
            r"token_recycling\.matrix_width=0: .*options are",
        ),
        ([{"method": "token_recycling", "budget": "fixed"}], r"budget is an option of the whole"),
        (["stand", {"method": "stand", "max_order": 2}], r"'stand' is there more than once"),
        ([], r"at least 1"),
        (["token_recycling"] * 5, r"at most 4"),
    ],
)
def test_what_it_refuses(drafters: list[Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        HybridOptions.model_validate({"drafters": drafters})


def test_warm_up_and_a_step_write_nothing_out_of_bounds(tmp_path: Path) -> None:
    """Compiled loops check no bounds: here they do."""
    program = """
import numpy as np
from vllm_ext.proposers.base import practise
from vllm_ext.proposers.hybrid import Hybrid, HybridOptions
for drafters in (["token_recycling", "suffix_tree"], ["suffix_tree", "stand", "aded", "input_copy"]):
    hybrid = Hybrid.from_options(HybridOptions(drafters=drafters), 50)
    hybrid.warm_up()
    practise(hybrid, np.array([1, 2, 3, 1, 2, 3, 1, 2], np.int32))
"""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
