# SPDX-License-Identifier: Apache-2.0
"""Rules next to trees: the tokens that the same rule gives without speculation (float32); and logits processors of
the user's own, which vLLM refuses there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, own_prompts
from typer.testing import CliRunner
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

pytestmark = pytest.mark.engine

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


@pytest.fixture(scope="module")
def options(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from vllm_ext.cli import app

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
    return {
        "additional_config": {"vllm_ext": {"rules": {"trie": {"files": files}}}},
        "logits_processors": [f"{__name__}:NoRepeat"],
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
    """The mutation: processors see what was put out before the step, on every row."""
    from vllm_ext import v1_sampler

    module: Any = v1_sampler
    module.honest = module._Rounds._processors
    module._Rounds._processors = lambda self, requests, emitted: module.honest(
        self, requests, [() for _ in emitted]
    )


def remember_paths(worker: Any) -> None:
    from vllm_ext import v1_sampler

    module: Any = v1_sampler
    module._Rounds._processors = module.honest


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


@pytest.mark.parametrize("extra_args", [{"trie": "nothing"}, {"trie": 4}])
def test_wrong_requests_are_refused_and_hurt_nobody(trees: Any, extra_args: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="vllm_xargs: trie="):
        ask(trees, [params(GREEDY, trie="short"), params(GREEDY, **extra_args)])
    assert ask(trees, [params(GREEDY, trie="short")])[0].text in SHORT
