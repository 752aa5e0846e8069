# SPDX-License-Identifier: Apache-2.0
"""Rules next to trees: the tokens that the same rule gives without speculation (float32); and logits processors of
the user's own, which vLLM refuses there.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rule_faults
from conftest import engine
from helpers import assert_same_outputs, own_prompts
from safetensors import safe_open
from typer.testing import CliRunner
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor, process_dict_updates

from vllm_ext.samplers.base import LearningRule
from vllm_ext.samplers.registry import RULES, load_rule
from vllm_ext.samplers.steering import SteeringRule

pytestmark = pytest.mark.engine

# Rules that steer have test_steering.py.
NAMES = [name for name in RULES if not issubclass(load_rule(name), SteeringRule)]
TITLES = [
    f"The {how} {who} {where}"
    for how, who, where in itertools.product(
        ["old", "young", "forgotten", "invisible", "last"],
        ["sailor", "captain", "lighthouse keeper", "cook", "cook's daughter"],
        ["of the northern islands", "of the northern islands, part two", "and the sea", "goes home"],
    )
]
SHORT = ["yes", "no", "not yet"]
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.5, "seed": 3}
SAMPLING: tuple[dict[str, Any], ...] = (
    GREEDY,
    SEEDED,
    {**GREEDY, "repetition_penalty": 1.3},
    {**SEEDED, "top_p": 0.9, "n": 2},
    {**GREEDY, "logprobs": 2},
    {**SEEDED, "min_p": 0.02, "logit_bias": {33: 4.0}},
)


def short_words(text: str, ended: bool) -> bool:
    """A user's own check: five words of one to four small letters."""
    return (
        re.fullmatch(r"([a-z]{1,4} ){4}[a-z]{1,4}" if ended else r"([a-z]{1,4} ){0,4}[a-z]{0,4}", text)
        is not None
    )


class NoRepeat(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """A user's own: no token twice, of requests that ask for it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("no_repeat"):
            return None

        def forbid(output: list[int], logits: Any) -> Any:
            logits[output] = -float("inf")
            return logits

        return forbid


class Alternate(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """A user's own, by vLLM's whole interface: tokens are even and odd by turns, of requests that ask for it."""

    made = 0

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        type(self).made += 1
        self.outputs: dict[int, list[int]] = {}
        self.odd: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self.outputs,
            batch_update,
            lambda params, prompt, output: output if (params.extra_args or {}).get("alternate") else None,
        )
        self.odd = {index: len(output) % 2 for index, output in self.outputs.items()}

    def apply(self, logits: Any) -> Any:
        for index, odd in self.odd.items():
            logits[index, 1 - odd :: 2] = -float("inf")
        return logits


@pytest.fixture(scope="module")
def options(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from vllm_ext.cli.main import app

    folder = tmp_path_factory.mktemp("tries")
    files = {}
    for name, answers in (("titles", TITLES), ("short", SHORT)):
        (folder / f"{name}.txt").write_text("\n".join(answers))
        files[name] = str(folder / f"{name}.trie")
        arguments = [
            "trie",
            "build",
            "--tokenizer",
            slice_dir,
            "--output",
            files[name],
            f"{folder / name}.txt",
        ]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    rules = {
        **{name: {} for name in NAMES},
        "trie": {"files": files},
        "asap": {"state_dir": str(folder)},
        "awrs": {"checks": {"short_words": f"{__name__}:short_words"}},
    }
    return {
        "additional_config": {"vllm_ext": {"rules": rules}},
        "logits_processors": [f"{__name__}:NoRepeat", f"{__name__}:Alternate"],
    }


@pytest.fixture(scope="module")
def plain(slice_dir: str, options: dict[str, Any]) -> Iterator[Any]:
    yield from engine(slice_dir, **options)


@pytest.fixture(scope="module")
def trees(slice_dir: str, options: dict[str, Any], tested_method: dict[str, Any]) -> Iterator[Any]:
    yield from engine(slice_dir, tested_method, **options)


def params(sampling: dict[str, Any], **extra_args: Any) -> SamplingParams:
    return SamplingParams(max_tokens=40, extra_args=extra_args or None, **sampling)


def ask(llm: Any, given: list[SamplingParams]) -> list[Any]:
    messages = [[{"role": "user", "content": own_prompts()[i % 8]}] for i in range(len(given))]
    outputs = llm.chat(messages, [each.clone() for each in given], use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def counters(llm: Any) -> dict[str, int]:
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result


def check_same(plain: Any, trees: Any, given: list[SamplingParams]) -> list[Any]:
    expected, actual = ask(plain, given), ask(trees, given)
    assert_same_outputs([o.token_ids for o in expected], [o.token_ids for o in actual])
    assert [o.text for o in expected] == [o.text for o in actual]
    alone = ask(trees, given[:1])
    assert_same_outputs([expected[0].token_ids], [alone[0].token_ids])
    assert counters(trees)["fallbacks:proposer_error"] == 0
    return actual


def test_answers_are_of_the_set_and_plains(plain: Any, trees: Any) -> None:
    """Two sets and free requests in one batch."""
    given = [params(sampling, trie="titles") for sampling in SAMPLING]
    given += [params(GREEDY), params(SEEDED, trie="short"), params(SEEDED)]
    actual = check_same(plain, trees, given)
    texts = [output.text for output in actual]
    assert set(texts[:7]) <= set(TITLES)
    assert len(set(texts[:7])) > 2
    assert texts[8] in SHORT
    assert not {texts[7], texts[9]} & {*TITLES, *SHORT}
    assert [output.finish_reason for output in actual[:7]] == ["stop"] * 7


def test_what_is_certain_is_drafted(trees: Any, drafts_by_model: bool) -> None:
    before = counters(trees)
    answers = ask(trees, [params(SEEDED, trie="titles")] * 4)
    new = {name: value - before[name] for name, value in counters(trees).items()}
    assert new["spec_emitted_tokens"] == sum(len(answer.token_ids) for answer in answers)
    if not drafts_by_model:
        assert new["spec_emitted_tokens"] > 2 * new["spec_steps"]


def forget_paths(worker: Any) -> None:
    """The mutation: rules see what was put out before the step, on every row."""
    from vllm_ext.engine.v1 import row_states

    module: Any = row_states
    module.honest = module.RowStates.processors
    module.RowStates.processors = lambda self, whole, requests, outputs: module.honest(
        self, whole, requests, [self._grown[request][0][: self._grown[request][1]] for request in requests]
    )


def remember_paths(worker: Any) -> None:
    from vllm_ext.engine.v1 import row_states

    module: Any = row_states
    module.RowStates.processors = module.honest


def test_rows_without_their_paths_are_caught(trees: Any) -> None:
    trees.collective_rpc(forget_paths)
    try:
        wrong = ask(trees, [params(SEEDED, trie="titles")] * 4)
    finally:
        trees.collective_rpc(remember_paths)
    assert not {answer.text for answer in wrong} <= set(TITLES)


def test_the_users_own_processors(plain: Any, trees: Any) -> None:
    given = [params(sampling, no_repeat=1) for sampling in SAMPLING] + [params(GREEDY)]
    given.append(params(GREEDY, trie="titles", no_repeat=0))
    actual = check_same(plain, trees, given)
    for output in actual[:6]:
        assert len(set(output.token_ids)) == len(output.token_ids)
    before = counters(trees)
    ask(trees, given[:2])
    assert counters(trees)["spec_draft_tokens"] > before["spec_draft_tokens"]


def how_many_made(worker: Any) -> int:
    return Alternate.made


def test_a_processor_is_made_once(plain: Any, trees: Any) -> None:
    """Of vLLM's whole interface, beside one of its adapter, requests that use neither, one or both, and a rule. Found:
    both made again for each accepted depth of each step, also where nobody used them.
    """
    assert trees.collective_rpc(how_many_made) == [1]
    given = [params(sampling, alternate=1) for sampling in SAMPLING] + [params(GREEDY), params(SEEDED)]
    given += [
        params(GREEDY, alternate=1, no_repeat=1),
        params(GREEDY, no_repeat=1),
        params(SEEDED, trie="titles"),
    ]
    actual = check_same(plain, trees, given)
    for output in [*actual[:7], actual[9]]:  # the fourth has two answers
        assert [token % 2 for token in output.token_ids] == [
            place % 2 for place in range(len(output.token_ids))
        ]
    before = counters(trees)
    ask(trees, given[:2])
    assert counters(trees)["spec_accepted_tokens"] > before["spec_accepted_tokens"]
    assert trees.collective_rpc(how_many_made) == [1]


@pytest.mark.parametrize("extra_args", [{"trie": "nothing"}, {"trie": 4}])
def test_wrong_requests_are_refused_and_hurt_nobody(trees: Any, extra_args: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="vllm_xargs: trie="):
        ask(trees, [params(GREEDY, trie="short"), params(GREEDY, **extra_args)])
    assert ask(trees, [params(GREEDY, trie="short")])[0].text in SHORT


SCHEMA = (
    '{"type": "object", "properties": {"age": {"type": "integer"}, "name": {"type": "string", "maxLength": 12}}, '
    '"required": ["age", "name"], "additionalProperties": false}'
)


def test_awrs_has_its_tokens_and_its_weights(plain: Any, trees: Any) -> None:
    given = [params({**SEEDED, "seed": seed}, awrs_json=SCHEMA) for seed in range(3)]
    given += [params(SEEDED, awrs_check="short_words"), params(GREEDY, awrs_check="short_words")]
    given += [params(SEEDED, awrs_regex="[0-9]{3}-[0-9]{3}"), params(SEEDED), params(SEEDED, trie="short")]
    messages = [[{"role": "user", "content": own_prompts()[i % 8]}] for i in range(len(given))]
    expected, actual = (
        llm.chat(messages, [each.clone() for each in given], use_tqdm=False) for llm in (plain, trees)
    )
    assert_same_outputs([o.outputs[0].token_ids for o in expected], [o.outputs[0].token_ids for o in actual])
    assert short_words(actual[3].outputs[0].text, ended=True)
    assert short_words(actual[4].outputs[0].text, ended=True)
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", actual[5].outputs[0].text)
    for left, right in zip(expected, actual, strict=True):
        if left.kv_transfer_params is None:
            assert right.kv_transfer_params is None
        else:
            weight = left.kv_transfer_params["vllm_ext"]["awrs_log_weight"]
            assert weight <= 0.0
            found = right.kv_transfer_params["vllm_ext"]["awrs_log_weight"]
            assert found == pytest.approx(weight, rel=1e-3, abs=1e-3)
    with_weight = [output.kv_transfer_params is not None for output in actual]
    assert with_weight == [True, True, True, True, False, True, False, False]
    # A regular expression of seven characters out of thousands of tokens: hardly the model's own words.
    assert actual[5].kv_transfer_params["vllm_ext"]["awrs_log_weight"] < -3.0
    assert counters(trees)["fallbacks:proposer_error"] == 0


def test_awrs_without_a_seed_varies(trees: Any) -> None:
    answers = ask(trees, [params({"temperature": 1.5}, awrs_regex="[0-9]{6}")] * 4)
    assert len({answer.text for answer in answers}) > 1


def test_asap_learns_from_answer_to_answer(plain: Any, trees: Any) -> None:
    """The same with trees, as long as requests come one by one: what the first put out says how the next is drawn."""
    texts = []
    for seed in range(6):
        given = [params({**SEEDED, "seed": seed % 3}, asap_regex="(0|1[01]{5}|2[a-z]{4})")]
        expected, actual = ask(plain, given), ask(trees, given)
        assert_same_outputs([expected[0].token_ids], [actual[0].token_ids])
        assert re.fullmatch("0|1[01]{5}|2[a-z]{4}", actual[0].text)
        texts.append(actual[0].text)
    assert texts[:3] != texts[3:]  # the seeds are the same
    given = [params(SEEDED, asap_json=SCHEMA), params(SEEDED)]
    expected, actual = ask(plain, given), ask(trees, given)
    assert_same_outputs([o.token_ids for o in expected], [o.token_ids for o in actual])


def save(worker: Any) -> bool:
    (memory,) = worker._checkpointers
    return bool(memory._keeper.save())


def test_saves_of_rules_are_counted_without_a_method_too(plain: Any) -> None:
    def saves() -> int:
        (found,) = [each for each in plain.get_metrics() if each.name == "vllm_ext:state_saves"]
        assert found.labels["method"] == "none"
        return int(found.value)

    before = saves()
    ask(plain, [params(SEEDED, asap_regex="[ab]{2}")])
    assert plain.collective_rpc(save) == [True]
    assert saves() == before + 1


def test_what_asap_has_learnt_is_saved(trees: Any, options: dict[str, Any]) -> None:
    from vllm_ext.samplers.asap import ExpectedFuture
    from vllm_ext.samplers.asap_rule import AsapOptions, AsapRule

    ask(trees, [params(SEEDED, asap_regex="[ab]{3}")])
    before = counters(trees)["state_saves"]
    assert trees.collective_rpc(save) == [True]
    assert counters(trees)["state_saves"] == before + 1
    (file,) = Path(options["additional_config"]["vllm_ext"]["rules"]["asap"]["state_dir"]).glob(
        "asap-*.safetensors"
    )
    with safe_open(file, framework="numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    rule = AsapRule(AsapOptions(), SimpleNamespace(size=4096, pieces=[], encode=list))
    rule.load_state_dict(arrays)
    assert all(len(future) > 0 for future in rule._futures.values())
    assert any(future.bound < 1.0 for future in rule._futures.values())
    assert all(isinstance(future, ExpectedFuture) for future in rule._futures.values())


@pytest.mark.parametrize(
    ("sampling", "extra_args", "says"),
    [
        (GREEDY, {"awrs_json": "{"}, "vllm_xargs awrs_json: Invalid JSON"),
        (SEEDED, {"asap_regex": "("}, "vllm_xargs asap_regex: Failed to transform regex"),
        (SEEDED, {"awrs_check": "mine"}, "awrs_check='mine' is not allowed; allowed: 'short_words'"),
        (SEEDED, {"awrs_regex": "a", "trie": "short"}, "rule 'awrs' does not go with 'trie' in one request"),
        (GREEDY, {"asap_regex": "a"}, "temperature=0 does not go with asap"),
        (GREEDY, {"extract": "a", "trie": "short"}, "trie and extract do not go together"),
        (GREEDY, {"rpg": -1.0}, "rpg=-1.0 is not allowed"),
    ],
)
def test_grammars_that_cannot_be_are_refused(
    trees: Any, sampling: dict[str, Any], extra_args: dict[str, Any], says: str
) -> None:
    with pytest.raises(VLLMValidationError, match=says):
        ask(trees, [params(GREEDY, trie="short"), params(sampling, **extra_args)])
    assert ask(trees, [params(GREEDY, trie="short")])[0].text in SHORT


PASSAGE = (
    "The harbour of Vardo was closed for the winter. Two boats lay upside down on the pier, and the cook, who had "
    "nobody to cook for, painted the third one blue."
)
CODE = "class Boat:\n    def launch(self): ...\n\n    def load(self): ...\n\n\nboat = Boat()\n"


def test_spans_identifiers_and_repetition(plain: Any, trees: Any) -> None:
    """Three rules and free requests in one batch, two of the rules in one request."""
    given = [params(sampling, extract=PASSAGE, extract_max_tokens=12) for sampling in SAMPLING[:5]]
    given += [
        params({**SEEDED, "seed": seed}, monitor="python", monitor_context=CODE + "boat.")
        for seed in range(3)
    ]
    given += [params(GREEDY, rpg=3.0), params(GREEDY), params({**SEEDED, "seed": 5}, rpg=2.0, trie="short")]
    actual = check_same(plain, trees, given)
    for output in actual[:6]:  # the fourth of them has two answers
        assert output.text.strip() in PASSAGE
        assert 0 < len(output.token_ids) <= 13
    for output in actual[6:9]:
        assert re.match(r"(launch|load|__\w+__)(\W|$)", output.text), output.text
    assert actual[-1].text in SHORT


def test_code_that_repeats_itself_repeats_less(plain: Any, trees: Any) -> None:
    """A grammar makes the model list numbers; the penalty makes it stop."""
    forced = [params({"temperature": 0}, rpg=20.0), params({"temperature": 0})]
    for request in forced:
        request.structured_outputs = StructuredOutputsParams(regex=r"\[(1,)+\]")
    expected, actual = ask(plain, forced), ask(trees, forced)
    assert_same_outputs([o.token_ids for o in expected], [o.token_ids for o in actual])
    assert actual[0].text.count("1") <= 4
    assert len(actual[1].token_ids) > len(actual[0].token_ids)


def test_structured_output_is_whole_when_its_tokens_are_used_up(plain: Any, trees: Any) -> None:
    """Greedy, seeded, with penalties; as few tokens as the shortest answer has, and more."""
    word = {"type": "string", "minLength": 3}
    names = ("name", "home", "ship")
    record = {"type": "object", "properties": dict.fromkeys(names, word), "required": list(names)}
    samplings: list[dict[str, Any]] = [
        GREEDY,
        SEEDED,
        {**GREEDY, "repetition_penalty": 1.3},
        {**SEEDED, "top_p": 0.9},
    ]
    given = [
        params(each, **on)
        for each in samplings
        for on in ({"close_by_max_tokens": True}, {})
        for _ in range(2)
    ]
    for number, asked in enumerate(given):
        asked.structured_outputs = StructuredOutputsParams(json=record)
        asked.max_tokens = 28 + 7 * (number % 2)  # of the slice's tokens
    texts = [output.text for output in check_same(plain, trees, given)]
    closed = [text for text, asked in zip(texts, given, strict=True) if asked.extra_args]
    assert all(json.loads(text).keys() >= set(names) for text in closed)
    cut = [text for text, asked in zip(texts, given, strict=True) if not asked.extra_args]
    assert not all(text.endswith("}") for text in cut)
    # What cannot fit is an error, and nobody else's.
    given[0].max_tokens = 4
    for llm in (plain, trees):
        too_few, *others = ask(llm, given)
        assert too_few.finish_reason == "error"
        assert "no ending of this grammar fits in max_tokens=4" in too_few.stop_reason
        assert [output.text for output in others] == texts[1:]


def test_the_best_span_of_all(plain: Any, trees: Any) -> None:
    """As likely as greedy decoding's at least, and what prompt_logprobs say of it is the same."""
    from vllm_ext.extraction import extract

    prompt = plain.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": f"{PASSAGE}\n\nWhat was closed?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    (found,) = extract(plain, [prompt], [PASSAGE], max_tokens=6)
    (again,) = extract(trees, [prompt], [PASSAGE], max_tokens=6, width=3)
    assert found is not None
    assert again is not None
    assert tuple(again.token_ids) == tuple(found.token_ids)
    assert again.logprob == pytest.approx(found.logprob, abs=1e-3)
    assert found.text.strip() in PASSAGE
    extra_args = {"extract": PASSAGE, "extract_max_tokens": 6}
    given = SamplingParams(temperature=0, max_tokens=7, logprobs=0, extra_args=extra_args)
    (greedy,) = plain.generate([{"prompt_token_ids": prompt}], given, use_tqdm=False)
    assert greedy.outputs[0].cumulative_logprob <= found.logprob + 1e-3
    end = plain.get_tokenizer().eos_token_id
    whole = [*prompt, *found.token_ids, end]
    (output,) = plain.generate(
        [{"prompt_token_ids": whole}], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    rows = zip(output.prompt_logprobs[len(prompt) :], whole[len(prompt) :], strict=True)
    assert sum(row[token].logprob for row, token in rows) == pytest.approx(found.logprob, abs=1e-3)


# Of a request under each rule, what is more to the point here than the rule's own example.
ASKED: dict[str, dict[str, Any]] = {
    "trie": {"trie": "titles"},
    "extract": {"extract": PASSAGE},
    "monitor": {"monitor_context": CODE},
    "asap": {"asap_json": SCHEMA},
    "awrs": {"awrs_json": SCHEMA},
}
UNDER: dict[str, SamplingParams] = {
    name: params(
        SEEDED if name in ("asap", "awrs") else GREEDY, **{**load_rule(name).example, **ASKED.get(name, {})}
    )
    for name in NAMES
}


UNDER["close_by_max_tokens"].structured_outputs = StructuredOutputsParams(json=SCHEMA)


def test_every_rule_in_one_batch(plain: Any, trees: Any) -> None:
    """But for one that learns: its law depends on which answer came first."""
    given = [asked for name, asked in UNDER.items() if not issubclass(load_rule(name), LearningRule)]
    check_same(plain, trees, [*given, params(GREEDY), params(SEEDED)])


@rule_faults.WHERE
@pytest.mark.parametrize("name", UNDER)
def test_a_rule_that_raises_ends_its_request_alone(plain: Any, trees: Any, name: str, where: str) -> None:
    for llm in (trees,) if where == rule_faults.TREE else (plain, trees):
        prompts = rule_faults.tokens_of(llm, 3)
        rule_faults.check_that_one_request_ends(
            llm, name, lambda _: UNDER[name], params(GREEDY), where, prompts
        )
    if where == rule_faults.START and name != "extract":  # whose rows ask for the same
        rule_faults.check_that_drafts_are_lost(trees, name, lambda _: UNDER[name], params(GREEDY), prompts)
    assert counters(trees)["fallbacks:proposer_error"] == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"asap_json": ""}, "asap_json='' is not allowed"),
        ({"asap_grammar": ""}, "asap_grammar='' is not allowed"),
        ({"asap_regex": ""}, "asap_regex='' is not allowed"),
        ({"awrs_json": ""}, "awrs_json='' is not allowed"),
        ({"awrs_grammar": ""}, "awrs_grammar='' is not allowed"),
        ({"awrs_grammar": "nothing"}, "awrs_grammar: Invalid grammar"),
        ({"awrs_grammar": "start: missing"}, "awrs_grammar: Invalid grammar"),
        ({"asap_json": '{"const": NaN}'}, "asap_json: Failed to transform json schema"),
    ],
)
def test_what_is_let_through_compiles(trees: Any, given: dict[str, str], says: str) -> None:
    with pytest.raises(VLLMValidationError, match=says):
        ask(trees, [params(SEEDED, **given)])


@pytest.mark.parametrize("rule", ["asap", "awrs"])
def test_lark_is_a_grammar_as_vllm_has_it(plain: Any, trees: Any, rule: str) -> None:
    for llm in (plain, trees):
        (answer,) = ask(llm, [params(SEEDED, **{f"{rule}_grammar": 'start: "yes" | "no"\n'})])
        assert answer.text in ("yes", "no")


@pytest.mark.parametrize("which", ["plain", "trees"])
def test_what_takes_too_long_ends_its_request(request: pytest.FixtureRequest, which: str) -> None:
    llm = request.getfixturevalue(which)
    (right,) = ask(llm, [params(GREEDY)])
    llm.collective_rpc(limit_compiling, args=(0.005,))
    try:
        same, late = ask(llm, [params(GREEDY), params(SEEDED, awrs_regex="(.{0,450}[a-z]){0,500}")])
    finally:
        llm.collective_rpc(limit_compiling, args=(10.0,))
    assert late.finish_reason == "error"
    assert "takes more than 0.005 s to compile" in late.stop_reason
    assert same.token_ids == right.token_ids
    (after,) = ask(llm, [params(SEEDED, awrs_regex="[a-c]{4}")])
    assert re.fullmatch("[a-c]{4}", after.text)


def limit_compiling(worker: Any, seconds: float) -> None:
    rule_faults.rule_processor(worker)._rules["awrs"]._grammars._seconds = seconds


@pytest.mark.parametrize("given", [{"asap_regex": "[a-e]{9}"}, {"awrs_regex": "[a-f]{9}"}])
def test_rows_that_waited_draw_what_they_would_have(plain: Any, trees: Any, given: dict[str, str]) -> None:
    """A seed's noise is not used up by waiting."""
    for llm in (plain, trees):
        llm.collective_rpc(forget_grammars)
        waited = ask(llm, [params(SEEDED, **given), params(SEEDED)])
        if "asap_regex" in given:
            llm.collective_rpc(forget_futures)
        ready = ask(llm, [params(SEEDED, **given), params(SEEDED)])
        assert [each.token_ids for each in waited] == [each.token_ids for each in ready]


def forget_grammars(worker: Any) -> None:
    """And let the next ones take a while."""
    from vllm_ext.samplers.kept import Kept

    rules = rule_faults.rule_processor(worker)._rules
    for name in ("asap", "awrs"):
        making = rules[name]._grammars._making
        making.kept = Kept(64 << 20, lambda grammar: grammar.num_bytes)
        making._pool.submit(time.sleep, 0.4)
    forget_futures(worker)


def forget_futures(worker: Any) -> None:
    rule = rule_faults.rule_processor(worker)._rules["asap"]
    rule._futures.clear()
    rule._num_bytes = 0


def properties(count: int) -> str:
    names = {f"property_{number}": {"type": "string"} for number in range(count)}
    return json.dumps({"type": "object", "properties": names, "required": list(names)})


STALLS: dict[str, dict[str, Any]] = {
    # Of these it is each mask that takes long, up to seconds.
    "regex": {"asap_regex": "(.{0,500}[a-z]){0,500}"},
    "awrs": {"awrs_regex": "(.{0,400}[a-z]){0,500}"},
    "long": {"asap_json": '{"type": "string", "maxLength": 1000000}'},
    "properties": {"asap_json": properties(600)},
    "monitor": {
        "monitor": "python",
        "monitor_context": "x = [1]\n" * 5000 + "import collections\ncollections.",
    },
    "extract": {"extract": " a" * 49999, "extract_max_tokens": 1000},
}


SLOW_MASKS = {"regex", "awrs"}


def gaps(llm: Any, given: SamplingParams | None) -> tuple[list[float], Any]:
    """Seconds between the tokens of a request that runs beside another one, and what became of that."""
    core, beside = llm.llm_engine, given is not None
    free = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
    core.add_request("free", own_prompts()[0], free)
    last, found, answer = None, [], None
    while core.has_unfinished_requests():
        for output in core.step():
            if output.request_id == "beside" and output.finished:
                answer = output.outputs[0]
            if output.request_id == "free":
                now = time.perf_counter()
                if last is not None:
                    found.append(now - last)
                last = now
                if len(output.outputs[0].token_ids) >= 20 and given is not None:
                    core.add_request("beside", own_prompts()[1], given.clone())
                    given, last = None, None  # what this process does is not the engine's
                if output.finished and beside and answer is None:
                    core.add_request("free", own_prompts()[0], free)
    return found, answer


@pytest.mark.slow
@pytest.mark.parametrize("name", STALLS)
@pytest.mark.parametrize("which", ["plain", "trees"])
def test_nobody_else_waits(request: pytest.FixtureRequest, which: str, name: str) -> None:
    llm = request.getfixturevalue(which)
    quiet = sorted(gaps(llm, None)[0])
    sampling = {**(GREEDY if name == "monitor" else SEEDED), "max_tokens": 8 if name in SLOW_MASKS else 200}
    bias = {"logit_bias": {llm.get_tokenizer().eos_token_id: -100.0}} if name == "extract" else {}
    found, answer = gaps(llm, SamplingParams(**sampling, **bias, extra_args=STALLS[name]))
    assert answer is not None
    assert max(found) < max(0.3, 4 * quiet[-1]), (max(found), quiet[-1], answer)
    if name != "long":  # which a slow machine may not compile in time
        assert answer.finish_reason in ("stop", "length"), answer
    print(f"{which} {name}: {max(found):.3f} s beside {quiet[-1]:.3f} s, then {answer.finish_reason}")
