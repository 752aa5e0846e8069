# SPDX-License-Identifier: Apache-2.0
"""What a request's rows read behind its prompt: which blocks are kept, when that is chosen, and by what."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from pydantic import ValidationError

from vllm_ext.codecs.critic import Critic, CriticOptions
from vllm_ext.codecs.selection import ALL, ScoredPolicy, SelectingCodec, lists_of
from vllm_ext.codecs.snapkv import SnapKV, SnapKVOptions

BLOCK = 16


def snapkv(**options: int) -> SnapKV:
    return SnapKV(SnapKVOptions(**{"budget": 5 * BLOCK, "window": BLOCK, "watched": 8, **options}), BLOCK, 32)


def critic(**options: float) -> Critic:
    given = {"budget": 5 * BLOCK, "window": BLOCK, "watched": 8, **options}
    return Critic(CriticOptions.model_validate(given), BLOCK, 32)


def mass_of(position: int, seed: int = 0) -> np.ndarray:
    """What the row at a position attends to: the same whenever it is asked."""
    return np.random.default_rng([seed, position]).random(position // BLOCK).astype(np.float32)


def read(choice: ScoredPolicy, end: int, cuts: Sequence[int], begin: int = 0) -> list[tuple[int, list[int]]]:
    """The tokens ``begin`` to ``end`` in parts, of which each is asked what the choice wants to know."""
    found = []
    for first, last in itertools.pairwise([begin, *cuts, end]):
        for position in choice.watched(first, last):
            choice.take(position, mass_of(position))
        found += choice.settle(last)
    return found


@pytest.mark.parametrize("codec", [snapkv(), critic()], ids=["snapkv", "critic"])
def test_a_prompt_reads_all_of_itself(codec: SelectingCodec) -> None:
    choice = codec.choice(200)
    assert read(choice, 200, [])
    assert {choice.read_at(position) for position in range(200)} == {ALL}
    assert choice.read_at(200) != ALL


@pytest.mark.parametrize("codec", [snapkv(), critic()], ids=["snapkv", "critic"])
def test_what_fits_is_kept(codec: SelectingCodec) -> None:
    """Up to the budget nothing is forgotten, and a block more than that is one."""
    for prompt in (1, BLOCK, 5 * BLOCK, 6 * BLOCK - 1):
        choice = codec.choice(prompt)
        assert read(choice, prompt, []) == []
        assert choice.read_at(prompt) == list(range(prompt // BLOCK))
    assert [len(blocks) for _, blocks in read(codec.choice(6 * BLOCK), 6 * BLOCK, [])] == [1]


@pytest.mark.parametrize("sinks", [0, 4, 17])
@pytest.mark.parametrize("window", [1, 20])
def test_the_largest_masses_remain_and_the_ends_always(sinks: int, window: int) -> None:
    """Of all sets of so many blocks with the first and the last ones, the kept one has the most attention."""
    prompt = 9 * BLOCK + 9
    codec = snapkv(sinks=sinks, window=window)
    choice = codec.choice(prompt)
    ((first, gone),) = read(choice, prompt, [])
    kept = choice.read_at(prompt)
    assert isinstance(kept, list)
    assert first == prompt
    assert sorted([*kept, *gone]) == list(range(9))
    assert len(kept) == 5
    safe = {*range(-(-sinks // BLOCK)), *range(9 - -(-window // BLOCK), 9)}
    assert safe <= set(kept)
    total = np.sum([mass_of(position) for position in range(prompt - 8, prompt)], 0)
    best = max(
        (each for each in itertools.combinations(range(9), 5) if safe <= set(each)),
        key=lambda each: float(sum(total[list(each)])),
    )
    assert kept == list(best)
    # The answer's blocks come on top.
    assert choice.read_at(prompt + 3 * BLOCK) == [*kept, 9, 10, 11]
    assert read(choice, prompt + 3 * BLOCK, [], prompt) == []


def test_of_equal_blocks_the_first_ones_remain() -> None:
    choice = snapkv(sinks=0).choice(8 * BLOCK)
    for position in choice.watched(0, 8 * BLOCK):
        choice.take(position, np.ones(position // BLOCK, np.float32))
    choice.settle(8 * BLOCK)
    assert choice.read_at(8 * BLOCK) == [0, 1, 2, 3, 7]


def test_an_answer_stays_within_the_budget() -> None:
    """Whenever a block is full, one is forgotten for good, never one of the first or the last."""
    codec, prompt = critic(sinks=20, window=20), 7 * BLOCK + 3
    choice = codec.choice(prompt)
    gone: set[int] = set()
    previous = 0
    for end in range(prompt, 40 * BLOCK):
        for first, blocks in read(choice, end, [], previous):
            assert first == end == (prompt if end == prompt else first // BLOCK * BLOCK)
            assert not gone & set(blocks)
            gone |= set(blocks)
        previous = end
        kept, block = choice.read_at(end), end // BLOCK
        assert isinstance(kept, list)
        assert len(kept) == min(5, block)
        assert set(kept) == set(range(block)) - gone
        assert {0, 1, block - 2, block - 1} <= set(kept)


def test_scores_are_a_moving_average() -> None:
    """By hand; a block that was not there before begins with what it is given."""
    codec = critic(decay=0.75)
    before, mass = np.array([1.0, 0.0], np.float32), np.array([0.0, 1.0, 0.5], np.float32)
    assert codec.scores(before, mass).tolist() == [0.75, 0.25, 0.5]
    assert codec.scores(np.zeros(0, np.float32), mass).tolist() == mass.tolist()
    assert critic(decay=0.0).scores(before, mass).tolist() == mass.tolist()


def test_what_has_not_mattered_for_long_goes_first() -> None:
    """The block that the prompt's end liked most is forgotten when nothing looks at it any more."""
    codec = critic(sinks=0, decay=0.5)
    choice = codec.choice(5 * BLOCK)
    liked = np.array([0, 1, 0, 0, 0], np.float32)
    for position in choice.watched(0, 5 * BLOCK):
        choice.take(position, liked[: position // BLOCK])
    assert choice.settle(5 * BLOCK) == []
    order = []
    for block in range(5, 12):
        for position in choice.watched(block * BLOCK, (block + 1) * BLOCK):
            mass = np.full(position // BLOCK, 0.02, np.float32)
            mass[1] = 0
            choice.take(position, mass)
        order += [i for _, gone in choice.settle((block + 1) * BLOCK) for i in gone]
    assert order[0] != 1
    assert 1 in order


@pytest.mark.parametrize("codec", [snapkv(), critic()], ids=["snapkv", "critic"])
@pytest.mark.parametrize("prompt", [100, 112, 203])
def test_parts_and_restarts_choose_the_same(codec: SelectingCodec, prompt: int) -> None:
    """Prompts in parts, answers token by token or some at once, preempted anywhere and read again from anywhere."""
    end = prompt + 100
    plain = codec.choice(prompt)
    expected, then = read(plain, prompt, []), []
    for position in range(prompt, end):
        then.append(plain.read_at(position))
        expected += read(plain, position + 1, [], position)
    # What was forgotten later a row that is read again still sees.
    assert [plain.read_at(position) for position in range(prompt, end)] == then
    draw = random.Random(prompt)
    for _ in range(20):
        choice, found, settled, done = codec.choice(prompt), [], 0, 0
        while done < end:
            # Read again to where it was, in parts, then on: the prompt to its end at most, the answer a block's.
            limit = prompt if done < prompt else min((done // BLOCK + 1) * BLOCK, end)
            step = min(settled + draw.randrange(1, 40), limit)
            found += read(choice, step, [], settled)
            done = max(done, step)
            settled = step if draw.random() < 0.9 else 0
        assert found == expected
        assert [choice.read_at(i) for i in range(end)] == [plain.read_at(i) for i in range(end)]


def test_only_what_is_asked_decides() -> None:
    """Attention of other rows changes nothing; that of the last ones does."""
    asked = list(snapkv().choice(200).watched(0, 200))
    assert asked == list(range(192, 200))
    assert list(critic().choice(200).watched(0, 195)) == [192, 193, 194]
    choice = critic().choice(200)
    read(choice, 200, [])
    assert list(choice.watched(200, 208)) == list(range(200, 208))  # eight, none of the prompt's
    read(choice, 208, [], 200)
    assert list(choice.watched(208, 224)) == list(range(216, 224))
    kept = []
    for seed in range(6):
        choice = snapkv().choice(200)
        for position in choice.watched(0, 200):
            choice.take(position, mass_of(position, seed))
        choice.settle(200)
        kept.append(tuple(choice.read_at(200)))  # type: ignore[arg-type]
    assert len(set(kept)) > 3


def test_lists_as_kernels_have_them() -> None:
    one, other = [0, 2, 3], [1]
    lists, lengths, of_row = lists_of([ALL, one, one, other, ALL, one])
    assert of_row.tolist() == [-1, 0, 0, 1, -1, 0]
    assert [lists[i, : lengths[i]].tolist() for i in range(2)] == [one, other]
    lists, lengths, of_row = lists_of([ALL, ALL])
    assert of_row.tolist() == [-1, -1]
    assert lists.shape == (1, 1)


@pytest.mark.parametrize("options", [{"budget": 0}, {"watched": 0}, {"window": None}, {"decay": 1.0}])
def test_options_that_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CriticOptions.model_validate(options)


def test_a_budget_that_its_ends_use_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget=32 is not allowed.*allowed: 48 or more"):
        snapkv(budget=32, sinks=17)
