# SPDX-License-Identifier: Apache-2.0
"""Aggressive Decoding: where the pointer is, and what is copied from there. See also test_model_free.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels.copy_tree import copy_tree
from vllm_ext.kernels.copy_tree_ref import copy_tree_ref
from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.input_copy import INSERT, LENGTHS, SKIP, UNIQUE, InputCopy, InputCopyOptions
from vllm_ext.proposers.tree import DraftTree

VOCAB = 1000
END = 999
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
SOURCE = list(range(100, 140))


# The tree.


@given(
    st.lists(st.integers(-1, 3), max_size=25),
    st.lists(st.tuples(st.integers(0, 27), st.integers(0, 5), st.integers(0, 2)), max_size=4),
    st.integers(0, 99),
    st.integers(-1, 12),
    st.integers(-1, 8),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_trees_equal_the_reference(
    text: list[int], copies: list[tuple[int, int, int]], seed: int, budget: int, depth: int, chain: bool
) -> None:
    chances = np.random.default_rng(seed).choice([0.0, 0.25, 0.5, 0.7, 1.0], (3, 3, 2)).astype(np.float32)
    tree = copy_tree(
        np.array(text, np.int32),
        np.array(copies, np.int64).reshape(-1, 3),
        chances,
        np.array([1, 4], np.int64),
        3,
        budget,
        depth,
        chain,
    )
    expected = copy_tree_ref(text, copies, chances, [1, 4], 3, budget, depth, chain)
    assert list(zip(*(column.tolist() for column in tree), strict=True)) == expected
    drafted = DraftTree(tree.tokens, tree.parents, tree.probabilities)
    drafted.validate()
    assert drafted.is_chain or not chain


def test_copies_that_agree_share_their_nodes() -> None:
    text = [5, 6, 7, 9, 5, 6, 8]
    copies = np.array([[0, 0, 0], [4, 0, 1]], np.int64)
    chances = np.array([0.5, 0.8], np.float32).reshape(2, 1, 1)
    tree = copy_tree(np.array(text, np.int32), copies, chances, np.zeros(0, np.int64), 10, 9, 9, False)
    assert tree.tokens.tolist() == [
        5,
        6,
        8,
        7,
        9,
        5,
        6,
        8,
    ]  # shared, then the better of the two, then the rest
    assert tree.parents.tolist() == [-1, 0, 1, 1, 3, 4, 5, 6]
    assert tree.groups.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert tree.probabilities[:4].tolist() == pytest.approx([0.8, 0.64, 0.512, 0.32])


# The proposer.


def make(edits: bool = False, **options: object) -> InputCopy:
    return InputCopy.from_options(InputCopyOptions.model_validate({"edits": edits, **options}), VOCAB)


def request(text: Sequence[int], prompt: int, budget: int = 8, name: str = "r", depth: int = 99) -> Request:
    return Request(name, np.array(text, np.int32), prompt, budget, depth, GREEDY)


def emit(one: InputCopy, emitted: Sequence[int]) -> None:
    none = np.zeros(0, np.int32)
    nothing = np.zeros((0, 0), np.int32)
    one.observe(
        VerifiedRows(
            ["r"],
            np.zeros(2, np.int32),
            none,
            none,
            none > 0,
            nothing,
            nothing.astype(np.float32),
            [list(emitted)],
        )
    )


def accepted(tree: DraftTree, truth: Sequence[int]) -> int:
    """How many of the next tokens the tree has."""
    node, count = -1, 0
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if parent == node and count < len(truth) and token == truth[count]:
            node, count = i, count + 1
    return count


def replay(one: InputCopy, prompt: Sequence[int], output: Sequence[int], budget: int = 8) -> list[int]:
    """How many tokens each step puts out; the first comes with the prompt."""
    done = 1
    one.start(request([*prompt, output[0]], len(prompt)))
    steps = [1]
    while done < len(output):
        (tree,) = one.propose([request([*prompt, *output[:done]], len(prompt), budget)])
        tree.validate()
        assert len(tree) <= budget
        count = min(accepted(tree, output[done:]) + 1, len(output) - done)
        emit(one, output[done : done + count])
        done += count
        steps.append(count)
    one.finish("r")
    return steps


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        seen.append(((*seen[parent],) if parent >= 0 else ()) + (token,))
    return seen


@pytest.mark.parametrize("budget", [1, 4, 8, 16])
@pytest.mark.parametrize("resync", ["latest", "unique"])
def test_an_answer_that_is_its_prompt_takes_the_fewest_steps(budget: int, resync: str) -> None:
    steps = replay(make(resync=resync), [1, *SOURCE, 2], SOURCE, budget)
    assert len(steps) == 1 + -(-(len(SOURCE) - 1) // (budget + 1))


@pytest.mark.parametrize("min_match", [1, 2, 4])
def test_a_substitution_costs_a_match_and_a_step(min_match: int) -> None:
    m = min_match
    output = [*SOURCE[:20], 7, *SOURCE[21:]]
    assert replay(make(min_match=m), [1, *SOURCE, 2], SOURCE, 90) == [1] * m + [40 - m]
    assert replay(make(min_match=m), [1, *SOURCE, 2], output, 90) == [1] * m + [21 - m] + [1] * m + [19 - m]


def test_after_an_edit_the_copy_goes_on_at_once() -> None:
    for output, left in (([*SOURCE[:20], 7, *SOURCE[21:]], 19), ([*SOURCE[:20], 7, *SOURCE[20:]], 20)):
        assert replay(make(True, min_match=4), [1, *SOURCE, 2], output, 90) == [1, 1, 1, 1, 17, left]
    # What is left out needs no branch: its successor is found by itself.
    assert replay(make(), [1, *SOURCE, 2], [*SOURCE[:20], *SOURCE[21:]], 90) == [1, 20, 18]


def after(one: InputCopy, prompt: Sequence[int], *outputs: Sequence[int], budget: int = 8) -> DraftTree:
    """The last of the trees for an output that grows to each of these."""
    one.start(request([*prompt, *outputs[0]], len(prompt)))
    for output in outputs:
        (tree,) = one.propose([request([*prompt, *output], len(prompt), budget)])
        tree.validate()
    one.finish("r")
    return tree


def test_both_branches_stand_beside_what_the_text_says() -> None:
    prompt = [10, 11, 12, 13, 14, 15, 50, 60, 61]
    one = make(True)
    tree = after(one, prompt, [10], [10, 11, 12, 50], budget=20)  # 50 instead of 13
    assert set(paths(tree)) >= {(60,), (60, 61), (14,), (14, 15), (13,), (13, 14)}
    tree = after(make(False), prompt, [10], [10, 11, 12, 50], budget=20)
    assert paths(tree) == [(60,), (60, 61)]
    # The branch that is right is the copy then, also where a match would lead elsewhere.
    tree = after(one, prompt, [10], [10, 11, 12, 50], [10, 11, 12, 50, 14])
    assert paths(tree)[0] == (15,)
    tree = after(one, prompt, [10], [10, 11, 12, 50], [10, 11, 12, 50, 13, 14])
    assert paths(tree)[0] == (15,)


def test_branches_follow_what_came_after_the_difference() -> None:
    """Another drafter's nodes were accepted: the difference is not the last token."""
    prompt = [10, 11, 12, 13, 14, 15, 16]
    tree = after(make(True, min_match=8), prompt, [70], budget=20)
    assert len(tree) == 0
    one = make(True, min_match=2)
    tree = after(one, prompt, [10, 11], [10, 11, 12, 50, 14], budget=20)
    assert paths(tree) == [(15,), (15, 16)]  # 13 replaced; neither inserted nor found by two tokens
    tree = after(one, prompt, [10, 11], [10, 11, 12, 50, 13], budget=20)
    assert paths(tree) == [(14,), (14, 15), (14, 15, 16)]
    tree = after(one, prompt, [10, 11], [10, 11, 12, 50, 60], budget=20)
    assert paths(tree) == []


def test_an_ambiguous_match_copies_the_latest_or_nothing() -> None:
    prompt = [1, 2, 30, 31, 1, 2, 40, 41, 9]
    assert paths(after(make(resync="latest"), prompt, [5, 1, 2]))[0] == (40,)
    assert len(after(make(resync="unique"), prompt, [5, 1, 2])) == 0
    # One more token makes it unique, and it stays so while the copy goes on.
    assert paths(after(make(resync="unique"), prompt, [5, 1, 2, 30]))[0] == (31,)
    unique = after(make(resync="unique"), prompt, [31], [31, 1], [31, 1, 2])
    assert paths(unique)[0] == (40,)


def test_the_longest_match_wins_over_later_ones() -> None:
    prompt = [1, 2, 3, 30, 8, 3, 40, 9, 2, 3, 50, 9]
    assert paths(after(make(), prompt, [1, 2, 3]))[0] == (30,)
    assert paths(after(make(), prompt, [7, 2, 3]))[0] == (50,)
    assert paths(after(make(min_match=3), prompt, [1, 2, 3]))[0] == (30,)
    assert len(after(make(min_match=3), prompt, [7, 2, 3])) == 0


def test_a_match_may_begin_in_the_prompt() -> None:
    prompt = [20, 21, 22, 23, 9, 20, 21]
    assert paths(after(make(min_match=3), prompt, [22]))[0] == (23,)


def test_the_prompt_alone_is_copied_to_its_end() -> None:
    """The template ends a source with the token that ends an answer: it is drafted too, and nothing behind the end."""
    prompt = [1, *SOURCE, END]
    assert after(make(), prompt, SOURCE[:38], budget=9).tokens.tolist() == [SOURCE[38], SOURCE[39], END]
    assert len(after(make(), prompt, [*SOURCE, END])) == 0
    # What the answer itself said before is not the input.
    assert len(after(make(), [1, 2, 3], [50, 51, 52, 50])) == 0


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 99), st.booleans(), st.integers(1, 3)
)
@settings(deadline=None)
def test_first_drafts_continue_a_longest_match(
    prompt: list[int], seed: int, unique: bool, least: int
) -> None:
    output = np.random.default_rng(seed).integers(0, 5, 6).tolist()
    tree = after(make(resync="unique" if unique else "latest", min_match=least), prompt, output)
    text = [*prompt, *output]
    lengths = {}
    for at in range(1, len(prompt)):
        length = 0
        while length < at and prompt[at - 1 - length] == text[-1 - length]:
            length += 1
        lengths[at] = length
    longest = max(lengths.values(), default=0)
    places = [at for at, length in lengths.items() if length == longest >= least]
    expected = prompt[places[-1] :][:8] if places and not (unique and len(places) > 1) else []
    assert tree.tokens.tolist() == expected
    assert tree.is_chain


def test_the_classes_of_a_copy_and_of_edits() -> None:
    """A token's class is the length of its copy, after an edit that of the copy before it."""
    prompt = [10, 11, 12, 13, 14, 15, 16, 17, 50, 60]
    one = make(True)

    def classes(*output: int) -> set[tuple[int, int, int]]:
        """Token, kind and class of what is drafted next."""
        asked = request([*prompt, *output], len(prompt), 20, depth=1)
        if "r" not in one._requests:
            one.start(asked)
        one.propose([asked])
        tree = one.calibration._drafted["r"]
        return {(t, *divmod(g, len(LENGTHS) + 1)) for t, g in zip(tree.tokens, tree.groups, strict=True)}

    assert classes(10) == {(11, UNIQUE, 0)}
    assert classes(10, 11, 12, 13) == {(14, UNIQUE, 3)}
    # Four tokens agreed, then 50 came for 14.
    assert classes(10, 11, 12, 13, 50) == {(60, UNIQUE, 0), (15, SKIP, 3), (14, INSERT, 3)}
    assert classes(10, 11, 12, 13, 50, 15) == {(16, UNIQUE, 4)}
    assert classes(10, 11, 12, 13, 50, 15, 16) == {(17, UNIQUE, 4)}


def test_chains_go_on_from_the_most_probable_copy() -> None:
    prompt = [10, 11, 12, 13, 14, 15, 50, 60, 61]
    one = make(True)
    for output in ([10], [10, 11, 12, 50]):
        asked = dataclasses.replace(request([*prompt, *output], len(prompt), 20), chain=True)
        if len(output) == 1:
            one.start(asked)
        (tree,) = one.propose([asked])
    assert tree.is_chain
    assert tree.tokens.tolist() == [60, 61]


def test_estimates_learn_how_far_copies_go() -> None:
    """Nine of ten tokens are copied, whatever came before. A copy begins with one token in common."""
    one = make(False)
    rng = np.random.default_rng(0)
    for _ in range(100):
        source = rng.permutation(900)[:120].tolist()
        output = [token if rng.random() < 0.9 else int(rng.integers(900, 990)) for token in source]
        replay(one, [*source, 998], output, 8)
    source = rng.permutation(900)[:120].tolist()
    chances = after(one, [*source, 998], source[:1]).probabilities
    # A fading mean has the variance p (1 - p) (1 - fade) / (1 + fade): 5 sigma are 0.08.
    assert (chances / np.roll([*chances[:-1], 1.0], 1)).tolist() == pytest.approx([0.9] * 8, abs=0.08)


def test_memory_and_options() -> None:
    one = make(True, min_match=3, resync="unique")
    assert one.memory_bytes < 20_000
    assert one.verified_top_k == 0
    for name, value in (("min_match", 0), ("min_match", 9), ("resync", "first"), ("edits", 1)):
        with pytest.raises(ValueError, match=name):
            InputCopyOptions.model_validate({name: value})
