# SPDX-License-Identifier: Apache-2.0
"""Rules asap and awrs on a toy vocabulary: their grammars beside Python's regular expressions, their rows beside the
algorithms that `test_asap.py` and `test_awrs.py` prove, what they learn over restarts, and what they refuse.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ASKED
from pydantic import ValidationError

from vllm_ext.samplers import grammar
from vllm_ext.samplers.asap import ExpectedFuture
from vllm_ext.samplers.asap_rule import AsapOptions, AsapParams, AsapRule
from vllm_ext.samplers.awrs_rule import AwrsOptions, AwrsParams, AwrsRule
from vllm_ext.samplers.base import Row, allows, text_of
from vllm_ext.samplers.grammar import Behind, Grammars

END, SPECIAL = 6, 0
PATTERN = "0{3}|1[01]{2}"


class Toy:
    """Zeros and ones, alone and in pairs; half a character; the end."""

    pieces = (b"", b"0", b"1", b"01", b"11", b"\xf0\x9f", b"", b"x")
    size = len(pieces)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(character.encode()) for character in text]


TOY = Toy()
DIGITS = (1, 2, 3, 4)
SENTENCES = [
    tokens
    for n in range(1, 4)
    for tokens in itertools.product(DIGITS, repeat=n)
    if re.fullmatch(PATTERN, text_of(TOY, tokens).decode())
]
PREFIXES = sorted({tokens[:n] for tokens in SENTENCES for n in range(len(tokens) + 1)})


def logits_of(prefix: Sequence[int]) -> torch.Tensor:
    """float32 ``[1, vocab]``, of a model whose first token leads it astray."""
    rng = np.random.default_rng([7, *prefix])
    row = torch.from_numpy(rng.normal(0, 1.5, TOY.size)).float()
    if not prefix:
        row[1] += 3.0
    return row[None]


def p_of(prefix: Sequence[int], temperature: float = ASKED.temperature) -> Any:
    return (logits_of(prefix)[0].double() / temperature).softmax(0).numpy()


def allowed_behind(prefix: Sequence[int]) -> set[int]:
    """By brute force."""
    return {
        tokens[len(prefix)] for tokens in SENTENCES if tokens[: len(prefix)] == tuple(prefix) != tokens
    } | ({END} if tuple(prefix) in SENTENCES else set())


def asap(**options: Any) -> AsapRule:
    return AsapRule.from_options(AsapOptions(**options), TOY)


def row(prefix: Sequence[int], params: Any, **asked: Any) -> Row:
    return Row([1], list(prefix), END, params, replace(ASKED, **asked))


def applied(rule: Any, where: Row) -> Any:
    logits = logits_of([token for token in where.output if token != END])
    rule.apply(logits, [where])
    return logits[0]


def test_grammars_are_right_behind_every_prefix() -> None:
    grammars = Grammars(TOY)
    for prefix in (*PREFIXES, *reversed(PREFIXES)):  # kept ones, copies of shorter ones, and read again
        behind = grammars.behind("regex", PATTERN, END, prefix)
        assert behind is not None
        expected = allowed_behind(prefix)
        assert set(behind.allowed().tolist()) == expected
        assert {token for token in range(TOY.size) if allows(behind, token)} == expected
        forced = behind.forced(4)
        path = list(prefix)
        for token in forced:
            assert allowed_behind(path) == {token}
            path.append(token)
        assert len(forced) == 4 or path[-1:] == [END] or len(allowed_behind(path)) > 1
        assert set(behind.allowed().tolist()) == expected  # what was tried is taken back
    assert grammars.behind("regex", PATTERN, END, [1, 2]) is None
    ended = grammars.behind("regex", PATTERN, END, [*SENTENCES[0], END])
    assert ended is not None
    assert (ended.allowed().tolist(), allows(ended, END), ended.forced(2)) == ([], False, [])


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [("json", '{"enum": [0, 11]}', "11"), ("grammar", 'root ::= "0" | "11" [01]', "110")],
)
def test_other_kinds_of_grammars(kind: Any, source: str, text: str) -> None:
    grammars = Grammars(TOY)
    behind = grammars.behind(kind, source, END, TOY.encode(text))
    assert behind is not None
    assert behind.allowed().tolist() == [END]


@pytest.mark.parametrize("rule", ["asap", "awrs"])
def test_a_row_waits_for_a_mask_that_takes_long_and_is_then_as_ever(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = PREFIXES[1]
    if rule == "asap":
        made: Any = [asap(), asap()]
        where = row(prefix, AsapParams(asap_regex=PATTERN))
    else:
        made = [AwrsRule.from_options(AwrsOptions(), TOY) for _ in range(2)]
        where = row(prefix, AwrsParams(awrs_regex=PATTERN), seed=1)
    expected = applied(made[0], where)
    ruled = made[1]
    monkeypatch.setattr(grammar, "SLOW", -1.0)  # any takes long
    allowed, may_go_on = Behind.allowed, threading.Event()

    def slow(self: Behind) -> Any:
        may_go_on.wait(60)
        return allowed(self)

    ruled.patience = 60.0
    where.kept.clear()
    applied(ruled, where)  # compiles, and finds out
    monkeypatch.setattr(Behind, "allowed", slow)
    later = replace(where, output=list(PREFIXES[2]), kept=where.kept)
    ruled.patience = 0.01
    logits = logits_of(later.output)
    before = logits.clone()
    ruled.apply(logits, [later])
    assert ruled.waiting == [0]
    assert torch.equal(logits, before)
    assert ruled.constraint(later) is None
    may_go_on.set()
    ruled.patience = 60.0
    assert torch.equal(applied(ruled, later), applied(made[0], replace(later, kept={})))
    assert not ruled.waiting
    assert torch.equal(applied(ruled, where), expected)


def test_the_first_answer_of_asap_is_plain_masking_to_the_last_bit() -> None:
    params = AsapParams(asap_regex=PATTERN)
    for prefix in PREFIXES:
        found = applied(asap(), row(prefix, params))
        allowed = sorted(allowed_behind(prefix))
        assert torch.isfinite(found).nonzero().flatten().tolist() == allowed
        assert torch.equal(found[allowed], logits_of(prefix)[0, allowed])


def test_asap_samples_by_what_it_has_learnt_at_the_temperature() -> None:
    rule, params = asap(), AsapParams(asap_regex=PATTERN)
    reference = ExpectedFuture(1 << 20)
    for prefix in (*PREFIXES, *PREFIXES):
        found = (applied(rule, row(prefix, params)).double() / ASKED.temperature).softmax(0).numpy()
        ids = np.array(sorted(allowed_behind(prefix)), np.int32)
        weights = p_of(prefix)[ids] * reference.chances(prefix, ids, p_of(prefix)[ids])
        np.testing.assert_allclose(found[ids], weights / weights.sum(), atol=1e-6)
    # All was looked at: these are the model's chances to obey.
    exact = sum(
        math.prod(p_of(tokens[:n])[token] for n, token in enumerate((*tokens, END))) for tokens in SENTENCES
    )
    assert reference.bound == pytest.approx(exact, abs=1e-12)
    # Another prompt, temperature or grammar knows nothing of it.
    for other in (
        replace(row([], params), prompt=[2]),
        row([], params, temperature=0.8),
        row([], AsapParams(asap_grammar='root ::= "0" "0" "0" | "1" [01] [01]')),
    ):
        found = applied(rule, other)
        assert torch.equal(
            found[torch.isfinite(found)], logits_of([])[0, [1, 2, 3, 4]][torch.isfinite(found[1:5])]
        )


def test_rows_of_asap_behind_the_end_and_in_dead_ends() -> None:
    rule, params = asap(), AsapParams(asap_regex=PATTERN)
    assert torch.equal(applied(rule, row([1, 1, 1, END], params)), logits_of([1, 1, 1])[0])
    only_end = applied(rule, row([7], params))
    assert torch.isfinite(only_end).nonzero().flatten().tolist() == [END]


def test_asap_remembers_over_restarts_within_its_memory() -> None:
    one, params = asap(), AsapParams(asap_regex=PATTERN)
    for prefix in PREFIXES:
        applied(one, row(prefix, params))
    applied(one, row([], AsapParams(asap_regex="1")))
    other = asap()
    other.load_state_dict(one.state_dict())
    for prefix in PREFIXES:
        assert torch.equal(applied(one, row(prefix, params)), applied(other, row(prefix, params)))
    assert not torch.equal(applied(one, row([], params)), applied(asap(), row([], params)))
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert np.array_equal(left[name], right[name]), name


def test_asap_takes_over_nothing_that_it_cannot_have_learnt() -> None:
    one, params = asap(), AsapParams(asap_regex=PATTERN)
    for prefix in PREFIXES:
        applied(one, row(prefix, params))
    good = one.state_dict()
    for name, place, change in (
        ("0.parent", -1, 900),
        ("0.parent", 0, 0),
        ("0.parent", 1, -1),
        ("0.place", -1, 200),
        ("0.place", 2, good["0.place"][1]),
        ("0.ids", -1, TOY.size),
        ("0.ids", 1, 0),
        ("0.p", -1, 1.5),
        ("0.future", -1, -1.0),
        ("0.future", -1, math.nan),
        ("0.rest", -1, 2.0),
        ("0.count", -1, 3),
    ):
        bad = {key: array.copy() for key, array in good.items()}
        bad[name][place] = change
        fresh = asap()
        with pytest.raises(ValueError):  # each check has its own words
            fresh.load_state_dict(bad)
        assert fresh.state_dict().keys() == {"keys"}
    for keys in (good["keys"][:, :8], np.concatenate([good["keys"], good["keys"]]), good["keys"].ravel()):
        with pytest.raises(ValueError, match=r"keys|1\.parent"):
            asap().load_state_dict({**good, "keys": keys})
    with pytest.raises(ValueError, match="is missing"):
        asap().load_state_dict({key: array for key, array in good.items() if key != "0.p"})


def test_the_memory_of_asap_is_bounded() -> None:
    """Prompts, prefixes, dead ends and compiled grammars all count, also in what is saved."""
    rule = asap(memory_mb=4)
    for number in range(1600):
        params = AsapParams(asap_regex=f"(0{{3}}|1[01]{{2}}){{0,{1 + number % 40}}}")
        prompt = list(range(number, number + 500))
        for prefix in ([], [2], [2, 1], [1]):
            logits = logits_of(prefix)
            rule.apply(logits, [replace(row(prefix, params), prompt=prompt)])
    assert 3 << 20 < rule.num_bytes <= 4 << 20
    saved = rule.state_dict()
    assert sum(array.nbytes for array in saved.values()) <= 4 << 20
    assert len(saved["keys"]) > 10


def starts_with_one(text: str, ended: bool) -> bool:
    """The check of the tests: ones and zeros, three of them, the first a one."""
    return bool(re.fullmatch("1[01]{2}" if ended else "(1[01]{0,2})?", text))


@pytest.fixture
def awrs_rule() -> AwrsRule:
    return AwrsRule.from_options(AwrsOptions(checks={"ones": f"{__name__}:starts_with_one"}), TOY)


@pytest.mark.parametrize(
    "params", [AwrsParams(awrs_regex="1[01]{2}"), AwrsParams(awrs_check="ones")], ids=["regex", "check"]
)
def test_awrs_draws_by_the_exact_local_law(params: AwrsParams) -> None:
    rule = AwrsRule({"ones": starts_with_one}, TOY)
    for prefix in ([], [2], [4]):
        allowed = {
            token for token in DIGITS if starts_with_one(text_of(TOY, [*prefix, token]).decode(), ended=False)
        }
        assert allowed
        p = p_of(prefix)
        inside = np.where(np.isin(np.arange(TOY.size), sorted(allowed)), p, 0.0)
        counts: Counter[int] = Counter()
        weights = []
        for seed in range(3000):
            where = row(prefix, params, seed=seed)
            found = applied(rule, where)
            (token,) = torch.isfinite(found).nonzero().flatten().tolist()
            counts[token] += 1
            weights.append(math.exp(where.notes[len(prefix)]))
        assert set(counts) <= allowed
        expected = 3000 * inside / inside.sum()
        chi2 = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in allowed)
        assert chi2 < 20.0  # at most 3 degrees of freedom: 2e-4
        error = 4.5 * float(np.std(weights)) / math.sqrt(3000) + 1e-9
        assert np.mean(weights) == pytest.approx(inside.sum(), abs=error)
        # The mutation: the model's own law is another.
        if inside.sum() < 0.9:
            assert abs(np.mean(weights) - 1.0) > error


def test_awrs_greedily_takes_the_likeliest_that_is_allowed(awrs_rule: AwrsRule) -> None:
    for params in (AwrsParams(awrs_check="ones"), AwrsParams(awrs_regex="1[01]{2}")):
        where = row([], params, temperature=0.0)
        found = applied(awrs_rule, where)
        logits = logits_of([])[0]
        assert torch.isfinite(found).nonzero().flatten().tolist() == [max((2, 4), key=lambda i: logits[i])]
        assert where.notes == {}
        end = applied(awrs_rule, row([2, 1, 1], params, temperature=0.0))
        assert torch.isfinite(end).nonzero().flatten().tolist() == [END]


def test_awrs_ends_where_nothing_is_allowed_with_no_weight(awrs_rule: AwrsRule) -> None:
    for params in (AwrsParams(awrs_check="ones"), AwrsParams(awrs_regex="1[01]{2}")):
        where = row([1], params)  # begins with a zero
        assert torch.isfinite(applied(awrs_rule, where)).nonzero().flatten().tolist() == [END]
        assert where.notes == {1: -math.inf}
        assert torch.equal(applied(awrs_rule, row([2, 1, 1, END], params)), logits_of([2, 1, 1])[0])


def test_what_a_check_allows_goes_down_and_back(awrs_rule: AwrsRule) -> None:
    constraint = awrs_rule.constraint(row([2], AwrsParams(awrs_check="ones")))
    assert constraint is not None
    assert not constraint.accept(END)
    assert not constraint.accept(SPECIAL)  # no text
    assert not constraint.accept(5)  # half a character
    assert constraint.accept(4)
    assert not constraint.accept(1)
    assert constraint.accept(END)
    assert not constraint.accept(1)
    constraint.rollback(2)
    assert constraint.accept(1)
    assert constraint.forced(3) == []


@pytest.mark.parametrize(
    "where", ["nowhere:check", f"{__name__}:nothing", f"{__name__}:PATTERN", "json", ":"]
)
def test_checks_that_cannot_be_imported_are_refused(where: str) -> None:
    with pytest.raises(ValueError, match=r"checks\.mine=.* cannot be imported .*name a function"):
        AwrsRule.check(AwrsOptions(checks={"mine": where}), 8, lambda: "")


def test_one_grammar_a_request() -> None:
    with pytest.raises(ValidationError, match="asap_json, asap_regex are too many: give one"):
        AsapParams(asap_json="{}", asap_regex="x")
    with pytest.raises(ValidationError, match="give one"):
        AwrsParams(awrs_check="ones", awrs_regex="x")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"structured": True}, "does not go with structured_outputs (response_format)"),
        ({"truncates": True, "penalizes": True}, "top_k, top_p or min_p nor penalties or logit_bias"),
        ({"min_tokens": 2, "lists_tokens": True}, "min_tokens=2 nor allowed_token_ids or bad_words"),
        ({"ignores_end": True}, "ignore_eos=True"),
    ],
)
def test_requests_that_leave_the_models_law_are_refused(changes: dict[str, Any], says: str) -> None:
    asked = replace(ASKED, **changes)
    for problem in (
        AsapRule.problem(AsapOptions(), AsapParams(asap_regex="1"), asked),
        AwrsRule.problem(AwrsOptions(), AwrsParams(awrs_regex="1"), asked),
    ):
        assert problem is not None
        assert says in problem
    assert AsapRule.problem(AsapOptions(), AsapParams(asap_regex="1"), ASKED) is None
    assert AwrsRule.problem(AwrsOptions(), AwrsParams(awrs_regex="1"), ASKED) is None


def test_other_requests_that_are_refused() -> None:
    greedy = replace(ASKED, temperature=0.0)
    assert "temperature=0" in str(AsapRule.problem(AsapOptions(), AsapParams(asap_regex="1"), greedy))
    many = replace(ASKED, num_answers=3)
    assert "n=3 does not go with awrs" in str(
        AwrsRule.problem(AwrsOptions(), AwrsParams(awrs_regex="1"), many)
    )
    unknown = AwrsParams(awrs_check="mine")
    assert "awrs_check='mine' is not allowed; allowed: none" in str(
        AwrsRule.problem(AwrsOptions(), unknown, ASKED)
    )
    known = AwrsOptions(checks={"ones": "x:y"})
    assert "allowed: 'ones'" in str(AwrsRule.problem(known, unknown, ASKED))
