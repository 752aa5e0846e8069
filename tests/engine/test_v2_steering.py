# SPDX-License-Identifier: Apache-2.0
"""Rules that steer on vLLM's V2 runner: the tokens of the same rule without speculation, and those of V1's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rule_faults
import v2_steering
from conftest import V2_METHOD, v2_engine
from engine_heads import options_of
from helpers import assert_same_outputs, preemptions
from v2_requests import counters, generate, prompts, sampling, tokens
from v2_steering import ASKED, STEERING

from vllm_ext.engine.steering.aux_logits import StepAuxLogits
from vllm_ext.engine.v2.logits_processor import RuleProcessor
from vllm_ext.engine.v2.rejection_sampler import TreeVerifier
from vllm_ext.samplers.registry import load_rule

pytestmark = pytest.mark.v2

SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}


def asking(extra_args: dict[str, Any] | None = None, **values: Any) -> Any:
    return sampling(extra_args=extra_args, max_tokens=14, **values)


KINDS = [
    *(asking(ASKED[name]) for name in STEERING),
    asking({"dola": True, "svdecode": True}, repetition_penalty=1.2),
    asking({"dola": True, "momentum": True}),  # by the path, and layers
    asking({"dola_alpha": 0.01, "contrastive": True, "rpg": 20.0}),
    asking({"dola": True}, logprobs=1, **SEEDED),
    asking({"caad": True}, top_p=0.9, **SEEDED),
    asking({"contrastive_beta": 1.5}, **SEEDED),
    asking({"anchored_k": 0.1}, **SEEDED),
    asking({"entropy_adaptive": True}, **SEEDED),
    asking(),
    asking(**SEEDED),
]
TEXTS = prompts(len(KINDS), seed=21)


@pytest.fixture(scope="module")
def rules(v2_dir: str, model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    given = v2_steering.options_of(v2_dir, model_dir, tmp_path_factory.mktemp("files"))
    return {"additional_config": {"vllm_ext": {"rules": {**given, "rpg": {}}}}}


@pytest.fixture(scope="module")
def plain(v2_dir: str, v2_plain: Any, rules: dict[str, Any]) -> Any:
    return v2_engine(v2_dir, **rules)


@pytest.fixture(scope="module")
def trees(v2_dir: str, plain: Any, rules: dict[str, Any]) -> Any:
    return v2_engine(v2_dir, V2_METHOD, **rules)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[Any]:
    assert plain.llm_engine.vllm_config.use_v2_model_runner
    return generate(plain, TEXTS, KINDS)


def test_rules_say_the_same_next_to_trees(v2_plain: Any, trees: Any, expected: list[Any]) -> None:
    before = counters(trees)["spec_accepted_tokens"]
    assert_same_outputs(tokens(expected), tokens(generate(trees, TEXTS, KINDS)))
    assert counters(trees)["spec_accepted_tokens"] > before + 10
    # Plain requests beside them are what they are without rules, and others are not.
    without = [each.clone() for each in KINDS]
    for each in without:
        each.extra_args = None
    free = tokens(generate(v2_plain, TEXTS, without))
    assert_same_outputs(free[-2:], tokens(expected)[-2:])
    for index in range(len(KINDS) - 2):
        assert free[index] != tokens(expected)[index], KINDS[index].extra_args


def test_each_rule_alone(trees: Any, expected: list[Any]) -> None:
    for index in range(len(STEERING)):
        alone = generate(trees, TEXTS[index : index + 1], KINDS[index : index + 1])
        assert_same_outputs(tokens(expected)[index : index + 1], tokens(alone))


def spent(output: Any) -> float:
    """What `anchored` reports of a request."""
    value: float = output.kv_transfer_params["vllm_ext"]["anchored_kl"]
    return value


def test_greedy_answers_are_v1s(
    v2_dir: str,
    rules: dict[str, Any],
    plain: Any,
    trees: Any,
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what `anchored` has spent on them, with and without trees."""
    from vllm import envs

    envs.disable_envs_cache()
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        on_v1 = v2_engine(v2_dir, logits_processors=None, **rules)
        assert not on_v1.llm_engine.vllm_config.use_v2_model_runner
        greedy = [index for index, each in enumerate(KINDS) if each.temperature == 0]
        found = generate(on_v1, [TEXTS[index] for index in greedy], [KINDS[index] for index in greedy])
        assert_same_outputs([tokens(expected)[index] for index in greedy], tokens(found))
        anchored = STEERING.index("anchored")
        text = [{"prompt_token_ids": TEXTS[anchored]}]
        reports = [
            spent(llm.generate(text, KINDS[anchored], use_tqdm=False)[0]) for llm in (on_v1, plain, trees)
        ]
        assert 0.0 < reports[0] == pytest.approx(reports[1], rel=1e-3) == pytest.approx(reports[2], rel=1e-3)
    envs.disable_envs_cache()  # engines after it are V2's again


def test_rows_beside_the_wrong_ones_are_caught(
    trees: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation: all rows of a call read what stands beside the first."""
    right = StepAuxLogits.call
    monkeypatch.setattr(
        StepAuxLogits, "call", lambda self, rows: right(self, None if rows is None else rows * 0)
    )
    reading = {"dola", "caad", "contrastive", "lol"}
    caught = set()
    for index, each in enumerate(KINDS):
        names = {key.partition("_")[0] for key in each.extra_args or ()}
        if len(names) > 1 or names & {"anchored", "entropy", "cad"}:  # by the path, and of pairs
            continue
        wrong = generate(trees, TEXTS[index : index + 1], [each])
        if tokens(wrong)[0] != tokens(expected)[index]:
            caught |= names
    # Hidden states of a request's rows may be so much alike that `caad` finds the same contexts.
    assert {"dola", "contrastive", "lol"} <= caught <= reading


@pytest.mark.parametrize("name", ["momentum", "anchored", "entropy_adaptive"])
def test_chains_that_are_not_paths_are_caught(
    trees: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The mutation: of a rule that reads tokens, the drafts before a row are left out."""
    right = RuleProcessor._rows
    monkeypatch.setattr(
        RuleProcessor, "_rows", lambda self, slot, request, drafts: right(self, slot, request, [])
    )
    index = STEERING.index(name)
    wrong = generate(trees, TEXTS[index : index + 1], KINDS[index : index + 1])
    assert tokens(wrong)[0] != tokens(expected)[index]


def test_rules_that_read_no_tokens_wait_for_none(
    plain: Any, trees: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are their trees sampled depth by depth."""
    calls = list[bool]()
    right = TreeVerifier._along

    def watching(self: Any, rows: Any, counts: Any, chains: bool = False) -> Any:
        calls.append(chains)
        return right(self, rows, counts, chains)

    monkeypatch.setattr(RuleProcessor, "_read", None)  # of what the host waits for
    monkeypatch.setattr(TreeVerifier, "_along", watching)
    names = [name for name in STEERING if not load_rule(name).reads_tokens]
    assert {"svdecode", "caad", "dola", "contrastive"} <= set(names)
    places = [STEERING.index(name) for name in names]
    for llm in (plain, trees):
        found = generate(llm, [TEXTS[i] for i in places], [KINDS[i] for i in places])
        assert_same_outputs([tokens(expected)[i] for i in places], tokens(found))
    assert calls
    assert not any(calls)


def test_layers_that_a_head_reads_too(
    v2_dir: str, rules: dict[str, Any], expected: list[Any], tmp_path: Path
) -> None:
    """Heads and rules each find theirs among the layers that the target hands out."""
    method = {**options_of("eagle_tree", v2_dir, tmp_path), "num_speculative_tokens": 6, "budget": "fixed"}
    llm = v2_engine(v2_dir, method, **rules)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert set(runner.aux_layers) > {0, 1}
    places = [i for i, each in enumerate(KINDS) if (each.extra_args or {"dola": True}).keys() == {"dola"}]
    found = generate(llm, [TEXTS[i] for i in places], [KINDS[i] for i in places])
    assert_same_outputs([tokens(expected)[i] for i in places], tokens(found))
    assert counters(llm)["spec_draft_tokens"] > 0


def test_what_rules_keep_and_report_outlives_preemptions(
    v2_dir: str, rules: dict[str, Any], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache with room for one of them answers and budgets are what they are with room for all."""
    texts = [{"prompt_token_ids": list(range(start, start + 90))} for start in (100, 300)]
    kinds = [
        sampling(extra_args={name: True}, max_tokens=40, temperature=1.0, seed=1)
        for name in ("anchored", "entropy_adaptive")
    ]
    expected = plain.generate(texts, kinds, use_tqdm=False)
    llm = v2_engine(v2_dir, V2_METHOD, num_gpu_blocks_override=7, max_model_len=160, **rules)

    def answers() -> list[Any]:
        before = preemptions(llm)
        found: list[Any] = llm.generate(texts, kinds, use_tqdm=False)
        assert preemptions(llm) > before
        return found

    def tokens_of(found: list[Any]) -> list[list[int]]:
        return tokens([each.outputs[0] for each in found])

    got = answers()
    assert_same_outputs(tokens_of(expected), tokens_of(got))
    assert 0.0 < spent(got[0]) == pytest.approx(spent(expected[0]), rel=1e-3)
    assert got[1].kv_transfer_params is None
    monkeypatch.setattr(RuleProcessor, "keep", lambda *given: None)  # the mutation
    assert tokens_of(answers()) != tokens_of(expected)


@pytest.mark.parametrize("name", STEERING)
@pytest.mark.parametrize(
    "where", [rule_faults.START, pytest.param(rule_faults.MIDDLE, marks=pytest.mark.slow)]
)
def test_a_rule_that_raises_ends_its_request_alone(plain: Any, trees: Any, name: str, where: str) -> None:
    for llm in (plain, trees) if where == rule_faults.START else (plain,):
        rule_faults.check_that_one_request_ends(
            llm,
            name,
            lambda _: sampling(extra_args=ASKED[name], max_tokens=12),
            sampling(max_tokens=12),
            where,
            prompts(3, seed=20),
        )
