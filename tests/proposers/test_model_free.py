# SPDX-License-Identifier: Apache-2.0
"""What methods without a model have in common: all of them the contract, `stand`, `aded` and `input_copy` more."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.proposers import registry
from vllm_ext.proposers.base import Proposer, Request, Sampling, VerifiedRows
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.hybrid import HybridOptions, make_options
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.samplers.tree_walk import walk

METHODS = ("stand", "aded", "input_copy")
DRAFTERS: dict[str, dict[str, Any]] = {
    "stand": {"method": "stand", "memory_mb": 1},
    "aded": {"method": "aded", "memory_mb": 1, "exploration": 0.2},
    "input_copy": {"method": "input_copy"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    **DRAFTERS,
    "hybrid": {"method": "hybrid", "drafters": list(DRAFTERS.values())},
}
# The interface's contract is for every method that needs neither a model nor files.
OTHERS = [
    name
    for name in registry.METHODS
    if name not in OPTIONS
    and not any(field.is_required() for field in registry.load_method(name).Options.model_fields.values())
    and not issubclass(registry.load_method(name), DraftModelProposer)
]
ALL = [*OPTIONS, *OTHERS]
SMALL: dict[str, Any] = {"memory_mb": 1, "matrix_width": 3}
VOCAB = 6


def make(name: str, vocab: int = VOCAB) -> Proposer:
    if name in OTHERS:
        chosen = registry.load_method(name)
        given = {key: value for key, value in SMALL.items() if key in chosen.Options.model_fields}
        return chosen.from_options(chosen.Options(**given), vocab)
    options = dict(OPTIONS[name])
    if name != "hybrid":
        proposer, its_options = make_options(options)
    else:
        proposer, its_options = registry.load_method(options.pop("method")), HybridOptions(**options)
    return proposer.from_options(its_options, vocab)


class Target:
    """A language of few tokens: its logits depend on the last two. Sampling is a function of seed and position."""

    def __init__(self, seed: int) -> None:
        self.logits = np.random.default_rng(seed).normal(0, 2, (VOCAB, VOCAB, VOCAB)).astype(np.float32)

    def after(self, text: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        row: np.ndarray[Any, np.dtype[np.float32]] = self.logits[text[-2] if len(text) > 1 else 0, text[-1]]
        return row

    def next(self, text: Sequence[int], sampling: Sampling) -> int:
        logits = self.after(text)
        if sampling.temperature == 0:
            return int(logits.argmax())
        noise = np.random.default_rng([sampling.seed or 0, len(text)]).gumbel(size=VOCAB)
        return int((logits / sampling.temperature + noise).argmax())

    def verify(
        self, name: str, text: list[int], tree: DraftTree, sampling: Sampling, width: int
    ) -> VerifiedRows:
        """One step behind ``text``, which grows by what it emits."""
        tokens = np.array([text[-1], *tree.tokens], np.int32)
        parents = np.array([-1, *(tree.parents + 1)], np.int32)
        paths: list[list[int]] = [text.copy()]
        for token, parent in zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True):
            paths.append([*paths[parent], token])
        start = np.array([0, len(tokens)], np.int32)
        accepted, emitted = walk(
            start, tokens, parents, lambda _, rows, __: [self.next(paths[row], sampling) for row in rows]
        )
        logits = np.array([self.after(path) for path in paths])
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :width].astype(np.int32)
        kept = np.isin(np.arange(len(tokens)), [0, *accepted[0]])
        text += emitted[0]
        return VerifiedRows(
            [name], start, tokens, parents, kept, ids, np.take_along_axis(logits, ids, 1), emitted
        )


def sampling(temperature: float, seed: int | None = 3) -> Sampling:
    return Sampling(temperature, 1.0, 0, 0.0, seed)


def request(
    text: Sequence[int], prompt: int, how: Sampling, name: str = "r", budget: int = 8, depth: int = 99
) -> Request:
    return Request(name, np.array(text, np.int32), prompt, budget, depth, how)


def width_of(drafter: Proposer) -> int:
    return min(drafter.verified_top_k, VOCAB)


def run(
    drafter: Proposer, target: Target, prompt: list[int], how: Sampling, steps: int = 30, name: str = "r"
) -> tuple[list[int], list[DraftTree]]:
    """A request's text after some steps, and its trees, each checked."""
    text = prompt.copy()
    drafter.observe(target.verify(name, text, DraftTree.empty(), how, width_of(drafter)))
    one = request(text, len(prompt), how, name)
    drafter.start(one)
    trees = []
    for step in range(steps):
        one = request(text, len(prompt), how, name, budget=step % 9, depth=step % 7)
        (tree,) = drafter.propose([one])
        tree.validate()
        assert len(tree) <= one.budget_tokens
        assert tree.depths().max(initial=0) <= one.max_depth
        assert tree.tokens.max(initial=0) < VOCAB
        trees.append(tree)
        drafter.observe(target.verify(name, text, tree, how, width_of(drafter)))
    drafter.finish(name)
    return text, trees


def same(one: list[DraftTree], two: list[DraftTree]) -> bool:
    return len(one) == len(two) and all(
        np.array_equal(getattr(a, field), getattr(b, field))
        for a, b in zip(one, two, strict=True)
        for field in ("tokens", "parents", "probabilities")
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_the_output_is_what_it_is_without_drafts(
    name: str, temperature: float, prompt: list[int], seed: int
) -> None:
    target, how = Target(seed), sampling(temperature, seed)
    text, _ = run(make(name), target, prompt, how)
    plain = prompt.copy()
    while len(plain) < len(text):
        plain.append(target.next(plain, how))
    assert text == plain


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_are_accepted_alone_and_fused(name: str) -> None:
    target, drafter = Target(1), make(name)
    prompt = [0, 1, 2, 3, 4, 5] * 3
    for how in (sampling(0.0), sampling(0.9)):
        text, _ = run(drafter, target, prompt, how, 60)
        assert len(text) - len(prompt) > 1.2 * 61


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_two_instances_make_the_same_trees(name: str, temperature: float) -> None:
    """Tensor-parallel ranks: nothing may depend on a clock, on a global generator or on salted hashes."""
    drafters = make(name), make(name)
    for seed in (3, None):
        np.random.seed(0)
        _, one = run(drafters[0], Target(2), [1, 2, 3, 1, 2], sampling(temperature, seed))
        np.random.seed(1)
        _, two = run(drafters[1], Target(2), [1, 2, 3, 1, 2], sampling(temperature, seed))
        assert same(one, two)
        assert any(len(tree) > 1 for tree in one)


@pytest.mark.parametrize("name", METHODS)
def test_another_process_makes_the_same_trees(name: str) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
from test_model_free import Target, make, run, sampling
_, trees = run(make({name!r}), Target(2), [1, 2, 3, 1, 2], sampling(0.9, None), name="chat-1")
print([tree.tokens.tolist() for tree in trees])
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert "[[]" in outputs.pop()


@pytest.mark.parametrize("name", ALL)
def test_preempted_requests_go_on_where_they_were(name: str) -> None:
    """Computed again, a request shows rows without output, and is asked for again at the same length."""
    target, how = Target(4), sampling(0.9)
    prompt = [1, 2, 3, 4, 1, 2, 3]
    drafters = make(name), make(name)
    texts = []
    for drafter, preempted in zip(drafters, (False, True), strict=True):
        text = prompt.copy()
        drafter.start(request(text, len(prompt), how))
        for step in range(20):
            (tree,) = drafter.propose([request(text, len(prompt), how)])
            if preempted and step % 5 == 3:
                (again,) = drafter.propose([request(text, len(prompt), how)])
                assert same([tree], [again])
            drafter.observe(target.verify("r", text, tree, how, width_of(drafter)))
        texts.append((text, tree))
    assert texts[0][0] == texts[1][0]
    assert same([texts[0][1]], [texts[1][1]])


@pytest.mark.parametrize("name", ALL)
def test_requests_do_not_mix_and_the_order_of_the_batch_does_not_matter(name: str) -> None:
    how = sampling(0.9)
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4], [0, 1, 0, 1, 0]]
    asks = [request(prompt, len(prompt), how, str(i)) for i, prompt in enumerate(prompts)]
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        drafter = make(name)
        run(drafter, Target(5), [1, 2, 3], how, name="past")
        for one in asks:
            drafter.start(one)
        trees = drafter.propose([asks[i] for i in order])
        results.append([trees[order.index(i)] for i in range(3)])
    assert same(*results)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("budget", "depth"), [(0, 5), (5, 0), (-1, 5), (5, -1)])
def test_no_budget_or_no_depth_is_an_empty_tree(name: str, budget: int, depth: int) -> None:
    drafter = make(name)
    text, _ = run(drafter, Target(6), [1, 2, 3, 1, 2], sampling(0.0), name="past")
    one = request(text, 5, sampling(0.0), budget=budget, depth=depth)
    drafter.start(one)
    assert [len(tree) for tree in drafter.propose([one])] == [0]
    assert len(drafter.propose([dataclasses.replace(one, budget_tokens=4, max_depth=4)])[0]) > 0


@pytest.mark.parametrize("name", METHODS)
def test_chains_have_the_whole_budget(name: str) -> None:
    drafter, how = make(name), sampling(0.0)
    text, _ = run(drafter, Target(6), [1, 2, 3, 1, 2], how, 100, name="past")
    one = dataclasses.replace(request([*text, *text[:9]], len(text), how, budget=7), chain=True)
    drafter.start(one)
    (tree,) = drafter.propose([one])
    assert tree.is_chain
    assert len(tree) == 7


@pytest.mark.parametrize("name", ALL)
def test_placeholder_ids_are_harmless(name: str) -> None:
    drafter, how = make(name), sampling(0.0)
    for number, text in enumerate(
        ([-1], [VOCAB], [1, -1, 2, 1, -1], [1, VOCAB, 2, VOCAB], [1, 2, VOCAB, 1, 2])
    ):
        one = request(text, len(text), how, str(number))
        drafter.start(one)
        (tree,) = drafter.propose([one])
        tree.validate()
        assert tree.tokens.max(initial=0) < VOCAB
        drafter.finish(str(number))
    assert drafter.propose([]) == []


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_left_of_finished_requests(name: str) -> None:
    drafter: Any = make(name)
    run(drafter, Target(7), [1, 2, 3], sampling(0.9))
    assert drafter._requests == {}
    drafter.finish("never seen")
    before = drafter.calibration.trials.copy()
    drafter.observe(Target(7).verify("r", [1, 2], DraftTree.empty(), sampling(0.0), width_of(drafter)))
    assert (drafter.calibration.trials == before).all()


@pytest.mark.parametrize("name", METHODS)
def test_each_tree_is_judged_once_and_by_the_emitted_tokens(name: str) -> None:
    drafter: Any = make(name)
    how = sampling(0.0)
    text, _ = run(drafter, Target(8), [1, 2, 3, 1, 2], how, name="past")
    one = request(text, len(text) - 1, how)
    drafter.start(one)
    (tree,) = drafter.propose([dataclasses.replace(one, budget_tokens=1)])
    assert len(tree) == 1
    nothing = np.zeros((0, width_of(drafter)), np.int32)
    none = nothing[:, 0] if nothing.shape[1] else np.zeros(0, np.int32)

    def emit(emitted: list[int]) -> tuple[float, float]:
        hits, trials = drafter.calibration.hits.sum(), drafter.calibration.trials.sum()
        rows = VerifiedRows(
            ["r"], np.zeros(2, np.int32), none, none, none > 0, nothing, nothing.astype(np.float32), [emitted]
        )
        drafter.observe(rows)
        return drafter.calibration.hits.sum() - hits, drafter.calibration.trials.sum() - trials

    assert emit([]) == (0, 0)  # an unfinished prompt: nothing is known of it yet
    hits, trials = emit(tree.tokens.tolist())
    assert (hits, trials) == pytest.approx((1, 1), abs=0.2)
    assert emit(tree.tokens.tolist()) == (0, 0)
    drafter.propose([dataclasses.replace(one, budget_tokens=1)])
    hits, trials = emit([VOCAB - 1 - int(tree.tokens[0])])  # not what was drafted
    assert hits <= 0 < trials


@pytest.mark.parametrize("name", METHODS)
def test_the_prior_is_a_chance(name: str) -> None:
    drafter: Any = make(name)
    assert ((drafter.calibration.estimates > 0) & (drafter.calibration.estimates < 1)).all()
    groups = drafter.calibration.estimates[0] if name == "stand" else drafter.calibration.estimates
    assert groups.size / groups.shape[-1] <= 256  # a group is a byte


@pytest.mark.parametrize("name", METHODS)
def test_trees_are_the_callers(name: str) -> None:
    """What is learnt later changes no tree that is already out."""
    drafter, how = make(name), sampling(0.9)
    text, _ = run(drafter, Target(9), [1, 2, 3, 1, 2], how, name="past")
    one = request(text, len(text), how)
    drafter.start(one)
    (tree,) = drafter.propose([one])
    before = DraftTree(tree.tokens.copy(), tree.parents.copy(), tree.probabilities.copy())
    run(drafter, Target(10), text, how, name="other")
    drafter.propose([one])
    assert same([tree], [before])
    assert len(tree) > 0


@pytest.mark.parametrize("name", METHODS)
def test_warm_up_leaves_no_trace_and_compiles_all(name: str) -> None:
    from vllm_ext.kernels import copy_tree_numba, ngram_table_numba, suffix_index_numba

    drafter: Any = make(name, 100)
    drafter.warm_up()
    untouched: Any = make(name, 100)
    for field in ("hits", "trials"):
        assert (getattr(drafter.calibration, field) == getattr(untouched.calibration, field)).all()
    if hasattr(drafter, "table"):
        assert not drafter.table.keys.any()
    assert drafter._requests == {}
    view = np.arange(40, dtype=np.int32).reshape(2, 20)[1, :15] % 5
    view.flags.writeable = False
    one = dataclasses.replace(request([], 15, sampling(0.7)), tokens=view, num_prompt_tokens=12, chain=True)
    drafter.start(one)
    drafter.propose([one, dataclasses.replace(one, sampling=sampling(0.0), chain=False)])
    width = drafter.verified_top_k
    drafter.observe(
        VerifiedRows(
            ["r"],
            np.array([0, 1], np.int32),
            view[-1:].copy(),
            np.array([-1], np.int32),
            np.array([True]),
            np.zeros((1, width + 3), np.int32)[:, :width],  # as `hybrid` cuts it
            np.zeros((1, width + 3), np.float32)[:, :width],
            [[1]],
        )
    )
    # One set of types each: a second would have been compiled in the middle of a step.
    used = {
        "stand": [ngram_table_numba.compiled(kernel) for kernel in ("record_rows", "grow_tree")],
        "aded": [ngram_table_numba.compiled(kernel) for kernel in ("record_text", "grow_tree")],
        "input_copy": [copy_tree_numba.compiled(), suffix_index_numba.compiled("find")],
    }
    for kernel in used[name]:
        assert len(kernel.signatures) == 1


@pytest.mark.parametrize("name", METHODS)
def test_the_registry_has_it_and_numba_is_not_imported_with_it(name: str) -> None:
    proposer = registry.load_method(name)
    assert proposer.summary
    assert proposer.paper.startswith("arXiv ")
    script = f"""
import sys
from vllm_ext.proposers import registry
proposer = registry.load_method({name!r})
proposer.from_options(proposer.Options(), 100)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
