# SPDX-License-Identifier: Apache-2.0
"""Rules that steer beside their formulas in float64, on logits that SmolLM2 gives for real prompts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ASKED, own_prompts

from vllm_ext.samplers.anchored import AnchoredOptions, AnchoredParams, AnchoredRule
from vllm_ext.samplers.base import Row
from vllm_ext.samplers.contrastive import ContrastiveOptions, ContrastiveParams, ContrastiveRule
from vllm_ext.samplers.dola import DolaOptions, DolaParams, DolaRule
from vllm_ext.samplers.lol import LolOptions, LolParams, LolRule

CANDIDATES = [2, 6, 10, 14]
AMATEUR = 20  # layers of the expert that are the second model


@pytest.fixture(scope="module")
def real(model_dir: str) -> SimpleNamespace:
    """Logits behind each token of two prompts: ``[num_rows, vocab]``, and of layers ``[num_layers, ...]``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    final: list[Any] = []
    early: list[Any] = []
    for prompt in own_prompts()[:2]:
        with torch.inference_mode():
            result = model(torch.tensor([tokenizer.encode(prompt)]), output_hidden_states=True)
            final.append(result.logits[0])
            states = [result.hidden_states[layer][0] for layer in (*CANDIDATES, AMATEUR)]
            early.append(torch.stack([model.lm_head(model.model.norm(state)) for state in states]))
    layers = torch.cat(early, 1)
    return SimpleNamespace(final=torch.cat(final), early=layers[:-1], amateur=layers[-1])


class Beside:
    def __init__(self, real: SimpleNamespace) -> None:
        self._real = real

    def layers(self, layers: Any, norm: bool, ids: Any = None) -> torch.Tensor:
        found: torch.Tensor = self._real.early[[CANDIDATES.index(layer) for layer in layers]]
        return found.clone() if ids is None else found.gather(2, ids.expand(len(found), *ids.shape))

    def companion(self, ids: Any = None) -> torch.Tensor:
        found: torch.Tensor = self._real.amateur
        return found.clone() if ids is None else found.gather(1, ids)

    def companion_layers(self, layers: Any, norm: bool, ids: Any = None) -> torch.Tensor:
        return self.layers(CANDIDATES[:1], norm, ids)

    def hidden(self) -> torch.Tensor:
        raise NotImplementedError


def applied(rule: Any, real: SimpleNamespace, params: Any) -> torch.Tensor:
    rule.beside = Beside(real)
    found = real.final.clone()
    rule.apply(found, [Row([1], [], 2, params, ASKED) for _ in found])
    scores: torch.Tensor = found.double()
    return scores


def check(found: torch.Tensor, expected: torch.Tensor, final: torch.Tensor, alpha: float) -> None:
    """The same tokens are left, and their distribution is the same; scores are, but for what is added to all."""
    least = final.double().amax(1, keepdim=True) + math.log(alpha)
    kept = final.double() >= least
    close = (final.double() - least).abs() < 1e-5  # either will do
    assert torch.equal((found > -torch.inf) | close, kept | close)
    both = (found > -torch.inf) & kept
    p, q = (torch.where(both, each, -torch.inf).softmax(1) for each in (found, expected))
    torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_contrastive(real: SimpleNamespace) -> None:
    found = applied(ContrastiveRule(ContrastiveOptions(model="x")), real, ContrastiveParams())
    check(found, 1.5 * real.final.double() - 0.5 * real.amateur.double(), real.final, 0.1)
    found = applied(ContrastiveRule(ContrastiveOptions(model="x", form="ratio")), real, ContrastiveParams())
    check(found, real.final.double().log_softmax(1) - real.amateur.double().log_softmax(1), real.final, 0.1)


@pytest.mark.parametrize("among", [None, 128])
def test_dola(real: SimpleNamespace, among: int | None) -> None:
    rule = DolaRule(DolaOptions(candidates=CANDIDATES, among=among))
    rule.layer_numbers = CANDIDATES
    found = applied(rule, real, DolaParams())
    ids = real.final.topk(among or real.final.shape[1], 1).indices
    log_q = real.final.double().gather(1, ids).log_softmax(1)
    log_early = real.early.double().gather(2, ids.expand(len(CANDIDATES), *ids.shape)).log_softmax(2)
    middle = ((log_q.exp() + log_early.exp()) / 2).log()
    parts = [q.exp() * (q - middle) for q in (log_q.expand_as(log_early), log_early)]
    divergence = (parts[0] + parts[1]).sum(2) / 2
    chosen = divergence.argmax(0)
    assert len(chosen.unique()) > 1
    early = real.early[chosen, torch.arange(len(chosen))]
    check(found, real.final.double() - early.double(), real.final, 0.1)


def test_dola_among_few_tokens_mostly_chooses_the_same(real: SimpleNamespace) -> None:
    tokens = []
    for among in (None, 128):
        rule = DolaRule(DolaOptions(candidates=CANDIDATES, among=among))
        rule.layer_numbers = CANDIDATES
        tokens.append(applied(rule, real, DolaParams()).argmax(1))
    same = float((tokens[0] == tokens[1]).double().mean())
    print(f"greedy tokens: {same:.3f} the same")
    assert same > 0.8


def test_lol(real: SimpleNamespace) -> None:
    rule = LolRule(LolOptions(model="x"))
    rule.layer_numbers, rule.companion_layer_numbers = [CANDIDATES[2]], [CANDIDATES[0]]
    found = applied(rule, real, LolParams())
    p, a, low, low_a = (
        each.double().log_softmax(1) for each in (real.final, real.amateur, real.early[2], real.early[0])
    )
    check(found, 2 * p - a + 0.3 * (2 * low - low_a), real.final, 0.1)


@pytest.mark.parametrize("k", [0.01, 0.15, 2.0])
def test_anchored(real: SimpleNamespace, k: float) -> None:
    found = applied(AnchoredRule(AnchoredOptions(model="x", k=k)), real, AnchoredParams())
    heat = ASKED.temperature
    risky, safe = ((each.double() / heat).log_softmax(1) for each in (real.final, real.amateur))
    q = (found / heat).log_softmax(1)
    spent = (q.exp() * (q - safe)).sum(1)
    assert float(spent.max()) <= k + 1e-4
    low, high = torch.zeros(len(q)).double(), torch.ones(len(q)).double()
    for _ in range(60):
        theta = (low + high) / 2
        point = ((1 - theta)[:, None] * safe + theta[:, None] * risky).log_softmax(1)
        fits = (point.exp() * (point - safe)).sum(1) <= k
        low, high = torch.where(fits, theta, low), torch.where(fits, high, theta)
    expected = ((1 - low)[:, None] * safe + low[:, None] * risky).log_softmax(1)
    torch.testing.assert_close(q.exp(), expected.exp(), rtol=0, atol=1e-4)
