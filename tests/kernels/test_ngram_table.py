# SPDX-License-Identifier: Apache-2.0
"""The table of what follows short contexts, and trees grown from it, beside their reference."""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels import ngram_table_ref as ref
from vllm_ext.kernels.best_first_tree_numba import mix
from vllm_ext.kernels.best_first_tree_ref import Node
from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.kernels.ngram_table import (
    EMPTY,
    MOST_COUNT,
    WAYS,
    Classes,
    Growing,
    NgramTable,
    Shape,
    contents,
    draw_tree,
    grow_tree,
    insert,
    record_rows,
    record_text,
)
from vllm_ext.kernels.ngram_table_numba import gumbel

VOCAB = 100
SLOTS = 1 << 14  # room for all contexts of a test, so that a table equals dictionaries
STEP, CAP = 0.04, 3.0


def entry(table: NgramTable, context: Sequence[int]) -> dict[int, float]:
    """What the table has for a context, heaviest first; empty if nothing."""
    key = 0
    for token in reversed(context):
        key = mix(key, token)
    slots = np.flatnonzero(table.keys == key)
    if not slots.size:
        return {}
    successors = table.successors[slots[0]]
    count = int((successors != EMPTY).sum())
    assert (successors[count:] == EMPTY).all()
    return dict(zip(successors[:count].tolist(), table.weights[slots[0], :count].tolist(), strict=True))


def record(
    table: NgramTable,
    text: Sequence[int],
    ids: Sequence[Sequence[int]],
    logits: Sequence[Sequence[float]],
    longest: int,
    accepted: Sequence[bool] | None = None,
) -> None:
    """The rows of the last ``len(ids)`` tokens of a text, as one request's chain; before them what there is."""
    count = len(ids)
    head = list(text[:-count])[-(longest - 1) :] if longest > 1 else []
    before = np.array([[EMPTY] * (longest - 1 - len(head)) + head], np.int32).reshape(1, longest - 1)
    record_rows(
        table,
        np.array([0, count], np.int32),
        np.array(text[-count:], np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        np.ones(count, np.bool_) if accepted is None else np.array(accepted),
        before,
        np.array(ids, np.int32),
        np.array(logits, np.float32),
        VOCAB,
    )


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], list[list[int]], list[list[float]]]]:
    """Texts of few tokens, the rows of their last tokens and those rows' logits."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    made = []
    for _ in range(draw(st.integers(1, 6))):
        text = rng.integers(0, 3, draw(st.integers(1, 12))).tolist()
        count = draw(st.integers(1, len(text)))
        ids = [rng.permutation(7)[:4].tolist() for _ in range(count)]
        # No two are equal, so that neither are the weights at which a successor is dropped.
        logits = np.sort(rng.normal(0, 2, (count, 4)))[:, ::-1].tolist()
        made.append((text, ids, logits))
    return made


def same(table: NgramTable, expected: dict[ref.Context, ref.Entry]) -> None:
    assert int((table.keys != 0).sum()) == len(expected)
    for context, its in expected.items():
        found = entry(table, context)
        assert list(found) == list(its.weights)
        assert list(found.values()) == pytest.approx(list(its.weights.values()), rel=1e-4)


@given(steps(), st.integers(1, 4), st.integers(2, 12))
@settings(deadline=None)
def test_recorded_rows_equal_the_reference(
    made: list[tuple[list[int], list[list[int]], list[list[float]]]], longest: int, width: int
) -> None:
    table = NgramTable.empty(SLOTS, width)
    expected: dict[ref.Context, ref.Entry] = {}
    for text, ids, logits in made:
        record(table, text, ids, logits, longest)
        first = len(text) - len(ids)
        head = max(first - (longest - 1), 0)
        for i in range(len(ids)):
            ref.record_row_ref(expected, text[head : first + i + 1], ids[i], logits[i], longest, width)
    same(table, expected)


def test_the_mean_equals_that_of_the_whole_batch() -> None:
    rng = np.random.default_rng(0)
    table = NgramTable.empty(SLOTS, 8)
    logits = np.sort(rng.normal(0, 2, (50, 8)).astype(np.float32))[:, ::-1]
    ids = np.array([rng.permutation(8) for _ in range(50)])
    for i in range(50):
        record(table, [5, 6], [ids[i].tolist()], [logits[i].tolist()], 2)
    mean = np.zeros(8)
    for i in range(50):
        shares = np.exp(logits[i] - logits[i].max(), dtype=np.float64)
        mean[ids[i]] += shares / shares.sum() / 50
    for context in ([6], [5, 6]):
        found = entry(table, context)
        assert [found[token] for token in range(8)] == pytest.approx(mean.tolist(), rel=1e-4)
    assert sum(found.values()) == pytest.approx(1.0, rel=1e-4)


def test_counts_end_at_the_most_and_the_mean_goes_on() -> None:
    table = NgramTable.empty(WAYS, 2)
    for _ in range(3):
        record(table, [5], [[1, 2]], [[0.0, 0.0]], 1)
        table.counts[table.used > 0] = np.maximum(table.counts[table.used > 0], MOST_COUNT - 1)
    assert table.counts.max() == MOST_COUNT
    assert entry(table, [5]) == {1: 0.5, 2: 0.5}


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=30), max_size=4), st.sampled_from([4, 16, 1024])
)
@settings(deadline=None)
def test_a_table_with_the_contents_of_another_is_its_equal(texts: list[list[int]], slots: int) -> None:
    table, other = NgramTable.empty(slots, 3), NgramTable.empty(slots, 3)
    for text in texts:
        record_text(table, np.array(text, np.int32), 2, STEP, CAP, VOCAB)
    kept = contents(table)
    assert len(kept.keys) == (table.used > 0).sum()
    assert insert(other, kept) == -1
    for text in [*texts, [1, 2, 3, 4]]:  # also when both go on
        for name in NgramTable._fields:
            assert np.array_equal(getattr(table, name), getattr(other, name)), name
        for one in (table, other):
            record_text(one, np.array(text, np.int32), 2, STEP, CAP, VOCAB)


def test_only_accepted_rows_and_only_the_path_to_them_count() -> None:
    table = NgramTable.empty(SLOTS, 2)
    record_rows(
        table,
        np.array([0, 4], np.int32),
        np.array([1, 2, 3, 4], np.int32),
        np.array([-1, 0, 0, 2], np.int32),  # 1 -> 2 and 1 -> 3 -> 4
        np.array([True, False, True, True]),
        np.array([[EMPTY, 9]], np.int32),
        np.array([[11, 12], [21, 22], [31, 32], [41, 42]], np.int32),
        np.zeros((4, 2), np.float32),
        VOCAB,
    )
    contexts = {
        (1,): 11,
        (9, 1): 11,
        (3,): 31,
        (1, 3): 31,
        (9, 1, 3): 31,
        (4,): 41,
        (3, 4): 41,
        (1, 3, 4): 41,
    }
    for context, first in contexts.items():
        assert entry(table, context) == {first: 0.5, first + 1: 0.5}
    assert int((table.keys != 0).sum()) == len(contexts)


@pytest.mark.parametrize("logits", [[math.nan, 0.0], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_rows_without_a_distribution_are_skipped(logits: list[float]) -> None:
    table = NgramTable.empty(SLOTS, 2)
    record(table, [1], [[3, 4]], [logits], 1)
    assert not table.keys.any()


def test_ids_that_are_no_tokens_are_left_out() -> None:
    table = NgramTable.empty(SLOTS, 3)
    record(table, [7, VOCAB, 1], [[3, VOCAB, -1]], [[0.0, 0.0, 0.0]], 3)
    assert entry(table, [1]) == pytest.approx({3: 1 / 3})
    assert int((table.keys != 0).sum()) == 1  # no context reaches over the id that is no token


@given(
    st.lists(st.lists(st.integers(-1, 3), max_size=30), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([0.06, 0.12, 3.0]),
)
@settings(deadline=None)
def test_recorded_text_equals_the_reference(
    texts: list[list[int]], order: int, width: int, cap: float
) -> None:
    table = NgramTable.empty(SLOTS, width)
    expected: dict[ref.Context, ref.Entry] = {}
    for text in texts:
        record_text(table, np.array(text, np.int32), order, STEP, cap, VOCAB)
        ref.record_text_ref(expected, text, order, STEP, cap, width)
    same(table, expected)


def test_of_one_set_the_contexts_recorded_last_stay() -> None:
    table = NgramTable.empty(WAYS, 2)
    kept: OrderedDict[int, None] = OrderedDict()
    rng = np.random.default_rng(0)
    for token in rng.integers(0, 9, 300).tolist():
        record_text(table, np.array([token, token + 10], np.int32), 1, STEP, CAP, VOCAB)
        kept[token] = None
        kept.move_to_end(token)
        if len(kept) > WAYS:
            kept.popitem(last=False)
        assert {token for token in range(9) if entry(table, [token])} == set(kept)
        # A newcomer starts again.
        assert all(list(entry(table, [token])) == [token + 10] for token in kept)


def test_sets_share_the_slots_evenly() -> None:
    table = NgramTable.empty(1 << 12, 1)
    tokens = np.random.default_rng(0).permutation(3002).astype(np.int32)
    record_text(table, tokens, 2, STEP, CAP, 3002)
    # Of 3000 contexts thrown into 1024 sets at random about 2697 are within the four places.
    assert 2600 < (table.keys != 0).sum() < 2800


# Trees.


def classes(levels: int = 1, chance: float = 0.5) -> Classes:
    return Classes(np.full((levels, 1, 1), chance, np.float32), np.zeros(0, np.float32))


def distribution(table: NgramTable, context: Sequence[int], weights: dict[int, float]) -> None:
    """Make the table have these weights for a context."""
    record(table, context, [list(weights)], [np.log(list(weights.values())).tolist()], len(context))


WEIGHTS = {10: 0.4, 11: 0.25, 12: 0.2, 13: 0.1, 14: 0.05}


def chi_square(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float], total: int) -> float:
    """How many standard deviations the statistic is above its mean."""
    assert set(counts) <= set(chances)
    assert min(chances.values()) * total > 5
    value = sum((counts[k] - total * p) ** 2 / (total * p) for k, p in chances.items())
    freedom = len(chances) - 1
    return (value - freedom) / math.sqrt(2 * freedom)


def drawing_classes(ranks: int, chance: float = 0.5) -> Classes:
    """Equal chances: the root's children are taken one after the other, where nothing may be deeper."""
    return Classes(np.full((1, ranks, 1, 1), chance, np.float32), np.zeros(0, np.float32))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_children_are_draws_without_replacement_in_their_order(temperature: float) -> None:
    table = NgramTable.empty(SLOTS, 5)
    distribution(table, [1], WEIGHTS)
    shares = {token: weight ** (1 / temperature) for token, weight in WEIGHTS.items()}
    chances: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(shares, 2):
        left, chance = sum(shares.values()), 1.0
        for token in order:
            chance *= shares[token] / left
            left -= shares[token]
        chances[order] = chance
    total = 20000
    counts: Counter[tuple[int, ...]] = Counter()
    shape = Shape(temperature, 1.0, 0, 0.0)
    for noise in range(total):
        drawn = draw_tree(table, np.array([1], np.int32), drawing_classes(2), shape, noise, 9, 1)
        counts[tuple(drawn.tree.tokens.tolist())] += 1
        assert drawn.q[0].sum() == pytest.approx(1.0)
    assert dict(zip(drawn.ids[0].tolist(), drawn.q[0].tolist(), strict=True)) == pytest.approx(
        {token: share / sum(shares.values()) for token, share in shares.items()}, rel=1e-6
    )
    assert chi_square(counts, chances, total) < 4
    # The mutation: the same children by weight, and not in the order they were drawn.
    sorted_counts: Counter[tuple[int, ...]] = Counter()
    for pair, count in counts.items():
        sorted_counts[min(pair), max(pair)] += count
    assert chi_square(sorted_counts, chances, total) > 100


def test_draws_at_different_nodes_are_independent() -> None:
    table = NgramTable.empty(SLOTS, 3)
    weights = {1: 0.5, 2: 0.3, 3: 0.2}
    for token in weights:
        distribution(table, [token], weights)
    total = 20000
    counts: Counter[tuple[int, ...]] = Counter()
    for noise in range(total):
        drawn = draw_tree(
            table, np.array([1], np.int32), drawing_classes(1), Shape(1.0, 1.0, 0, 0.0), noise, 3, 3
        )
        assert drawn.tree.parents.tolist() == [-1, 0, 1]
        counts[tuple(drawn.tree.tokens.tolist())] += 1
    chances = {
        path: math.prod(weights[token] for token in path) for path in itertools.product(weights, repeat=3)
    }
    assert chi_square(counts, chances, total) < 4


def test_noise_equals_the_reference() -> None:
    for noise, token in itertools.product((0, 1, 2**31, 2**32 - 1), (0, 5, 49151)):
        key = mix(mix(0, noise), token)
        assert gumbel(key) == pytest.approx(ref.gumbel_ref(ref.mix_ref(ref.mix_ref(0, noise), token)))


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures_do_no_harm(temperature: float) -> None:
    table = NgramTable.empty(SLOTS, 5)
    distribution(table, [1], WEIGHTS)
    context = np.array([1], np.int32)
    expected = [10] if temperature < 1 else sorted(WEIGHTS)
    tree = grow_tree(table, context, 1, classes(), Growing(5, temperature, 0.0), 9, 1, False)
    assert sorted(tree.tokens.tolist()) == expected
    drawn = draw_tree(table, context, drawing_classes(5), Shape(temperature, 1.0, 0, 0.0), 3, 9, 1)
    assert sorted(drawn.tree.tokens.tolist()) == expected


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        (Shape(1.0, 1.0, 3, 0.0), 3),
        (Shape(1.0, 0.6, 0, 0.0), 2),
        (Shape(1.0, 0.65, 0, 0.0), 2),
        (Shape(1.0, 0.66, 0, 0.0), 3),
        (Shape(1.0, 1.0, 0, 0.3), 3),
        (Shape(0.5, 1.0, 0, 0.3), 2),
        (Shape(1.0, 0.0001, 0, 0.0), 1),
    ],
)
def test_what_a_request_cuts_off_is_not_drawn(shape: Shape, kept: int) -> None:
    table = NgramTable.empty(SLOTS, 5)
    distribution(table, [1], WEIGHTS)
    drawn = draw_tree(table, np.array([1], np.int32), drawing_classes(5), shape, 3, 9, 1)
    left = np.array(list(WEIGHTS.values())[:kept]) ** (1 / shape.temperature)
    assert drawn.q[0].tolist() == pytest.approx([*(left / left.sum()), *[0.0] * (5 - kept)], rel=1e-5)
    assert sorted(drawn.tree.tokens.tolist()) == sorted(list(WEIGHTS)[:kept])


def test_the_longest_known_context_wins() -> None:
    table = NgramTable.empty(SLOTS, 2)
    record(table, [4], [[20, 21]], [[0.0, -1.0]], 1)
    record(table, [3, 4], [[30, 31]], [[9.0, -9.0]], 2)
    record(table, [1, 2, 3, 4], [[40, 41]], [[9.0, -9.0]], 4)
    levels = classes(4)

    def first(*context: int, shortest: int = 1) -> list[tuple[int, int]]:
        tree = grow_tree(
            table, np.array(context, np.int32), shortest, levels, Growing(1, 1.0, 0.0), 1, 1, False
        )
        return list(zip(tree.tokens.tolist(), tree.groups.tolist(), strict=True))

    assert first(1, 2, 3, 4) == [(40, 3)]
    assert first(9, 2, 3, 4) == [(40, 2)]  # recorded with the longer one
    assert first(9, 9, 9, 4) != first(9, 9, 3, 4)
    assert first(EMPTY, EMPTY, EMPTY, 4)[0][1] == 0
    assert first(1, 2, 3, 4, shortest=2) == [(40, 2)]
    assert first(9, 9, 9, 4, shortest=2) == []
    assert first(4, EMPTY) == []


@st.composite
def grown(draw: st.DrawFn) -> tuple[NgramTable, dict[ref.Context, ref.Entry], Classes, Growing]:
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    width = draw(st.integers(1, 5))
    table = NgramTable.empty(SLOTS, width)
    entries: dict[ref.Context, ref.Entry] = {}
    for _ in range(draw(st.integers(0, 30))):
        text = rng.integers(0, 4, int(rng.integers(1, 4))).tolist()
        ids, logits = rng.permutation(4)[:width].tolist(), np.sort(rng.normal(0, 2, 4))[::-1][:width].tolist()
        record(table, text, [ids], [logits], 3)
        ref.record_row_ref(entries, text, ids, logits, 3, width)
    for context, its in entries.items():  # the same bits, so that classes and ties are the same
        its.weights = entry(table, context)
    chances = rng.choice([0.0, 0.25, 0.5, 0.7, 1.0], (2, 4, 2)).astype(np.float32)
    growing = Growing(
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1.0, 0.6])),
        draw(st.sampled_from([0.0, 0.3])),
    )
    return table, entries, Classes(chances, np.array([0.11, 0.33, 0.71], np.float32)), growing


@given(
    grown(),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 2),
    st.integers(-1, 14),
    st.integers(-1, 6),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_trees_equal_the_reference(
    made: tuple[NgramTable, dict[ref.Context, ref.Entry], Classes, Growing],
    context: list[int],
    shortest: int,
    budget: int,
    depth: int,
    chain: bool,
) -> None:
    table, entries, its_classes, growing = made
    longest = 3
    last = context[-longest:]
    padded = np.array([EMPTY] * (longest - len(last)) + last, np.int32)
    tree = grow_tree(table, padded, shortest, its_classes, growing, budget, depth, chain)
    expected: list[Node] = ref.grow_tree_ref(
        entries, last, longest, shortest, its_classes, growing, max(budget, 0), depth, chain
    )
    assert list(zip(*(column.tolist() for column in tree), strict=True)) == expected


@given(
    grown(),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(-1, 14),
    st.integers(-1, 6),
    st.integers(1, 4),
    st.sampled_from([Shape(1.0, 1.0, 0, 0.0), Shape(0.6, 0.9, 3, 0.05)]),
    st.integers(0, 2**63 - 1),
)
@settings(deadline=None, max_examples=300)
def test_drawn_trees_equal_the_reference(
    made: tuple[NgramTable, dict[ref.Context, ref.Entry], Classes, Growing],
    context: list[int],
    budget: int,
    depth: int,
    ranks: int,
    shape: Shape,
    noise: int,
) -> None:
    table, entries, its_classes, _ = made
    longest = 3
    last = context[-longest:]
    padded = np.array([EMPTY] * (longest - len(last)) + last, np.int32)
    chances = np.random.default_rng(noise).random((2, ranks, 4, 2)).astype(np.float32)
    drawn = draw_tree(table, padded, Classes(chances, its_classes.shares), shape, noise, budget, depth)
    expected = ref.draw_tree_ref(
        entries,
        last,
        longest,
        Classes(chances, its_classes.shares),
        shape,
        noise,
        max(budget, 0),
        depth,
    )
    found = list(zip(*(column.tolist() for column in drawn.tree), strict=True))
    assert [(token, parent, group) for token, parent, _, group in found] == [
        (token, parent, group) for token, parent, _, group in expected
    ]
    assert [node[2] for node in found] == pytest.approx([node[2] for node in expected], rel=1e-5)
    # A smaller one is its first nodes: the size has no say in what is drawn, nor that in the size.
    smaller = draw_tree(table, padded, Classes(chances, its_classes.shares), shape, noise, budget // 2, depth)
    for name in GrownTree._fields:
        whole, part = getattr(drawn.tree, name).tolist(), getattr(smaller.tree, name).tolist()
        assert part == whole[: max(budget // 2, 0)]


def test_exploration_looks_beside_a_sure_path() -> None:
    """0.5 after each token: a chain of 0.5, 0.25, .. and a sibling of 0.1 at the root."""
    table = NgramTable.empty(SLOTS, 2)
    for token in range(1, 9):
        distribution(table, [token], {token + 1: 0.8, token + 50: 0.2})
    its_classes = Classes(np.array([0.1, 0.5], np.float32).reshape(1, 2, 1), np.array([0.5], np.float32))

    def tokens(exploration: float) -> list[int]:
        growing = Growing(2, 1.0, exploration)
        tree = grow_tree(table, np.array([1], np.int32), 1, its_classes, growing, 4, 9, False)
        return list(tree.tokens.tolist())

    assert tokens(0.0) == [2, 3, 4, 51]
    # After two nodes the sibling at the root has 0.1 * (1 + sqrt(2)), its rival 0.125.
    assert tokens(1.0) == [2, 3, 51, 4]
