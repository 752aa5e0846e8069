# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Drawn trees on the device: the host's decisions for the same numbers, in every form, and the target's law.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from drawn_cases import DEVICE, Batch, P, law, many_draws, one_row, random_batch
from interpreter import IN_INTERPRETER
from scipy import stats

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.drawn_rows import CHOSEN, K_SEQ, RECURSIVE, DrawnTrees
from vllm_ext.kernels.drawn_rows_ref import uniform
from vllm_ext.kernels.drawn_rows_triton import _uniform
from vllm_ext.kernels.sparse import Float64, Sparse
from vllm_ext.samplers import k_seq, recursive_rejection

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
every_form = pytest.mark.parametrize("form", FORMS)
DRAWS = 20_000
LIKELY = 1e-3  # p-values above: the law is the target's

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


class Scripted:
    """Decides by the kernel's numbers, and keeps the weights of a draw."""

    def __init__(self, seed: int, position: int) -> None:
        self.seed, self.position, self.index = seed, position, 0
        self.weights: Float64 | None = None

    def accepts(self, numerator: float, denominator: float) -> bool:
        number = uniform(self.seed, self.position, self.index)
        self.index += 1
        return number * denominator < numerator

    def draw(self, weights: Float64) -> int:
        self.weights = weights / weights.sum()
        return -1


def hosts(batch: Batch) -> list[tuple[int, Float64] | None]:
    """By the samplers of the host: each row's token or -1, and what is left; None for rows without drawn children."""
    found: list[tuple[int, Float64] | None] = [None] * len(batch.logits)
    drawn = DrawnTrees(*(part.cpu() for part in batch.drawn))
    for request, slot in enumerate(batch.slots.tolist()):
        start, end = batch.row_start[request : request + 2].tolist()
        if start == end or batch.positions[start] < batch.prefill_len[slot] or drawn.kind[slot] == CHOSEN:
            continue
        choose = recursive_rejection.choose if drawn.kind[slot] == RECURSIVE else k_seq.choose
        for row in range(end - start):
            children = [
                int(batch.tokens[start + child])
                for child in range(1, end - start)
                if drawn.child_of[slot, child] == row
            ]
            which = int(drawn.q_row[slot, row])
            if which < 0 or not children:
                continue
            ids, q = drawn.ids[slot, which].numpy(), drawn.q[slot, which].double().numpy()
            chance = Scripted(int(batch.seeds[slot]), int(batch.positions[start + row]))
            p = law(batch.logits[start + row])
            token = choose(p, children, Sparse(ids[ids >= 0], q[ids >= 0]), chance)
            found[start + row] = token, p if chance.weights is None else chance.weights
    return found


@every_form
@pytest.mark.parametrize("seed", range(16 if IN_INTERPRETER else 25))
def test_every_row_is_decided_as_on_the_host(seed: int, form: Backend) -> None:
    batch = random_batch(np.random.default_rng(seed))
    accepted, logits = batch.chosen(form)
    for row, expected in enumerate(hosts(batch)):
        before, after = batch.logits[row], logits[row]
        if expected is None:
            assert accepted[row] == -1
            assert torch.equal(before, after)
            continue
        token, left = expected
        assert accepted[row] == token
        if token >= 0:
            assert torch.equal(before, after)
        np.testing.assert_allclose(law(after), left, atol=1e-5, rtol=0)


def test_the_cases_of_that_test_are_many() -> None:
    """Over its seeds: both laws accept and reject, and there are rows that they leave alone."""
    rows = [row for seed in range(25) for row in hosts(random_batch(np.random.default_rng(seed)))]
    assert sum(row is None for row in rows) > 100
    assert sum(row is not None and row[0] >= 0 for row in rows) > 60
    assert sum(row is not None and row[0] < 0 for row in rows) > 60


@every_form
@pytest.mark.parametrize(("seed", "more"), [*((seed, 0) for seed in range(100, 106)), (106, 5000)])
def test_forms_are_equal(seed: int, more: int, form: Backend) -> None:
    """Also over more tokens than a form takes at once."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    others = torch.from_numpy(rng.normal(-6, 1, (len(batch.logits), more))).float().to(DEVICE)
    batch = batch._replace(logits=torch.cat([batch.logits, others], 1))
    (accepted, logits), (expected, expected_logits) = batch.chosen(form), batch.chosen("torch")
    assert accepted == expected
    np.testing.assert_allclose(law(logits), law(expected_logits), atol=1e-5, rtol=0)
    assert torch.equal(logits == batch.logits, expected_logits == batch.logits)  # what is written to


@every_form
@pytest.mark.parametrize("kind", [RECURSIVE, K_SEQ])
def test_edges(kind: int, form: Backend) -> None:
    # A child that the distribution does not have is rejected: of k-SEQ's reckoning it is one.
    batch = one_row(kind, [0.25, 0.25, 0.25, 0.25], [1, 2, -1], [0.5, 0.5, 0.0], [3])
    accepted, logits = batch.chosen(form)
    assert accepted == [-1, -1]
    left = [0.25] * 4 if kind == RECURSIVE else [0.5, 0.0, 0.0, 0.5]
    np.testing.assert_allclose(law(logits[0]), left, atol=1e-6)
    # Of the target nothing is left: the row stays.
    batch = one_row(kind, [0.0, 0.5, 0.5, 0.0], [1, 2], [0.5, 0.5], [3])
    accepted, logits = batch.chosen(form)
    assert accepted == [-1, -1]
    assert torch.equal(logits, batch.logits)
    # The target is the draft; a token of no chance; ids that the target does not have.
    assert one_row(kind, [0.0, 1.0, 0.0, 0.0], [1, -1], [1.0, 0.0], [1]).chosen(form)[0] == [1, -1]
    for p, ids in (([0.0, 0.5, 0.5, 0.0], [0, 2]), ([0.0, 0.5, 0.5, 0.0], [5, 2])):
        batch = one_row(kind, p, ids, [1.0, 0.0], [ids[0]])
        accepted, logits = batch.chosen(form)
        assert accepted == [-1, -1]
        np.testing.assert_allclose(law(logits[0]), p, atol=1e-6)
        assert torch.equal(logits[1], batch.logits[1])


@triton.jit
def numbers_of(seeds, positions, indices, found):
    at = tl.program_id(0)
    number = _uniform(tl.load(seeds + at), tl.load(positions + at), tl.load(indices + at))
    tl.store(found + at, number)


@pytest.mark.skipif("triton" not in FORMS, reason="runs in the interpreter")
def test_both_forms_have_the_same_numbers() -> None:
    rng = np.random.default_rng(3)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 200)).to(DEVICE)
    positions = torch.from_numpy(rng.integers(0, 2**40, 200)).to(DEVICE)
    indices = torch.from_numpy(rng.integers(0, 160, 200).astype(np.int32)).to(DEVICE)
    found = torch.zeros(200, device=DEVICE)
    numbers_of[(200,)](seeds, positions, indices, found)
    places = zip(seeds.tolist(), positions.tolist(), indices.tolist(), strict=True)
    assert found.tolist() == [uniform(*place) for place in places]


@pytest.mark.skipif(IN_INTERPRETER, reason="of the readable form")
def test_numbers_are_uniform() -> None:
    numbers = np.array(
        [
            [[uniform(seed, position, index) for index in range(4)] for position in range(40)]
            for seed in range(100)
        ]
    )
    assert 0.0 <= numbers.min() < numbers.max() < 1.0
    assert stats.chisquare(np.histogram(numbers, bins=50, range=(0, 1))[0]).pvalue > LIKELY
    for axis in range(3):  # neighbours have nothing to do with each other
        first, second = np.moveaxis(numbers, axis, 0)[:-1].ravel(), np.moveaxis(numbers, axis, 0)[1:].ravel()
        pairs = np.histogram2d(first, second, bins=7, range=[(0, 1), (0, 1)])[0]
        assert stats.chisquare(pairs.ravel()).pvalue > LIKELY


@every_form
@pytest.mark.parametrize("kind", [RECURSIVE, K_SEQ])
def test_forms_decide_alike_for_each_child(kind: int, form: Backend) -> None:
    batch = many_draws(kind, 40 if IN_INTERPRETER else 150, "", np.random.default_rng(4))
    (accepted, logits), (expected, expected_logits) = batch.chosen(form), batch.chosen("torch")
    assert accepted == expected
    np.testing.assert_allclose(law(logits), law(expected_logits), atol=1e-5, rtol=0)


def p_value(kind: int, fault: str, seed: int, form: Backend) -> float:
    """Of the next tokens of many rows against the target's law."""
    rng = np.random.default_rng(seed)
    batch = many_draws(kind, DRAWS, fault, rng)
    accepted, logits = batch.chosen(form)
    roots = batch.row_start[:-1].long()
    accepted_of = np.array(accepted)[roots.cpu().numpy()]
    left = np.broadcast_to(P, (DRAWS, len(P))) if fault == "residual" else law(logits[roots])
    with np.errstate(divide="ignore"):
        drawn_of = np.argmax(np.log(left) + rng.gumbel(size=left.shape), axis=1)
    tokens_of = np.where(accepted_of >= 0, accepted_of, drawn_of)
    assert 0.3 < (accepted_of >= 0).mean() < 0.97
    return float(stats.chisquare(np.bincount(tokens_of, minlength=len(P)), P * DRAWS).pvalue)


@pytest.mark.skipif(IN_INTERPRETER, reason="takes the interpreter minutes")
@every_form
@pytest.mark.parametrize("kind", [RECURSIVE, K_SEQ])
def test_the_next_token_has_the_targets_law(kind: int, form: Backend) -> None:
    assert p_value(kind, "", 1, form) > LIKELY


@pytest.mark.skipif(IN_INTERPRETER, reason="takes the interpreter minutes")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [(RECURSIVE, "order"), (RECURSIVE, "residual"), (K_SEQ, "distinct"), (K_SEQ, "residual")],
)
def test_that_test_finds_faults(kind: int, fault: str) -> None:
    assert p_value(kind, fault, 1, FORMS[-1]) < LIKELY
