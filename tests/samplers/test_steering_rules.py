# SPDX-License-Identifier: Apache-2.0
"""Rules that make p of several distributions, beside the papers' formulas written out in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ASKED
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_ext.samplers import anchored, artifact_file, dola, momentum, svdecode
from vllm_ext.samplers.anchored import AnchoredOptions, AnchoredParams, AnchoredRule
from vllm_ext.samplers.artifact_file import Header
from vllm_ext.samplers.base import Asked, Row
from vllm_ext.samplers.caad import CaadOptions, CaadParams, CaadRule
from vllm_ext.samplers.cad import CadOptions, CadParams, CadRule
from vllm_ext.samplers.contrastive import ContrastiveOptions, ContrastiveParams, ContrastiveRule
from vllm_ext.samplers.dola import DolaOptions, DolaParams, DolaRule
from vllm_ext.samplers.entropy_adaptive import (
    EntropyAdaptiveOptions,
    EntropyAdaptiveParams,
    EntropyAdaptiveRule,
)
from vllm_ext.samplers.lol import LolOptions, LolParams, LolRule
from vllm_ext.samplers.momentum import MomentumOptions, MomentumParams, MomentumRule
from vllm_ext.samplers.steering import SteeringRule
from vllm_ext.samplers.svdecode import SvdecodeOptions, SvdecodeParams, SvdecodeRule

VOCAB, END = 211, 2
INF = math.inf


def at(logits: torch.Tensor, ids: Any) -> torch.Tensor:
    return logits.clone() if ids is None else logits.gather(-1, ids.expand(*logits.shape[:-1], ids.shape[-1]))


class Fixed:
    """Logits that are given: of layers ``[num_layers, num_rows, vocab]``, of a second model ``[num_rows, vocab]``."""

    def __init__(
        self,
        early: torch.Tensor | None = None,
        second: torch.Tensor | None = None,
        second_early: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        target: torch.Tensor | None = None,
        pair: Fixed | None = None,
    ) -> None:
        self._early, self._second, self._second_early, self._hidden = early, second, second_early, hidden
        self._target, self._pair = target, pair

    def layers(self, layers: Sequence[int], norm: bool, ids: Any = None) -> torch.Tensor:
        assert self._early is not None
        assert len(layers) == len(self._early)
        return at(self._early, ids)

    def companion(self, ids: Any = None) -> torch.Tensor:
        assert self._second is not None
        return at(self._second, ids)

    def companion_layers(self, layers: Sequence[int], norm: bool, ids: Any = None) -> torch.Tensor:
        assert self._second_early is not None
        return at(self._second_early, ids)

    def target(self) -> torch.Tensor:
        assert self._target is not None
        return self._target

    def of_pairs(self, which: Sequence[bool]) -> Fixed:
        assert self._pair is not None
        rows, mixed = torch.tensor(which)[:, None], Fixed()
        for name in ("_early", "_second", "_second_early", "_target"):
            pair, own = getattr(self._pair, name), getattr(self, name)
            setattr(mixed, name, pair if own is None else torch.where(rows, pair, own))
        return mixed

    def hidden(self) -> torch.Tensor:
        assert self._hidden is not None
        return self._hidden


def logits_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(params: Any, count: int, asked: Asked = ASKED) -> list[Row]:
    return [Row([5, 6], [], END, params, asked) for _ in range(count)]


def applied(
    rule: SteeringRule, logits: torch.Tensor, rows: Sequence[Row], aux_logits: Fixed | None = None
) -> torch.Tensor:
    if aux_logits is not None:
        rule.aux_logits = aux_logits
    result = logits.clone()
    rule.apply(result, rows)
    return result


def assert_same_scores(found: torch.Tensor, expected: Any) -> None:
    """Of the same tokens, up to what is added to all of them."""
    kept = expected > -INF
    np.testing.assert_array_equal(found.numpy() > -INF, kept)
    left, right = found.double().numpy()[kept], expected[kept]
    np.testing.assert_allclose(left - left.max(), right - right.max(), atol=1e-5)


def softmax(scores: Any) -> Any:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


# Contrastive


def contrastive(**options: Any) -> ContrastiveRule:
    return ContrastiveRule(ContrastiveOptions(model="amateur", **options))


def contrast_by_formula(expert: Any, amateur: Any, beta: float, alpha: float) -> Any:
    p = softmax(expert)
    return np.where(p >= alpha * p.max() * (1 - 1e-12), (1 + beta) * expert - beta * amateur, -INF)


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 0.1), (0.0, 0.5), (2.0, 0.01)])
def test_contrastive_is_the_formula(beta: float, alpha: float) -> None:
    expert, amateur = logits_of(0, 6), logits_of(1, 6)
    rows = rows_of(ContrastiveParams(contrastive_beta=beta), 6)
    found = applied(contrastive(alpha=alpha), expert, rows, Fixed(second=amateur))
    for row in range(6):
        expected = contrast_by_formula(
            expert[row].double().numpy(), amateur[row].double().numpy(), beta, alpha
        )
        np.testing.assert_array_equal(found[row].numpy() == -INF, expected == -INF)
        kept = expected > -INF
        np.testing.assert_allclose(found[row].numpy()[kept], expected[kept], atol=1e-5)


def test_contrastive_ratio_is_the_formula() -> None:
    expert, amateur = logits_of(0, 3), logits_of(1, 3)
    rows = rows_of(ContrastiveParams(contrastive_form="ratio", contrastive_amateur_temperature=0.5), 2)
    rows += rows_of(ContrastiveParams(), 1)
    found = applied(contrastive(), expert, rows, Fixed(second=amateur))
    for row in range(2):
        p, q = (softmax(z[row].double().numpy() / t) for z, t in ((expert, 1.0), (amateur, 0.5)))
        assert_same_scores(found[row], np.where(p >= 0.1 * p.max(), np.log(p) - np.log(q), -INF))
    alone = applied(contrastive(), expert[2:], rows[2:], Fixed(second=amateur[2:]))
    assert torch.equal(found[2:], alone)


def test_contrastive_properties() -> None:
    expert, amateur = logits_of(2, 5), logits_of(3, 5)
    rows = rows_of(ContrastiveParams(), 5)
    aux_logits = Fixed(second=amateur)
    strict = applied(contrastive(alpha=1.0), expert, rows, aux_logits)
    assert torch.equal(strict.argmax(1), expert.argmax(1))
    same = applied(contrastive(), expert, rows, Fixed(second=expert))
    kept = same > -INF
    torch.testing.assert_close(same.softmax(1)[kept], (torch.where(kept, expert, -INF)).softmax(1)[kept])
    even = applied(contrastive(form="ratio"), expert, rows, Fixed(second=expert))
    assert float((even[kept].exp() - 1).abs().max()) < 1e-5
    shifted = applied(contrastive(), expert, rows, Fixed(second=amateur + 7.0))
    found = applied(contrastive(), expert, rows, aux_logits)
    torch.testing.assert_close(shifted.softmax(1), found.softmax(1), atol=1e-5, rtol=1e-4)
    p = expert.softmax(1)
    assert bool((p[found > -INF] >= 0.0999 * p.amax(1, keepdim=True).expand_as(p)[found > -INF]).all())
    for row in range(5):
        alone = applied(contrastive(), expert[row : row + 1], rows[:1], Fixed(second=amateur[row : row + 1]))
        assert torch.equal(found[row], alone[0])


def test_contrastive_where_one_model_knows_no_such_token() -> None:
    expert, amateur = logits_of(2, 2), logits_of(3, 2)
    expert[0, 10:] = -INF  # a mask
    amateur[0, :5] = -INF
    amateur[1] = -INF
    found = applied(contrastive(alpha=1e-6), expert, rows_of(ContrastiveParams(), 2), Fixed(second=amateur))
    assert set(torch.nonzero(found[0] > -INF).flatten().tolist()) <= set(range(5, 10))
    assert found[0].max() > -INF
    assert found[1].argmax() == expert[1].argmax()
    assert not found.isnan().any()


# DoLa


def dola_rule(**options: Any) -> DolaRule:
    rule = DolaRule(DolaOptions(**{"among": None, **options}))
    rule.layer_numbers = DolaRule.layers(rule.options, 12)
    return rule


def dola_by_formula(final: Any, early: Sequence[Any], alpha: float) -> tuple[int, Any]:
    p = softmax(final)
    divergences = []
    for z in early:
        q = softmax(z)
        middle = (p + q) / 2
        divergences.append(((p * np.log(p / middle)).sum() + (q * np.log(q / middle)).sum()) / 2)
    chosen = int(np.argmax(divergences))
    return chosen, np.where(p >= alpha * p.max(), np.log(p) - np.log(softmax(early[chosen])), -INF)


def test_dola_is_the_formula_row_by_row() -> None:
    final, early = logits_of(0, 8), logits_of(1, 3, 8)
    rows = rows_of(DolaParams(), 8)
    rule = dola_rule(candidates=[2, 4, 8])
    found = applied(rule, final, rows, Fixed(early=early))
    chosen = set()
    for row in range(8):
        layer, expected = dola_by_formula(
            final[row].double().numpy(), [z[row].double().numpy() for z in early], 0.1
        )
        chosen.add(layer)
        assert_same_scores(found[row], expected)
        alone = applied(rule, final[row : row + 1], rows[:1], Fixed(early=early[:, row : row + 1]))
        assert torch.equal(found[row], alone[0])
    assert len(chosen) > 1
    strict = applied(dola_rule(candidates=[2, 4, 8], alpha=1.0), final, rows, Fixed(early=early))
    assert torch.equal(strict.argmax(1), final.argmax(1))


def test_dola_with_one_layer_and_masks() -> None:
    final, early = logits_of(0, 2), logits_of(1, 1, 2)
    final[:, 7:] = -INF
    found = applied(dola_rule(candidates=[3]), final, rows_of(DolaParams(), 2), Fixed(early=early))
    assert not found.isnan().any()
    assert bool((found[:, 7:] == -INF).all())
    two = applied(
        dola_rule(candidates=[3, 5]), final, rows_of(DolaParams(), 2), Fixed(early=torch.cat([early, early]))
    )
    torch.testing.assert_close(found.softmax(1), two.softmax(1))


def test_divergences_are_symmetric_and_bounded() -> None:
    one, other = (logits_of(seed, 4).double().log_softmax(1) for seed in (1, 2))
    there, back = dola.divergence(one, other[None]), dola.divergence(other, one[None])
    torch.testing.assert_close(there, back)
    assert bool((there > 0).all())
    assert bool((there <= math.log(2)).all())
    torch.testing.assert_close(dola.divergence(one, one[None]), torch.zeros(1, 4).double())
    apart = torch.full((2, 1, 4), -200.0)
    apart[0, 0, :2], apart[1, 0, 2:] = 0.0, 0.0
    torch.testing.assert_close(dola.divergence(apart[0], apart[1:]), torch.tensor([[math.log(2)]]))
    masked = torch.where(torch.arange(VOCAB) < 9, one.exp(), -INF)
    few = dola.divergence(one[:, :9].exp(), other[None, :, :9])
    torch.testing.assert_close(dola.divergence(masked, other[None]), few)


def test_dola_among_few_tokens() -> None:
    """The layer is chosen as if there were no others; with all of them among these nothing is different."""
    final, early = logits_of(0, 8), logits_of(1, 3, 8)
    rows, aux_logits = rows_of(DolaParams(), 8), Fixed(early=early)
    every = applied(dola_rule(candidates=[2, 4, 8]), final, rows, aux_logits)
    torch.testing.assert_close(
        applied(dola_rule(candidates=[2, 4, 8], among=VOCAB), final, rows, aux_logits).softmax(1),
        every.softmax(1),
    )
    found = applied(dola_rule(candidates=[2, 4, 8], among=6), final, rows, aux_logits)
    for row in range(8):
        ids = final[row].topk(6).indices
        layer, _ = dola_by_formula(
            final[row, ids].double().numpy(), [z[row, ids].double().numpy() for z in early], 0.1
        )
        p = softmax(final[row].double().numpy())
        expected = np.log(p) - early[layer, row].double().numpy()
        assert_same_scores(found[row], np.where(p >= 0.1 * p.max(), expected, -INF))


def test_dola_layers() -> None:
    assert list(DolaRule.layers(DolaOptions(), 30)) == [2, 4, 6, 8, 10, 12, 14]
    assert list(DolaRule.layers(DolaOptions(candidates="high"), 30)) == [16, 18, 20, 22, 24, 26, 28]
    assert list(DolaRule.layers(DolaOptions(), 2)) == [1]
    for wrong in ([30], [], [4, 2], [-1]):
        with pytest.raises(ValueError, match="allowed: 'low', 'high' or some of 0 to 29, ascending"):
            DolaRule.layers(DolaOptions(candidates=wrong), 30)


# Momentum


def longest_repeat(text: list[int], candidate: int, longest: int) -> int:
    after = [*text, candidate]
    for length in range(longest, 0, -1):
        if any(after[i : i + length] == after[-length:] for i in range(len(after) - length)):
            return length
    return 0


@given(st.lists(st.integers(0, 3), max_size=24), st.integers(1, 6))
def test_stretches_by_brute_force(text: list[int], longest: int) -> None:
    candidates = np.arange(5, dtype=np.int32)
    found = momentum.repeated(np.array(text, dtype=np.int32), candidates, longest)
    assert found.tolist() == [longest_repeat(text, candidate, longest) for candidate in range(5)]


def test_momentum_breaks_circles_and_nothing_else() -> None:
    rule = MomentumRule(MomentumOptions())
    greedy = Asked(temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 20], logits[0, 30] = 5.0, 4.0
    new = [Row([1, 2, 3], [4], END, MomentumParams(), greedy)]
    assert int(applied(rule, logits, new).argmax()) == 20
    circle = [Row([1], [20, 21, 22, 20, 21, 22], END, MomentumParams(), greedy)]
    assert int(applied(rule, logits, circle).argmax()) == 30
    one = [Row([1], [20, 21, 22, 20, 21, 22], END, MomentumParams(momentum_k=1), greedy)]
    assert int(applied(rule, logits, one).argmax()) == 20
    free = [Row([1], [20, 21, 22, 20, 21, 22], END, MomentumParams(momentum_alpha=0.0), greedy)]
    assert int(applied(rule, logits, free).argmax()) == 20
    problem = MomentumRule.problem(MomentumOptions(), MomentumParams(), ASKED)
    assert problem is not None
    assert "set temperature=0" in problem


# Anchored


def kl(log_q: torch.Tensor, log_p: torch.Tensor) -> float:
    q = log_q.double().exp()
    return float(torch.where(q > 0, q * (log_q.double() - log_p.double()), 0.0).sum())


@pytest.mark.parametrize("budget", [0.0, 1e-4, 0.02, 0.15, 1.0, 3.0, 100.0])
def test_the_nearest_point_is_bisections(budget: float) -> None:
    risky, safe = (logits_of(seed, 4).double().log_softmax(1) for seed in (4, 5))
    log_q, spent = anchored.nearest(risky, safe, torch.full((4,), budget, dtype=torch.float64))
    for row in range(4):
        low, high = 0.0, 1.0
        for _ in range(200):
            theta = (low + high) / 2
            point = ((1 - theta) * safe[row] + theta * risky[row]).log_softmax(0)
            low, high = (theta, high) if kl(point, safe[row]) <= budget else (low, theta)
        expected = ((1 - low) * safe[row] + low * risky[row]).log_softmax(0)
        torch.testing.assert_close(log_q[row], expected, atol=1e-5, rtol=0)
        assert float(spent[row]) == pytest.approx(kl(log_q[row], safe[row]), abs=1e-9)
        assert kl(log_q[row], safe[row]) <= budget + 1e-9
    if budget == 0.0:
        assert torch.equal(log_q, safe)
    if budget == 100.0:
        torch.testing.assert_close(log_q, risky)


def test_tokens_that_one_model_rules_out() -> None:
    risky, safe = logits_of(4, 3).double(), logits_of(5, 3).double()
    risky[:, :3] = -INF
    safe[:, 3:6] = -INF
    risky, safe = risky.log_softmax(1), safe.log_softmax(1)
    log_q, spent = anchored.nearest(risky, safe, torch.tensor([0.0, 0.5, 50.0], dtype=torch.float64))
    assert not log_q.isnan().any()
    assert bool((log_q[:, 3:6] == -INF).all())
    assert bool((log_q[1:, :3] == -INF).all())
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(3).double())
    for row in range(3):
        assert float(spent[row]) == pytest.approx(kl(log_q[row], safe[row]), abs=1e-9)
    assert float(spent[1]) <= 0.5


def anchored_rule(**options: Any) -> AnchoredRule:
    return AnchoredRule(AnchoredOptions(model="safe", **options))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_a_budget_is_never_exceeded(temperature: float) -> None:
    rule = anchored_rule(k=0.3, debt=0.8)
    output: list[int] = []
    asked = Asked(temperature=temperature)
    row = Row([5], output, END, AnchoredParams(), asked)
    heat = temperature or 1.0
    total = 0.0
    for step in range(200):
        risky, safe = logits_of(2 * step, 1), logits_of(2 * step + 1, 1)
        if step % 3 == 0:
            safe = risky + 0.1 * safe  # earns more than it spends
        found = applied(rule, risky, [row], Fixed(second=safe))
        total += kl((found / heat).log_softmax(1), (safe / heat).log_softmax(1))
        assert total <= max(0.3 * (step + 1) - 0.8, 0.0) + 1e-3
        if 0.3 * (step + 1) <= 0.8:
            torch.testing.assert_close(
                (found / heat).softmax(1), (safe / heat).softmax(1), atol=1e-6, rtol=1e-4
            )
        output.append(3)
    assert total > 0.8 * (0.3 * 200 - 0.8)
    assert sum(row.notes.values()) == pytest.approx(total, abs=1e-2)


def test_a_path_that_was_left_spends_nothing() -> None:
    """A row of a tree replaces what another one at its place had spent; rows behind it see the one that was taken."""
    rule, one, other = anchored_rule(k=0.2), logits_of(0, 1), logits_of(1, 1)
    kept: dict[int, Any] = {}
    row = Row([5], [], END, AnchoredParams(), ASKED, kept=kept)
    applied(rule, one, [row], Fixed(second=other))
    first = kept[0]
    applied(rule, one, [Row([5], [9], END, AnchoredParams(), ASKED, kept=kept)], Fixed(second=other))
    assert kept[1] == pytest.approx(first + 0.2, abs=1e-4)
    applied(rule, one, [Row([5], [8], END, AnchoredParams(), ASKED, kept=kept)], Fixed(second=one))
    assert kept[1] == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize(
    "asked",
    [
        Asked(truncates=True),
        Asked(penalizes=True),
        Asked(structured=True),
        Asked(lists_tokens=True),
        Asked(min_tokens=4),
        Asked(num_answers=2),
    ],
)
def test_anchored_refuses_what_breaks_its_promise(asked: Asked) -> None:
    assert AnchoredRule.problem(AnchoredOptions(model="safe"), AnchoredParams(), asked) is not None
    assert AnchoredRule.problem(AnchoredOptions(model="safe"), AnchoredParams(), ASKED) is None


# Entropy-adaptive


def entropy_rule(**options: Any) -> EntropyAdaptiveRule:
    return EntropyAdaptiveRule(EntropyAdaptiveOptions(model="small", **options))


def test_a_switch_by_rolling_entropy() -> None:
    """Row by row as the definition says it, over entropies that rise and fall."""
    rule = entropy_rule(threshold=2.0, window=3, dwell=4)
    output: list[int] = []
    row = Row([5], output, END, EntropyAdaptiveParams(), ASKED)
    target, since = True, 4
    seen: list[float] = []
    changes = 0
    for step in range(120):
        heat = 0.5 + 2.0 * (step % 24 >= 12)
        large, small = logits_of(2 * step, 1) / heat, logits_of(2 * step + 1, 1) / heat
        if seen:
            wanted = float(np.mean(seen[-3:])) > 2.0
            if wanted != target and since >= 4:
                target, since = wanted, 0
                changes += 1
            since += 1
        found = applied(rule, large, [row], Fixed(second=small))
        assert torch.equal(found, large if target else small)
        p = softmax((large if target else small)[0].double().numpy())
        seen.append(-(p * np.log(p)).sum())
        output.append(3)
    assert changes > 4


def test_thresholds_that_leave_one_model() -> None:
    large, small = logits_of(0, 1), logits_of(1, 1)
    for threshold, expected in ((0.0, large), (100.0, small)):
        row = Row([5], [3], END, EntropyAdaptiveParams(entropy_adaptive_threshold=threshold), ASKED)
        first = Row([5], [], END, row.params, ASKED, kept=row.kept)
        applied(entropy_rule(), large, [first], Fixed(second=small))
        assert torch.equal(applied(entropy_rule(), large, [row], Fixed(second=small)), expected)


# LOL


def test_lol_behind_an_instruction() -> None:
    """Of rows with one all but the last term is of the pair's; without it nothing is."""
    own = [logits_of(seed, 4) for seed in range(4)]
    pairs = [logits_of(seed + 10, 4) for seed in range(4)]
    expert, amateur, low, low_amateur = own
    expert[:, 11] = -INF  # as a grammar leaves it
    pairs[0][:, 11] = 30.0
    aux_logits = Fixed(
        low[None],
        amateur,
        low_amateur[None],
        target=expert,
        pair=Fixed(pairs[2][None], pairs[1], pairs[3][None], target=pairs[0]),
    )
    rule = LolRule(LolOptions(model="amateur", omega=0.6, alpha=0.01, mu=0.7))
    rule.layer_numbers, rule.companion_layer_numbers = [6], [3]
    with_it, without = LolParams(lol_instruction="be honest"), LolParams()
    rows = [
        *rows_of(with_it, 2),
        *rows_of(without, 1),
        *rows_of(LolParams(lol_instruction="x", lol_mu=0.0), 1),
    ]
    found = applied(rule, expert, rows, aux_logits)
    for row in range(4):
        z, a, z_j, a_j = [each[row].double().numpy() for each in (own if row == 2 else pairs)]
        z = np.where(expert[row].numpy() == -INF, -INF, z)
        scores = 2 * z - a + 0.6 * (2 * z_j - a_j)
        if row < 2:
            scores = scores + 0.7 * expert[row].double().numpy()
        p = softmax(z)
        assert_same_scores(found[row], np.where(p >= 0.01 * p.max() * (1 - 1e-9), scores, -INF))


def test_lol_is_the_formula() -> None:
    expert, low, amateur, low_amateur = (logits_of(seed, 4) for seed in range(4))
    rule = LolRule(LolOptions(model="amateur", low_beta=0.7))
    rule.layer_numbers, rule.companion_layer_numbers = [6], [3]
    aux_logits = Fixed(early=low[None], second=amateur, second_early=low_amateur[None])
    found = applied(rule, expert, rows_of(LolParams(lol_beta=0.4, lol_omega=0.6), 4), aux_logits)
    for row in range(4):
        p, q, r, s = (np.log(softmax(z[row].double().numpy())) for z in (expert, amateur, low, low_amateur))
        expected = 1.4 * p - 0.4 * q + 0.6 * (1.7 * r - 0.7 * s)
        assert_same_scores(found[row], np.where(np.exp(p) >= 0.1 * np.exp(p).max(), expected, -INF))
    bare = applied(rule, expert, rows_of(LolParams(lol_omega=0.0), 4), Fixed(low[None], expert, low[None]))
    kept = bare > -INF
    torch.testing.assert_close(bare[kept], expert[kept], atol=1e-4, rtol=1e-4)
    assert LolRule.layers(LolOptions(model="self"), 30) == [15]
    assert LolRule.companion_layers(LolOptions(model="self", amateur_layer=1), 4) == [1]
    with pytest.raises(ValueError, match="amateur_layer=4 is not allowed; allowed: 0 to 3"):
        LolRule.companion_layers(LolOptions(model="self", amateur_layer=4), 4)


# SVDecode


def header(rule: str) -> Header:
    return Header(rule=rule, created="2026-01-01", model="toy", fingerprint="0", made_of=3)


def test_directions_are_the_gradients() -> None:
    """By finite differences: the directional derivative of KL(softmax(z) || q) along each logit."""
    tuned, original = logits_of(0, 2).double(), logits_of(1, 2).double()
    found = svdecode.direction(tuned, original, 1e-12)
    torch.testing.assert_close(found.sum(1), torch.zeros(2).double(), atol=1e-12, rtol=0)
    q = original.log_softmax(1)
    for token in range(0, VOCAB, 17):
        there, back = tuned.clone(), tuned.clone()
        there[:, token] += 1e-6
        back[:, token] -= 1e-6
        for row in range(2):
            slope = (kl(there[row].log_softmax(0), q[row]) - kl(back[row].log_softmax(0), q[row])) / 2e-6
            assert float(found[row, token]) == pytest.approx(slope, abs=1e-7)
    assert not svdecode.direction(tuned, tuned, 1e-12).abs().max() > 1e-12


def test_the_best_strength_is_a_newton_step() -> None:
    tuned, delta = logits_of(0, 40).double(), logits_of(1, 1)[0].double() * 0.1
    tokens = (tuned + 2.0 * delta).argmax(1)

    def loss(mu: float) -> float:
        return -float((tuned + mu * delta).log_softmax(1).gather(1, tokens[:, None]).sum())

    slope, curvature = (loss(1e-4) - loss(-1e-4)) / 2e-4, (loss(1e-3) - 2 * loss(0) + loss(-1e-3)) / 1e-6
    found = svdecode.best_strength(tuned, delta, tokens)
    assert found == pytest.approx(-slope / curvature, rel=1e-3)
    assert svdecode.best_strength(tuned, torch.zeros(VOCAB), tokens) == 0.0


def test_svdecode_moves_plausible_tokens_only(tmp_path: Path) -> None:
    delta = logits_of(7, 1)[0]
    file = tmp_path / "task.guide"
    artifact_file.write(file, {"delta": delta[:200].clone(), "mu": torch.tensor(2.0)}, header("svdecode"))
    rule = SvdecodeRule(SvdecodeOptions(file=str(file), alpha=0.3))
    logits = logits_of(0, 3)
    rows = rows_of(SvdecodeParams(), 1) + rows_of(SvdecodeParams(svdecode_strength=0.0), 1)
    rows += rows_of(SvdecodeParams(svdecode_strength=-1.0, svdecode_alpha=1.0), 1)
    found = applied(rule, logits, rows)
    p = logits.softmax(1)
    kept = p[0] >= 0.3 * p[0].max()
    kept[200:] = False
    expected = torch.where(kept, logits[0] + 2.0 * delta, logits[0])
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[1], logits[1])
    assert int((found[2] != logits[2]).sum()) == 1
    with pytest.raises(ValueError, match=r"file=.* has 200 tokens, the model 100"):
        SvdecodeRule.check(rule.options, 100, lambda: "")


# CAAD


def test_caad_adds_what_neighbours_say(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    contexts = torch.nn.functional.normalize(torch.randn(20, 16, generator=generator), dim=1)
    kept = logits_of(3, 20).log_softmax(1).topk(12, 1)
    gains = kept.values - kept.values[:, -1:]
    file = tmp_path / "store"
    artifact_file.write(
        file, {"contexts": contexts, "ids": kept.indices.int(), "gains": gains}, header("caad")
    )
    rule = CaadRule(CaadOptions(file=str(file), neighbours=3, threshold=0.5, temperature=0.2))
    logits, hidden = logits_of(0, 4), torch.randn(4, 16, generator=generator)
    hidden[0], hidden[1] = contexts[5] * 7.0, contexts[5] + 0.1 * hidden[1]
    hidden[2] = contexts[9]
    hidden[3] = -contexts.sum(0)  # nothing is near
    rows = rows_of(CaadParams(), 2) + rows_of(CaadParams(caad_strength=0.0), 1) + rows_of(CaadParams(), 1)
    found = applied(rule, logits, rows, Fixed(hidden=hidden))
    for row in range(2):
        unit = hidden[row].double() / hidden[row].double().norm()
        similar = contexts.double() @ unit
        best = similar.argsort(descending=True)[:3]
        weights = softmax(similar[best].numpy() / 0.2)
        expected = logits[row].double().clone()
        for weight, place in zip(weights, best.tolist(), strict=True):
            expected[kept.indices[place]] += 0.5 * float(similar.max()) * weight * gains[place].double()
        torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[2:], logits[2:])
    strong = rows_of(CaadParams(caad_strength=100.0), 1)
    alone = applied(
        CaadRule(CaadOptions(file=str(file), neighbours=1)), logits[:1], strong, Fixed(hidden=hidden[:1])
    )
    assert int(alone.argmax()) == int(kept.indices[5, 0])


def test_files_of_other_rules_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "task.guide"
    artifact_file.write(file, {"delta": torch.zeros(3), "mu": torch.tensor(2.0)}, header("svdecode"))
    with pytest.raises(ValueError, match="is a file of rule svdecode, not of caad"):
        artifact_file.read("file", str(file), "caad")
    with pytest.raises(ValueError, match=r"file='/none' cannot be read .*`vllm-ext caad build`"):
        artifact_file.read("file", "/none", "caad")
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="cannot be read"):
        artifact_file.read("file", str(file), "svdecode")


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (ContrastiveParams, {"contrastive_alpha": 0.0}),
        (ContrastiveParams, {"contrastive_form": "sum"}),
        (DolaParams, {"dola_alpha": 2.0}),
        (MomentumParams, {"momentum_k": 0}),
        (AnchoredParams, {"anchored_k": -1.0}),
        (EntropyAdaptiveParams, {"entropy_adaptive_threshold": -1.0}),
        (ContrastiveParams, {"contrastive": "yes"}),
    ],
)
def test_wrong_parameters(cls: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls(**wrong)


# Context-aware


@pytest.mark.parametrize(("alpha", "least"), [(0.5, 0.0), (1.0, 0.1), (0.0, 0.0), (3.0, 1.0)])
def test_cad_is_the_formula(alpha: float, least: float) -> None:
    with_it, without = logits_of(2, 5), logits_of(3, 5)
    with_it[:, 7] = -INF  # as a grammar leaves it
    rule = CadRule(CadOptions(alpha=9.0, plausible=least))
    found = applied(
        rule,
        with_it,
        rows_of(CadParams(cad_context="x", cad_alpha=alpha), 5),
        Fixed(pair=Fixed(target=without)),
    )
    for row in range(5):
        z, z_0 = with_it[row].double().numpy(), without[row].double().numpy()
        p = softmax(z)
        expected = np.where(
            (p >= least * p.max() * (1 - 1e-9)) & (p > 0), (1 + alpha) * z - alpha * z_0, -INF
        )
        np.testing.assert_array_equal(found[row].numpy() == -INF, expected == -INF)
        kept = expected > -INF
        np.testing.assert_allclose(found[row].numpy()[kept], expected[kept], atol=1e-5)
    if alpha == 0.0:
        assert torch.equal(found, with_it)


def test_cad_is_linear_in_alpha() -> None:
    z, z_0 = logits_of(4, 3), logits_of(5, 3)
    scores = [
        applied(
            CadRule(CadOptions(alpha=a)),
            z,
            rows_of(CadParams(cad_context="x"), 3),
            Fixed(pair=Fixed(target=z_0)),
        )
        for a in (0.0, 1.0, 2.0)
    ]
    torch.testing.assert_close(scores[2] - scores[1], scores[1] - scores[0], atol=1e-5, rtol=0)
