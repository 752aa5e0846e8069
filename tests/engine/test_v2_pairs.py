# SPDX-License-Identifier: Apache-2.0
"""Rules that read pairs of requests on vLLM's V2 runner: the tokens of the same rule without speculation, and V1's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import slices
from conftest import V2_HOST_METHOD, V2_METHOD, V2_MODEL_METHOD, v2_engine
from helpers import assert_same_outputs, own_prompts, preemptions
from v2_requests import counters, generate, sampling, tokens
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext.engine.steering.paired_rows import PairedRows
from vllm_ext.engine.steering.paired_steps import PairedSteps
from vllm_ext.engine.v2.logits_processor import RuleProcessor

pytestmark = pytest.mark.v2

SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
PART = "a part"  # of the request's own prompt


def asking(extra_args: dict[str, Any] | None = None, **values: Any) -> Any:
    return sampling(extra_args=extra_args, max_tokens=12, **values)


KINDS = [
    asking({"cad_context": PART}),
    asking({"cad_negative": ""}),
    asking({"cad_negative": "A poem about the sea:"}),
    asking({"lol_instruction": PART}),
    asking({"cad_context": PART, "dola": True}, repetition_penalty=1.2),
    asking({"cad_context": PART, "rpg": 20.0}),  # by the path, on the host
    asking({"cad_context": PART, "cad_plausible": 0.1}, logprobs=1, **SEEDED),
    asking({"lol_instruction": PART, "lol_mu": 0.3}, **SEEDED),
    asking({"cad_context": PART}, structured_outputs=StructuredOutputsParams(regex="[a-z ]{30}")),
    asking(),
    asking(**SEEDED),
]


@pytest.fixture(scope="module")
def rules(v2_dir: str, model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one = slices.write(Path(model_dir), tmp_path_factory.mktemp("one"), layers=1, vocabulary=1024)
    given = {
        "cad": {"alpha": 5.0},
        "lol": {"model": one, "omega": 0.5, "alpha": 0.05},
        "dola": {"candidates": [0, 1], "norm": True},
        "rpg": {},
    }
    return {"additional_config": {"vllm_ext": {"rules": given}}}


@pytest.fixture(scope="module")
def plain(v2_dir: str, v2_plain: Any, rules: dict[str, Any]) -> Any:
    return v2_engine(v2_dir, **rules)


@pytest.fixture(scope="module")
def trees(v2_dir: str, plain: Any, rules: dict[str, Any]) -> Any:
    return v2_engine(v2_dir, V2_METHOD, **rules)


def ask(llm: Any, kinds: list[Any], first: int = 0) -> list[Any]:
    """The same prompts in turn, of different lengths, most of them more than a step takes."""
    tokenizer, asked, texts = llm.get_tokenizer(), [], []
    for index, each in enumerate(kinds, first):
        text = own_prompts()[index % 8][: 40 + 12 * (index % 5)]
        own = each.clone()
        if own.extra_args:
            part = text[len(text) // 3 : -4].strip()
            own.extra_args = {key: part if value == PART else value for key, value in own.extra_args.items()}
        asked.append(own)
        texts.append(tokenizer.encode(text))
    return generate(llm, texts, asked)


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[Any]:
    assert plain.llm_engine.vllm_config.use_v2_model_runner
    return ask(plain, KINDS)


def test_pairs_say_the_same_next_to_trees(v2_plain: Any, trees: Any, expected: list[Any]) -> None:
    before = counters(trees)
    assert_same_outputs(tokens(expected), tokens(ask(trees, KINDS)))
    new = {name: value - before[name] for name, value in counters(trees).items()}
    assert new["spec_accepted_tokens"] > 10
    # Nobody counts what pairs get; what lies behind a request's end is counted.
    length = sum(len(each.token_ids) for each in expected)
    assert length <= new["spec_emitted_tokens"] < 1.3 * length
    without = [each.clone() for each in KINDS]
    for each in without:
        each.extra_args = None
    free = tokens(ask(v2_plain, without))
    assert_same_outputs(free[-2:], tokens(expected)[-2:])
    assert not [each for each in range(len(KINDS) - 2) if free[each] == tokens(expected)[each]]


def test_each_alone(plain: Any, trees: Any, expected: list[Any]) -> None:
    for index in range(0, len(KINDS) - 2, 2):
        for llm in (plain, trees):
            alone = ask(llm, KINDS[index : index + 1], first=index)
            assert_same_outputs(tokens(expected)[index : index + 1], tokens(alone))


@pytest.mark.parametrize("method", [V2_HOST_METHOD, V2_MODEL_METHOD], ids=["host", "model"])
def test_drafts_of_others(
    v2_dir: str, rules: dict[str, Any], expected: list[Any], method: dict[str, Any]
) -> None:
    """Trees of the host, and those that a model draws for requests without a seed."""
    llm = v2_engine(v2_dir, method, **rules)
    before = counters(llm)["spec_accepted_tokens"]
    assert_same_outputs(tokens(expected), tokens(ask(llm, KINDS)))
    assert counters(llm)["spec_accepted_tokens"] > before
    drawn = asking({"cad_context": PART}, temperature=1.0)
    assert all(len(each.token_ids) == 12 for each in ask(llm, [drawn] * 3))
    assert counters(llm)["fallbacks:proposer_error"] == 0


def test_greedy_answers_are_v1s(
    v2_dir: str, rules: dict[str, Any], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    envs.disable_envs_cache()
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        on_v1 = v2_engine(v2_dir, logits_processors=None, **rules)
        assert not on_v1.llm_engine.vllm_config.use_v2_model_runner
        for index, each in enumerate(KINDS):
            if each.temperature == 0:
                found = ask(on_v1, [each], first=index)
                assert_same_outputs(tokens(expected)[index : index + 1], tokens(found))
    envs.disable_envs_cache()  # engines after it are V2's again


def test_halves_that_come_alone_wait(
    plain: Any, trees: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests run at once: behind a free one the last of the pairs begins with one half. The mutation: it goes
    on without the other.
    """
    kinds = [KINDS[-2], *KINDS[:3]]
    alone = [tokens(ask(plain, [each], first=index))[0] for index, each in enumerate(kinds)]
    for llm in (plain, trees):
        assert_same_outputs(alone, tokens(ask(llm, kinds)))
    right = PairedRows.begin

    def hasty(self: Any, *args: Any) -> Any:
        rows = right(self, *args)
        self.held = []
        return rows

    monkeypatch.setattr(PairedRows, "begin", hasty)
    for llm in (plain, trees):
        assert tokens(ask(llm, kinds)) != alone


def test_pairs_with_drafts_of_their_own_are_caught(
    trees: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PairedSteps, "share_drafts", lambda self, trees, tokens: tokens)
    wrong = tokens(ask(trees, KINDS[:4]))
    assert any(wrong[index] != tokens(expected)[index] for index in range(4))


def test_pairs_outlive_preemptions(v2_dir: str, rules: dict[str, Any], plain: Any) -> None:
    """In a cache with room for less than both pairs; no block is lost."""
    texts = [list(range(start, start + 60)) for start in (100, 300)]
    kinds = [
        sampling(extra_args={"cad_negative": "The sea is"}, max_tokens=40, temperature=temperature, seed=1)
        for temperature in (0.0, 0.9)
    ]
    right = tokens(generate(plain, texts, kinds))
    llm = v2_engine(v2_dir, V2_METHOD, num_gpu_blocks_override=8, max_model_len=160, **rules)
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    before = preemptions(llm)
    assert_same_outputs(right, tokens(generate(llm, texts, kinds)))
    assert preemptions(llm) > before
    assert pool.get_num_free_blocks() == free
    assert not core.scheduler.requests


def test_pairs_wait_for_no_tokens(
    plain: Any, trees: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RuleProcessor, "_read", None)  # of what the host waits for
    for llm in (plain, trees):
        assert_same_outputs(tokens(expected)[:5], tokens(ask(llm, KINDS[:5])))
