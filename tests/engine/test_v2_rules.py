# SPDX-License-Identifier: Apache-2.0
"""Sampling rules on vLLM's V2 runner: the tokens of the same rule without speculation, which are those of V1's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rule_faults
from conftest import V2_METHOD, v2_engine
from helpers import assert_same_outputs
from typer.testing import CliRunner
from v2_requests import counters, generate, on_v1, preempted, prompts, sampling, tokens
from v2_steering import STEERING
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext.config.rules import needs_v1
from vllm_ext.engine.steering.step_deferrals import StepDeferrals
from vllm_ext.engine.v2 import trie_rows
from vllm_ext.engine.v2.logits_processor import RuleProcessor
from vllm_ext.samplers.asap_rule import AsapRule
from vllm_ext.samplers.awrs_rule import AwrsRule
from vllm_ext.samplers.kept import Kept
from vllm_ext.samplers.registry import RULES, load_rule

pytestmark = pytest.mark.v2

ANSWERS = ["the old sailor", "the old sailor goes home", "the young sailor", "a captain and the sea", "no"]
# Of a request under each rule, what is more to the point here than the rule's own example.
ASKED: dict[str, dict[str, Any]] = {
    "trie": {"rpg": 20.0},  # alone it is on the device
    "extract": {"extract": "the old sailor goes home and the young sailor goes home"},
    "monitor": {"monitor_context": "x = 'a'\n"},
}
ANY = "(.|\\n)*"  # of which drafts are right, near temperature 0
# Those that steer: test_v2_steering.py.
UNDER = {
    name: {**load_rule(name).example, **ASKED.get(name, {})}
    for name in RULES
    if name not in STEERING and not needs_v1(name)
} | {"asap": {"asap_regex": ANY}, "awrs": {"awrs_regex": ANY}}
NEARLY: dict[str, Any] = {"temperature": 0.05, "seed": 3}
SEEDED: dict[str, Any] = {"temperature": 1.5, "seed": 3}
STRUCTURED = {"close_by_max_tokens": {"regex": "[a-z]{3,}"}}  # what else a request under a rule asks for


def digits(text: str, ended: bool) -> bool:
    """A user's own check: three to five of them."""
    return text.strip().isdigit() and len(text) >= 3 if ended else len(text) <= 5 and (text + "0").isdigit()


@pytest.fixture(scope="module")
def llms(v2_dir: str, v2_plain: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Plain and with trees, both with rules."""
    from vllm_ext.cli.main import app

    folder = tmp_path_factory.mktemp("tries")
    (folder / "answers.txt").write_text("\n".join(ANSWERS))
    file = str(folder / "answers.trie")
    command = ["trie", "build", "--tokenizer", v2_dir, "--output", file, str(folder / "answers.txt")]
    assert CliRunner().invoke(app, command).exit_code == 0
    rules = {
        **{name: {} for name in UNDER},
        "trie": {"files": {"answers": file}},
        "asap": {"state_dir": str(folder)},
        "awrs": {"checks": {"digits": f"{__name__}:digits"}},
    }
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


SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
WEIGHED = [
    sampling(extra_args=extra_args, ignore_eos=False, max_tokens=24, **values)
    for extra_args, values in (
        ({"awrs_json": SCHEMA}, SEEDED),
        ({"awrs_json": SCHEMA}, {}),
        ({"awrs_regex": "[0-9]{3}-[a-f]{4}"}, {**SEEDED, "seed": 4}),
        ({"awrs_regex": ANY}, {**NEARLY, "logprobs": 1}),
        ({"awrs_check": "digits"}, SEEDED),
        ({"awrs_check": "digits"}, {"logprobs": 1}),
        (None, SEEDED),
    )
]


WEIGHED_TEXTS = prompts(len(WEIGHED), seed=22)
PUT_OFF = (1, 2, 3, 6)  # of these


def weighed(llm: Any, texts: Any = WEIGHED_TEXTS, asked: Any = WEIGHED) -> list[tuple[list[int], Any]]:
    """Answers that rule awrs has a part in, and their weights."""
    given = [{"prompt_token_ids": text} for text in texts]
    found = llm.generate(given, [each.clone() for each in asked], use_tqdm=False)
    return [
        (list(each.outputs[0].token_ids), (each.kv_transfer_params or {}).get("vllm_ext")) for each in found
    ]


def assert_weighed(expected: list[tuple[list[int], Any]], found: list[tuple[list[int], Any]]) -> None:
    assert_same_outputs([ids for ids, _ in expected], [ids for ids, _ in found])
    for (_, right), (_, its) in zip(expected, found, strict=True):
        assert its == (right and pytest.approx(right, rel=1e-3, abs=1e-3))


def test_answers_and_weights_are_v1s(
    v2_dir: str, llms: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, trees = llms
    expected = weighed(plain)
    assert [its is not None for _, its in expected] == [True, False, True, True, True, False, False]
    before = counters(trees)["spec_accepted_tokens"]
    for _ in range(2):
        assert_weighed(expected, weighed(trees))
    assert counters(trees)["spec_accepted_tokens"] > before
    with on_v1(monkeypatch):
        given = {"rules": {"awrs": {"checks": {"digits": f"{__name__}:digits"}}}}
        llm = v2_engine(v2_dir, logits_processors=None, additional_config={"vllm_ext": given})
        assert not llm.llm_engine.vllm_config.use_v2_model_runner
        # But for plain vLLM's noise.
        assert_weighed(expected[:-1], weighed(llm)[:-1])


def hesitate(monkeypatch: pytest.MonkeyPatch, kind: Any) -> set[Any]:
    """Rows of a rule wait once in two of three places; which have."""
    right, waited = kind.apply, set[Any]()

    def apply(self: Any, logits: Any, rows: Any) -> None:
        ready: list[int] = []
        new: list[int] = []
        for place, row in enumerate(rows):
            key = (*row.prompt, None, row.asked.seed, len(row.output))
            late = len(row.output) % 3 != 1 and key not in waited
            waited.update([key] * late)
            (new if late else ready).append(place)
        if ready:
            part = logits[ready]
            right(self, part, [rows[place] for place in ready])
            logits[ready] = part
        self.waiting = new + [ready[place] for place in self.waiting] if ready else new

    monkeypatch.setattr(kind, "apply", apply)
    return waited


def test_tokens_that_are_put_off_are_what_they_would_have_been(
    llms: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts and drafts, next to requests that go on. The mutation: on the device the token stays."""
    texts, asked = [WEIGHED_TEXTS[i] for i in PUT_OFF], [WEIGHED[i] for i in PUT_OFF]
    expected = weighed(llms[0], texts, asked)
    for llm in llms:
        with monkeypatch.context() as patch:
            waited = hesitate(patch, AwrsRule)
            assert_weighed(expected, weighed(llm, texts, asked))
        assert len(waited) > 20
        with monkeypatch.context() as patch:
            hesitate(patch, AwrsRule)
            patch.setattr(StepDeferrals, "places", lambda *given: [])
            assert [ids for ids, _ in weighed(llm, texts, asked)] != [ids for ids, _ in expected]


def test_weights_outlive_preemptions(
    v2_dir: str, llms: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache with room for one of the answers."""
    texts = [list(range(start, start + 90)) for start in (100, 300)]
    asked = [
        sampling(
            extra_args={"awrs_regex": "[a-z ]{80}"},
            ignore_eos=False,
            max_tokens=40,
            temperature=1.5,
            seed=seed,
        )
        for seed in (1, 2)
    ]
    expected = weighed(llms[0], texts, asked)
    rules: dict[str, Any] = {"additional_config": {"vllm_ext": {"rules": {"awrs": {}}}}}
    llm = v2_engine(v2_dir, V2_METHOD, num_gpu_blocks_override=7, max_model_len=160, **rules)
    hesitate(monkeypatch, AwrsRule)
    with preempted(llm):
        assert_weighed(expected, weighed(llm, texts, asked))


def test_grammars_are_waited_for_beside_others(llms: tuple[Any, Any]) -> None:
    for llm in llms:
        rule = rule_of(llm, "awrs")
        rule._grammars._making.kept = Kept(64 << 20, lambda grammar: grammar.num_bytes)
        rule._grammars._making._pool.submit(time.sleep, 5.0)
        core = llm.llm_engine
        asked = [
            sampling(extra_args={"awrs_regex": "[0-9]{4}"}, ignore_eos=False, **SEEDED),
            sampling(max_tokens=4),
        ]
        for name, text, each in zip("ab", prompts(2), asked, strict=True):
            core.add_request(name, {"prompt_token_ids": text}, each)
        ended = []
        while core.has_unfinished_requests():
            ended += [(each.request_id, each.outputs[0].text) for each in core.step() if each.finished]
        assert [name for name, _ in ended] == ["b", "a"]
        assert len(ended[1][1]) == 4


def rule_of(llm: Any, name: str) -> Any:
    return rule_faults.rule_processor(llm.llm_engine.model_executor.driver_worker.worker)._rules[name]


def learnt(future: Any) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """By prefix, what rule asap knows of one prompt: tokens, their chances, and those that the model then obeys."""
    found: dict[tuple[int, ...], tuple[Any, ...]] = {}
    left: list[tuple[tuple[int, ...], Any]] = [((), future._root)]
    while left:
        prefix, node = left.pop()
        found[prefix] = node.ids.tolist(), node.p, node.future
        left += [((*prefix, int(node.ids[place])), each) for place, each in node.below.items()]
    return found


def test_asap_learns_what_it_learns_on_v1(
    v2_dir: str, llms: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers come one by one, so that each goes by the same. Prompts are computed in chunks."""
    text = list(range(100, 190))

    def answers(llm: Any) -> tuple[list[list[int]], Any]:
        rule = rule_of(llm, "asap")
        rule._futures.clear()
        rule._num_bytes = 0
        found = []
        for seed in range(8):
            asked = sampling(extra_args={"asap_regex": "[01]"}, ignore_eos=False, temperature=2.0, seed=seed)
            found += tokens(generate(llm, [text], asked))
        (future,) = rule._futures.values()
        return found, learnt(future)

    said, known = answers(llms[0])
    assert all(len(ids) == 2 for ids in said)
    assert len(known) == 3  # all prefixes

    def check_known(others: Any) -> None:
        assert others.keys() == known.keys()
        for prefix, (ids, *chances) in known.items():
            assert others[prefix][0] == ids
            np.testing.assert_allclose(others[prefix][1:], chances, rtol=1e-3)

    again, others = answers(llms[1])
    assert_same_outputs(said, again)
    check_known(others)
    with monkeypatch.context() as patch:
        hesitate(patch, AsapRule)
        assert_same_outputs(said, answers(llms[1])[0])
    with on_v1(monkeypatch):
        rules: dict[str, Any] = {"additional_config": {"vllm_ext": {"rules": {"asap": {}}}}}
        llm = v2_engine(v2_dir, logits_processors=None, **rules)
        assert not llm.llm_engine.vllm_config.use_v2_model_runner
        check_known(answers(llm)[1])


def test_what_asap_has_learnt_is_saved(llms: tuple[Any, Any]) -> None:
    llm = llms[1]
    generate(llm, prompts(1), sampling(extra_args={"asap_regex": "[ab]{2}"}, ignore_eos=False, **SEEDED))
    (memory,) = llm.llm_engine.model_executor.driver_worker.worker._checkpointers
    before = counters(llm)["state_saves"]
    assert memory._keeper.save()
    assert counters(llm)["state_saves"] == before + 1
    assert list(Path(memory._options.state_dir).glob("asap-*.safetensors"))


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
                **(NEARLY if name in ("asap", "awrs") else {}),
                structured_outputs=StructuredOutputsParams(**STRUCTURED[name])
                if name in STRUCTURED
                else None,
            ),
            sampling(max_tokens=12),
            where,
            prompts(3, seed=20),
        )
