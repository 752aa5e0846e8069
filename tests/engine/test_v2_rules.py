# SPDX-License-Identifier: Apache-2.0
"""Sampling rules on vLLM's V2 runner: the tokens of the same rule without speculation, which are those of V1's."""

from __future__ import annotations

from typing import Any

import pytest
import rule_faults
from conftest import V2_METHOD, v2_engine
from helpers import assert_same_outputs
from typer.testing import CliRunner
from v2_requests import counters, generate, prompts, sampling, tokens
from v2_steering import STEERING
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext.config.rules import needs_v1
from vllm_ext.engine.v2 import trie_rows
from vllm_ext.engine.v2.logits_processor import RuleProcessor
from vllm_ext.samplers.registry import RULES, load_rule

pytestmark = pytest.mark.v2

ANSWERS = ["the old sailor", "the old sailor goes home", "the young sailor", "a captain and the sea", "no"]
# Of a request under each rule, what is more to the point here than the rule's own example.
ASKED: dict[str, dict[str, Any]] = {
    "trie": {"rpg": 20.0},  # alone it is on the device
    "extract": {"extract": "the old sailor goes home and the young sailor goes home"},
    "monitor": {"monitor_context": "x = 'a'\n"},
}
# Those that steer: test_v2_steering.py.
UNDER = {
    name: {**load_rule(name).example, **ASKED.get(name, {})}
    for name in RULES
    if not needs_v1(name) and name not in STEERING
}
STRUCTURED = {"close_by_max_tokens": {"regex": "[a-z]{3,}"}}  # what else a request under a rule asks for


@pytest.fixture(scope="module")
def llms(v2_dir: str, v2_plain: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Plain and with trees, both with rules."""
    from vllm_ext.cli.main import app

    folder = tmp_path_factory.mktemp("tries")
    (folder / "answers.txt").write_text("\n".join(ANSWERS))
    file = str(folder / "answers.trie")
    command = ["trie", "build", "--tokenizer", v2_dir, "--output", file, str(folder / "answers.txt")]
    assert CliRunner().invoke(app, command).exit_code == 0
    rules = {**{name: {} for name in UNDER}, "trie": {"files": {"answers": file}}}
    options = {"additional_config": {"vllm_ext": {"rules": rules}}}
    return v2_engine(v2_dir, **options), v2_engine(v2_dir, V2_METHOD, **options)


def test_rules_say_the_same_next_to_trees(llms: tuple[Any, Any]) -> None:
    plain, trees = llms
    assert all(llm.llm_engine.vllm_config.use_v2_model_runner for llm in llms)
    trie = {"trie": "answers"}
    kinds = [
        sampling(extra_args=trie, ignore_eos=False),
        sampling(extra_args=trie, ignore_eos=False, temperature=1.5, seed=3),
        sampling(),
        sampling(extra_args={"rpg": 20.0}, max_tokens=24),
        sampling(extra_args=trie, ignore_eos=False, temperature=1.0, seed=4, repetition_penalty=1.2),
        sampling(temperature=0.8, seed=9),
        sampling(extra_args={**trie, "rpg": 20.0}, ignore_eos=False),
    ]
    texts = prompts(len(kinds), seed=20)
    expected = generate(plain, texts, kinds)
    actual = generate(trees, texts, kinds)
    assert_same_outputs(tokens(expected), tokens(actual))
    for index in (0, 1, 4, 6):
        assert actual[index].text in ANSWERS
        assert actual[index].finish_reason == "stop"
    assert counters(trees)["spec_accepted_tokens"] > 5


def test_a_trie_alone_is_followed_on_the_device(
    llms: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over prefixes, drafts and requests that come later into the same slots; a wrong state leaves the set."""
    monkeypatch.setattr(RuleProcessor, "_read", None)  # of what the host waits for
    kinds = [
        sampling(extra_args={"trie": "answers"}, ignore_eos=False, temperature=1.0, seed=i) for i in range(12)
    ]
    known = {tuple(llms[0].get_tokenizer().encode(answer)) for answer in ANSWERS}
    for llm in llms:
        found = generate(llm, prompts(12, seed=3), kinds)
        # Tokens: of a prompt that ends inside a character the text has the rest.
        assert (said := {tuple(ids[:-1]) for ids in tokens(found)}) <= known
        assert len(said) > 2
        assert all(answer.finish_reason == "stop" for answer in found)
    monkeypatch.setattr(trie_rows, "catch_up", lambda *given: None)  # the mutation
    found = generate(llms[1], prompts(2, seed=3), kinds[0])
    assert not {tuple(ids[:-1]) for ids in tokens(found)} & known


def test_wrong_requests_are_refused(llms: tuple[Any, Any]) -> None:
    for llm in llms:
        with pytest.raises(VLLMValidationError, match="nothing"):
            generate(llm, prompts(1), sampling(extra_args={"trie": "nothing"}, ignore_eos=False))


@rule_faults.WHERE
@pytest.mark.parametrize("name", UNDER)
def test_a_rule_that_raises_ends_its_request_alone(llms: tuple[Any, Any], name: str, where: str) -> None:
    for llm in llms[1:] if where == rule_faults.TREE else llms:
        rule_faults.check_that_one_request_ends(
            llm,
            name,
            lambda _: sampling(
                extra_args=UNDER[name],
                ignore_eos=False,
                max_tokens=12,
                structured_outputs=StructuredOutputsParams(**STRUCTURED[name])
                if name in STRUCTURED
                else None,
            ),
            sampling(max_tokens=12),
            where,
            prompts(3, seed=20),
        )
