# SPDX-License-Identifier: Apache-2.0
"""Rules that steer beside their formulas in float64, on logits that SmolLM2 gives for real prompts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ASKED, own_prompts

from vllm_ext.samplers import artifact_file, svdecode
from vllm_ext.samplers.anchored import AnchoredOptions, AnchoredParams, AnchoredRule
from vllm_ext.samplers.artifact_file import Header
from vllm_ext.samplers.base import Row
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
from vllm_ext.samplers.svdecode import SvdecodeOptions, SvdecodeParams, SvdecodeRule

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
    hidden: list[Any] = []
    texts: list[list[int]] = []  # what is before each row's token, and it
    for prompt in own_prompts()[:2]:
        tokens = tokenizer.encode(prompt)
        texts += [tokens[: i + 1] for i in range(len(tokens))]
        with torch.inference_mode():
            result = model(torch.tensor([tokens]), output_hidden_states=True)
            final.append(result.logits[0])
            hidden.append(result.hidden_states[-1][0])
            without = model(torch.tensor([tokens[len(tokens) // 3 :]])).logits[0]
            states = [result.hidden_states[layer][0] for layer in (*CANDIDATES, AMATEUR)]
            early.append(torch.stack([model.lm_head(model.model.norm(state)) for state in states]))
    layers = torch.cat(early, 1)
    return SimpleNamespace(
        final=torch.cat(final),
        early=layers[:-1],
        amateur=layers[-1],
        hidden=torch.cat(hidden),
        without=without,  # of the second prompt without its first third
        texts=texts,
    )


class AuxLogits:
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
        found: torch.Tensor = self._real.hidden
        return found

    def of_pairs(self, which: Any) -> SimpleNamespace:
        assert all(which)
        return SimpleNamespace(target=lambda: self._real.without)


def header(rule: str) -> Header:
    return Header(rule=rule, created="2026-01-01", model="toy", fingerprint="0", made_of=1)


def applied(rule: Any, real: SimpleNamespace, params: Any, num_rows: int | None = None) -> torch.Tensor:
    """Of the last rows, or of all: each a request of its own, at its first token."""
    rule.aux_logits = AuxLogits(real)
    found = real.final.clone() if num_rows is None else real.final[-num_rows:].clone()
    texts = real.texts[-len(found) :]
    rule.apply(found, [Row(text, [], 2, params, ASKED) for text in texts])
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


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_cad(real: SimpleNamespace, alpha: float) -> None:
    num = len(real.without)
    found = applied(CadRule(CadOptions(alpha=alpha)), real, CadParams(cad_context="x"), num)
    with_it, without = (each.double().log_softmax(1) for each in (real.final[-num:], real.without))
    expected = ((1 + alpha) * with_it - alpha * without).log_softmax(1)
    torch.testing.assert_close(found.softmax(1), expected.exp(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.log_softmax(1), expected, rtol=0, atol=2e-4)


def test_momentum(real: SimpleNamespace) -> None:
    """Exactly where discrete: which candidates are left, and which is the best."""
    rule = MomentumRule(MomentumOptions())
    found = applied(rule, real, MomentumParams())
    resistance, moved = rule.options.resistance, 0
    for scores, final, text in zip(found, real.final, real.texts, strict=True):
        p, ids = final.double().softmax(0).topk(rule.options.k)
        expected = []
        for value, token in zip(p.tolist(), ids.tolist(), strict=True):
            after = [*text, token]
            lengths = [
                n
                for n in range(1, len(resistance))
                if any(after[i : i + n] == after[-n:] for i in range(len(after) - n))
            ]
            expected.append(value - rule.options.alpha * resistance[max(lengths, default=0)])
        assert set((scores > -torch.inf).nonzero()[:, 0].tolist()) == set(ids.tolist())
        torch.testing.assert_close(scores[ids], torch.tensor(expected).double(), rtol=0, atol=1e-5)
        assert int(scores.argmax()) == int(ids[torch.tensor(expected).argmax()])
        moved += int(scores.argmax()) != int(ids[0])
    assert moved > 0


def test_entropy_adaptive(real: SimpleNamespace) -> None:
    """The last token of a request's row decides by the entropies of those before, in one go over a text."""
    rule: Any = EntropyAdaptiveRule(EntropyAdaptiveOptions(model="x", threshold=3.0, window=4, dwell=2))
    kept: dict[int, Any] = {}
    entropies: list[float] = []
    target, since, from_companion = True, 2, 0
    for place in range(len(real.final)):
        rule.aux_logits = AuxLogits(SimpleNamespace(amateur=real.amateur[place : place + 1]))
        found = real.final[place : place + 1].clone()
        output = [1] * place
        rule.apply(found, [Row([1], output, 2, EntropyAdaptiveParams(), ASKED, kept=kept)])
        if entropies:
            wanted = sum(entropies[-4:]) / len(entropies[-4:]) > 3.0
            if wanted != target and since >= 2:
                target, since = wanted, 0
            since += 1
        source = real.final if target else real.amateur
        assert torch.equal(found[0], source[place])
        log_p = source[place].double().log_softmax(0)
        entropies.append(float(-(log_p.exp() * log_p).sum()))
        from_companion += not target
    assert 0 < from_companion < len(real.final)


def test_svdecode(real: SimpleNamespace, tmp_path: Path) -> None:
    """With the direction and strength from the amateur to the model itself, by the paper's formulas."""
    p, log_q = real.final.double().softmax(1), real.amateur.double().log_softmax(1)
    kept = p >= 0.1 * p.amax(1, keepdim=True)
    gradient = torch.where(kept, p.log() - log_q + 1.0, 0.0)
    by_hand = torch.stack(
        [
            (torch.diag(row[some]) - torch.outer(row[some], row[some])) @ g[some]
            for row, g, some in zip(p[:1], gradient[:1], kept[:1], strict=True)
        ]
    )
    directions = svdecode.direction(real.final, real.amateur, 0.1)
    torch.testing.assert_close(directions[:1][kept[:1]][None], by_hand, rtol=0, atol=1e-5)
    delta = directions.mean(0).float()
    file = tmp_path / "task.guide"
    artifact_file.write(file, {"delta": delta, "mu": torch.tensor(3.0)}, header("svdecode"))
    found = applied(SvdecodeRule(SvdecodeOptions(file=str(file))), real, SvdecodeParams())
    expected = torch.where(kept, real.final.double() + 3.0 * delta.double(), real.final.double())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.softmax(1), expected.softmax(1), rtol=0, atol=1e-5)


def test_caad(real: SimpleNamespace, tmp_path: Path) -> None:
    """With the first prompt's contexts and what the model says behind them as the store."""
    num = len(real.final) - 3 * len(real.without) // 2
    contexts = torch.nn.functional.normalize(real.hidden[:num], dim=1)
    best = real.final[:num].log_softmax(1).topk(256, 1)
    gains = best.values - best.values[:, -1:]
    file = tmp_path / "store"
    arrays = {"contexts": contexts, "ids": best.indices.int(), "gains": gains}
    artifact_file.write(file, arrays, header("caad"))
    rule = CaadRule(CaadOptions(file=str(file), threshold=0.3))
    options = rule.options
    found = applied(rule, real, CaadParams())
    unit = real.hidden.double() / real.hidden.double().norm(dim=1, keepdim=True)
    cosines = unit @ contexts.double().T
    expected, moved = real.final.double().clone(), 0
    for row, similar in enumerate(cosines):
        if float(similar.max()) < options.threshold:
            continue
        near = similar.argsort(descending=True)[: options.neighbours]
        weights = (similar[near] / options.temperature).softmax(0)
        for weight, place in zip(weights, near, strict=True):
            gain = options.strength * float(similar.max()) * weight * gains[place].double()
            expected[row, best.indices[place]] += gain
        moved += 1
    assert moved > 0
    torch.testing.assert_close(found.softmax(1), expected.softmax(1), rtol=0, atol=1e-5)
