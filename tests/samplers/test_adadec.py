# SPDX-License-Identifier: Apache-2.0
"""Rule adadec: where it pauses, what it tries, and how candidates are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ASKED

from vllm_ext.samplers.adadec import AdadecOptions, AdadecParams, AdadecRule
from vllm_ext.samplers.base import Row
from vllm_ext.samplers.steering import Candidate

PIECES: Sequence[bytes] = [b"", b"a", b"b\n", b"c"] * 20
GREEDY = replace(ASKED, temperature=0.0)


def rule_of(**options: Any) -> AdadecRule:
    vocabulary: Any = SimpleNamespace(pieces=PIECES)
    return AdadecRule.from_options(AdadecOptions(**options), vocabulary)


def row_of(place: int = 0, kept: dict[int, Any] | None = None, **params: Any) -> Row:
    return Row([1, 3], [1] * place, 0, AdadecParams(**params), GREEDY, kept=kept or {})


def logits_of(seed: int, count: int) -> torch.Tensor:
    scale = torch.linspace(0.5, 6.0, count)[:, None]
    return torch.randn(count, len(PIECES), generator=torch.Generator().manual_seed(seed)) * scale


def test_rows_that_are_not_sure_are_put_off() -> None:
    logits = logits_of(0, 6)
    p = np.exp(logits.double().numpy())
    p /= p.sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1)
    threshold = float(np.sort(entropy)[2:4].mean())
    rule, result = rule_of(threshold=threshold), logits.clone()
    rows = [row_of(place) for place in range(6)]
    rows[0] = row_of(0, adadec_candidates=2, adadec_lookahead=9)
    rule.apply(result, rows)
    assert torch.equal(result, logits)
    assert sorted(rule.deferrals) == np.flatnonzero(entropy > threshold).tolist()
    for place, pause in rule.deferrals.items():
        count, lookahead = (2, 9) if place == 0 else (3, 5)
        best = np.argsort(-p[place])[:count]
        assert (pause.at, pause.lookahead) == (place, lookahead)
        assert [each.token for each in pause.candidates] == best.tolist()
        np.testing.assert_allclose(
            [each.log_p for each in pause.candidates], np.log(p[place, best]), atol=1e-5
        )


def test_above_all_entropy_nothing_is_put_off() -> None:
    rule, logits = rule_of(threshold=math.log(len(PIECES)) + 0.1), torch.zeros(3, len(PIECES))
    rule.apply(logits, [row_of()] * 3)
    assert rule.deferrals == {}


def test_what_was_chosen_is_the_token() -> None:
    rule, logits = rule_of(threshold=0.0), logits_of(1, 3)
    rule.apply(logits, [row_of(4, {4: 7}), row_of(5, {4: 7}), row_of(4, {4: 7, 5: 8})])
    assert list(rule.deferrals) == [1]
    assert logits.argmax(1).tolist()[::2] == [7, 7]
    assert (logits > -torch.inf).sum(1).tolist() == [1, len(PIECES), 1]


def test_candidates_are_compared_by_means() -> None:
    assert AdadecRule.score(Candidate(5, -1.0), []) == -1.0
    assert AdadecRule.score(Candidate(5, -1.0), [-0.5, -3.0]) == -1.5


def test_ahead_ends_with_the_line() -> None:
    assert list(rule_of().stops) == list(range(2, 80, 4))
    assert list(rule_of(line=False).stops) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"temperature": 0.5}, "temperature=0.5 does not go with adadec"),
        ({"structured": True}, "structured_outputs"),
        ({"lists_tokens": True}, "allowed_token_ids or bad_words"),
        ({"penalizes": True}, "penalties or logit_bias"),
    ],
)
def test_what_it_does_not_go_with(asked: dict[str, Any], says: str) -> None:
    assert AdadecRule.problem(AdadecOptions(), AdadecParams(), GREEDY) is None
    problem = AdadecRule.problem(AdadecOptions(), AdadecParams(), replace(GREEDY, **asked))
    assert problem is not None
    assert says in problem
