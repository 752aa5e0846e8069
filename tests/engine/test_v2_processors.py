# SPDX-License-Identifier: Apache-2.0
"""The user's logits processors of V1's interface and the user's scheduler next to trees on V2: plain V2's output."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, v2_engine, v2_engine_ahead
from helpers import assert_same_outputs, preemptions
from v1_processors import V1_NAMES, V2_NAMES, Sums
from v2_requests import counters, generate, prompts, sampling, tokens
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = pytest.mark.v2

SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
KINDS: list[dict[str, Any]] = [
    {},
    {"extra_args": {"no_echo": True}},
    {**SEEDED, "extra_args": {"no_echo": True}},
    {"extra_args": {"sums": True}},
    {**SEEDED, "extra_args": {"sums": True}},
    {**SEEDED, "temperature": 1.7, "extra_args": {"gap": True}},
    {"extra_args": {"gap": True, "no_echo": True}},
    {**SEEDED, "top_k": 50, "extra_args": {"gap": True, "no_echo": True, "sums": True}},
    {**SEEDED, "frequency_penalty": 0.4, "bad_words": ["the"]},
    {"extra_args": {"sums": True}, "thinking_token_budget": 3},
]


@pytest.fixture(scope="module")
def plain(v2_dir: str, v2_plain: Any) -> Any:
    """The same rules by V2's interface."""
    return v2_engine(v2_dir, logits_processors=V2_NAMES)


@pytest.fixture(scope="module")
def trees(v2_dir: str, plain: Any) -> Any:
    return v2_engine(v2_dir, V2_METHOD, logits_processors=V1_NAMES)


def texts(count: int, seed: int = 41) -> list[list[int]]:
    return [text * 2 for text in prompts(count, seed)]


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@pytest.mark.quick
def test_a_few_in_one_batch(plain: Any, trees: Any) -> None:
    kinds = [sampling(max_tokens=9, **KINDS[i]) for i in (1, 7, 0, 4)]
    expected = tokens(generate(plain, texts(4), kinds))
    assert_same_outputs(expected, tokens(generate(trees, texts(4), kinds)))


def test_all_kinds_in_one_batch(plain: Any, trees: Any) -> None:
    """More requests than places, of different lengths: they come, go and change places."""
    kinds = [sampling(max_tokens=12 + i * 5 % 17, **kind) for i, kind in enumerate(KINDS)]
    expected = tokens(generate(plain, texts(len(kinds)), kinds))
    free = tokens(
        generate(plain, texts(len(kinds)), [sampling(max_tokens=each.max_tokens) for each in kinds])
    )
    assert sum(left == right for left, right in zip(expected, free, strict=True)) < 4
    before = counters(trees)["spec_accepted_tokens"]
    assert_same_outputs(expected, tokens(generate(trees, texts(len(kinds)), kinds)))
    assert counters(trees)["spec_accepted_tokens"] > before + 20
    for kind in (0, 3, 7):  # alone
        alone = tokens(generate(trees, texts(len(kinds))[kind : kind + 1], kinds[kind]))
        assert_same_outputs([expected[kind]], alone)


def test_requests_are_refused_as_by_plain(trees: Any) -> None:
    with pytest.raises(VLLMValidationError, match="sums: True or nothing"):
        generate(trees, texts(1), sampling(extra_args={"sums": 7}))


def test_an_abort_in_the_middle(plain: Any, trees: Any) -> None:
    kinds = [sampling(max_tokens=24, **KINDS[i]) for i in (4, 3, 7, 5)]
    expected = tokens(generate(plain, texts(4), kinds))
    engine, found = trees.llm_engine, {}
    for i, kind in enumerate(kinds):
        engine.add_request(f"r{i}", {"prompt_token_ids": texts(4)[i]}, kind)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 3:
            engine.abort_request(["r0"])
            engine.add_request("late", {"prompt_token_ids": texts(4)[1]}, kinds[1])
    assert_same_outputs([*expected[1:], expected[1]], [found[name] for name in ("r1", "r2", "r3", "late")])
    generate(trees, texts(1), sampling(max_tokens=2))
    (processors,) = runner_of(trees).v1_processors
    assert len(processors._batch.members) <= 1


def test_ahead_and_preempted_with_drafts_of_the_host(v2_dir: str, plain: Any) -> None:
    llm = v2_engine_ahead(v2_dir, V2_HOST_METHOD, logits_processors=V1_NAMES, num_gpu_blocks_override=9)
    kinds = [sampling(max_tokens=110, **KINDS[i]) for i in (4, 3, 7, 0)]
    expected = tokens(generate(plain, prompts(4, seed=9), kinds))
    assert_same_outputs(expected, tokens(generate(llm, prompts(4, seed=9), kinds)))
    assert preemptions(llm) > 0


def test_an_adapter_concerns_those_it_is_for(
    v2_dir: str, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one of V2's interface, and a class that is given as such."""
    names = ["v1_processors:NoEcho", "v1_processors:V2Gap"]
    llm = v2_engine(v2_dir, V2_METHOD, logits_processors=names)
    runner = runner_of(llm)
    admit, dependent = runner.speculator.admit, []

    def watching(slot: int, request: Any, path_dependent: bool) -> None:
        dependent.append(path_dependent)
        admit(slot, request, path_dependent)

    monkeypatch.setattr(runner.speculator, "admit", watching)
    kinds = [sampling(**KINDS[i]) for i in (0, 1, 2, 8, 5)]
    expected = tokens(generate(plain, texts(5), kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts(5), kinds)))
    assert sum(dependent) == 3


def test_greedy_answers_are_v1s(v2_dir: str, plain: Any, trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    kinds = [sampling(**KINDS[i]) for i in (1, 3, 6)]
    answers = tokens(generate(trees, texts(3), kinds))
    envs.disable_envs_cache()
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        on_v1 = v2_engine(v2_dir, logits_processors=[*V1_NAMES[:2], Sums])
        assert not on_v1.llm_engine.vllm_config.use_v2_model_runner
        assert_same_outputs(tokens(generate(on_v1, texts(3), kinds)), answers)
    envs.disable_envs_cache()  # engines after it are V2's again


class OwnScheduler(Scheduler):  # type: ignore[misc]
    """A user's own: the last request that came is scheduled first."""

    scheduled = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.scheduled += 1
        self.running.reverse()
        output = super().schedule(*args, **kwargs)
        self.running.reverse()
        return output


class OwnAhead(AsyncScheduler):  # type: ignore[misc]
    scheduled = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.scheduled += 1
        return super().schedule(*args, **kwargs)


KIND_OF_SCHEDULER = {"sync": OwnScheduler, "async": OwnAhead}


@pytest.mark.parametrize("budget", ["fixed", "goodput"])
@pytest.mark.parametrize(("kind", "ahead"), [("sync", False), ("async", False), ("async", True)])
def test_a_scheduler_of_the_users_own(
    v2_dir: str, v2_plain: Any, kind: str, ahead: bool, budget: str
) -> None:
    make = v2_engine_ahead if ahead else v2_engine
    own: Any = KIND_OF_SCHEDULER[kind]
    path = f"{own.__module__}.{own.__qualname__}"
    llm = make(v2_dir, {**V2_METHOD, "budget": budget}, scheduler_cls=path)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert isinstance(scheduler, own)
    assert hasattr(scheduler, "budget") == (budget == "goodput")
    kinds = [sampling(), sampling(**SEEDED), sampling(frequency_penalty=0.4), sampling(), sampling(**SEEDED)]
    expected = tokens(generate(v2_plain, texts(5), kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts(5), kinds)))
    assert scheduler.scheduled > 5
    if budget == "fixed":
        assert counters(llm)["spec_accepted_tokens"] > 5


def test_a_draft_model_beside_a_scheduler_of_the_users_own(v2_dir: str, v2_plain: Any) -> None:
    """Which vLLM's has no slots for."""
    method = {"method": "dyspec", "model": "self", "num_speculative_tokens": 7, "budget": "fixed"}
    path = f"{OwnScheduler.__module__}.{OwnScheduler.__qualname__}"
    llm = v2_engine(v2_dir, method, scheduler_cls=path)
    kinds = [sampling(), sampling(**SEEDED), sampling(frequency_penalty=0.4)]
    expected = tokens(generate(v2_plain, texts(3), kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts(3), kinds)))
    assert llm.llm_engine.engine_core.engine_core.scheduler.num_lookahead_tokens > 7
    assert counters(llm)["spec_accepted_tokens"] > 5
