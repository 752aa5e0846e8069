# SPDX-License-Identifier: Apache-2.0
"""Rules that read layers and a second model, next to trees: the tokens that the same rule gives without speculation
(float32), and those that the papers' formulas give on the model as its authors wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import engine
from helpers import assert_same_outputs, own_prompts, preemptions
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
COMPANION = {"model": "self", "self_layers": 1}
RULES: dict[str, dict[str, Any]] = {
    "contrastive": {**COMPANION, "alpha": 0.05},
    "anchored": {**COMPANION, "k": 0.4},
    "entropy_adaptive": {**COMPANION, "threshold": 4.0, "dwell": 2},
    "dola": {"candidates": [0, 1], "norm": True},
    "momentum": {},
}


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"additional_config": {"vllm_ext": {"rules": RULES}}}


@pytest.fixture(scope="module")
def plain(slice_dir: str, options: dict[str, Any]) -> Iterator[Any]:
    yield from engine(slice_dir, **options)


@pytest.fixture(scope="module")
def trees(slice_dir: str, options: dict[str, Any], tested_method: dict[str, Any]) -> Iterator[Any]:
    yield from engine(slice_dir, tested_method, **options)


def params(sampling: dict[str, Any], **extra_args: Any) -> SamplingParams:
    return SamplingParams(max_tokens=40, ignore_eos=True, extra_args=extra_args or None, **sampling)


def prompts_of(llm: Any, count: int) -> list[list[int]]:
    return [llm.get_tokenizer().encode(own_prompts()[i % 8]) for i in range(count)]


def ask(llm: Any, given: list[SamplingParams], first: int = 0) -> list[Any]:
    prompts = prompts_of(llm, first + len(given))[first:]
    inputs = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs: list[Any] = llm.generate(inputs, [each.clone() for each in given], use_tqdm=False)
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def counters(llm: Any) -> dict[str, int]:
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result


ALL = [
    params(GREEDY, contrastive=True),
    params(GREEDY, contrastive_form="ratio", contrastive_alpha=0.2),
    params(GREEDY, dola=True),
    params(GREEDY, momentum=True),
    params(GREEDY, anchored=True),
    params(GREEDY, entropy_adaptive=True),
    params(SEEDED, contrastive_beta=1.5),
    params({**SEEDED, "n": 2, "top_p": 0.9}, dola_alpha=0.01),
    params(SEEDED, anchored_k=0.05),
    params(SEEDED, entropy_adaptive_threshold=5.0),
    params({**GREEDY, "repetition_penalty": 1.2, "logprobs": 2}, dola=True, contrastive=True),
    params(GREEDY),
    params(SEEDED),
]


@pytest.fixture(scope="module")
def expected(plain: Any) -> list[Any]:
    return ask(plain, ALL)


def test_all_rules_in_one_batch(trees: Any, expected: list[Any]) -> None:
    before = counters(trees)
    actual = ask(trees, ALL)
    assert_same_outputs(tokens_of(expected), tokens_of(actual))
    for left, right in zip(expected, actual, strict=True):
        assert (left.kv_transfer_params is None) == (right.kv_transfer_params is None)
        if left.kv_transfer_params is not None:
            found = right.kv_transfer_params["vllm_ext"]["anchored_kl"]
            assert found == pytest.approx(left.kv_transfer_params["vllm_ext"]["anchored_kl"], rel=1e-3)
    assert sum(output.kv_transfer_params is not None for output in actual) == 2
    new = {name: value - before[name] for name, value in counters(trees).items()}
    assert new["spec_emitted_tokens"] > 1.05 * new["spec_steps"]
    assert new["fallbacks:proposer_error"] == 0


@pytest.mark.parametrize("index", range(6))
def test_each_rule_alone_and_four_at_once(plain: Any, trees: Any, expected: list[Any], index: int) -> None:
    alone = ask(trees, [ALL[index]], first=index)
    assert_same_outputs(tokens_of(expected[index : index + 1]), tokens_of(alone))
    assert_same_outputs(tokens_of(ask(plain, [ALL[index]] * 4)), tokens_of(ask(trees, [ALL[index]] * 4)))


def test_free_requests_are_as_without_rules(plain_slice_llm: Any, expected: list[Any]) -> None:
    free = ask(plain_slice_llm, ALL[-2:], first=len(ALL) - 2)
    assert_same_outputs(tokens_of(free), tokens_of(expected[-2:]))


def mistake_rows(worker: Any) -> None:
    """The mutation: all rows of a walk read what stands beside the first."""
    from vllm_ext.v1_beside import StepRows

    kept: Any = StepRows
    kept.honest = StepRows.call
    kept.call = lambda self, rows: kept.honest(self, rows * 0)


def mend_rows(worker: Any) -> None:
    from vllm_ext.v1_beside import StepRows

    kept: Any = StepRows
    kept.call = kept.honest


def test_rows_beside_the_wrong_ones_are_caught(trees: Any, expected: list[Any]) -> None:
    trees.collective_rpc(mistake_rows)
    try:
        wrong = ask(trees, ALL)
    finally:
        trees.collective_rpc(mend_rows)
    for index in (0, 1, 2, 4):
        assert tokens_of(wrong[index : index + 1]) != tokens_of(expected[index : index + 1]), index


def test_the_formulas_on_the_model_itself(slice_dir: str, expected: list[Any], plain: Any) -> None:
    """Each greedy token is the best by float64 formulas over the logits of transformers, up to rounding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(slice_dir, dtype=torch.float32)
    prompts = prompts_of(plain, 4)

    def scores_of(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = list(expected[index].outputs[0].token_ids)
        with torch.inference_mode():
            states = model.model(torch.tensor([[*prompts[index], *tokens]]), output_hidden_states=True)
            rows = slice(len(prompts[index]) - 1, -1)
            early = [model.lm_head(model.model.norm(states.hidden_states[i][0, rows])) for i in (0, 1)]
            final = model.lm_head(states.last_hidden_state[0, rows])
        return torch.tensor(tokens), torch.stack(early).double(), final.double()

    tokens, early, final = scores_of(0)  # contrastive: the amateur is the first layer
    contrast = 1.5 * final - 0.5 * early[1]
    contrast[final < final.amax(1, keepdim=True) + torch.log(torch.tensor(0.05))] = -torch.inf
    assert bool((contrast.gather(1, tokens[:, None])[:, 0] >= contrast.amax(1) - 1e-3).all())
    assert not torch.equal(contrast.argmax(1), final.argmax(1))

    tokens, early, final = scores_of(2)  # dola
    log_q, log_early = final.log_softmax(1), early.log_softmax(2)
    middle = ((log_q.exp() + log_early.exp()) / 2).log()
    divergence = (log_q.exp() * (log_q - middle) + log_early.exp() * (log_early - middle)).sum(2) / 2
    chosen = divergence.argmax(0)
    contrast = log_q - log_early[chosen, torch.arange(len(tokens))]
    contrast[final < final.amax(1, keepdim=True) + torch.log(torch.tensor(0.1))] = -torch.inf
    assert bool((contrast.gather(1, tokens[:, None])[:, 0] >= contrast.amax(1) - 1e-3).all())
    assert not torch.equal(contrast.argmax(1), final.argmax(1))


def test_budgets_hold_over_many_answers(trees: Any) -> None:
    """What an answer has spent is never above k nats a token, whatever was drafted, kept or thrown away."""
    given = [params({"temperature": 1.0, "seed": seed}, anchored_k=0.1) for seed in range(48)]
    for output in ask(trees, given):
        spent = output.kv_transfer_params["vllm_ext"]["anchored_kl"]
        assert 0.0 < spent <= 0.1 * len(output.outputs[0].token_ids) + 1e-3


@pytest.mark.parametrize(
    ("sampling", "extra_args", "says"),
    [
        (SEEDED, {"momentum": True}, "temperature=0.9 does not go with momentum"),
        ({**SEEDED, "top_p": 0.5}, {"anchored": True}, "anchored does not go with top_k, top_p or min_p"),
        (GREEDY, {"anchored": True, "dola": True}, "rule 'anchored' does not go with 'dola'"),
        (GREEDY, {"contrastive_alpha": 2.0}, "contrastive_alpha=2.0 is not allowed"),
    ],
)
def test_wrong_requests_are_refused(
    trees: Any, sampling: dict[str, Any], extra_args: dict[str, Any], says: str
) -> None:
    with pytest.raises(VLLMValidationError, match=says):
        ask(trees, [params(sampling, **extra_args)])


def test_what_was_kept_outlives_preemptions(
    slice_dir: str, options: dict[str, Any], tested_method: dict[str, Any]
) -> None:
    """In a cache with room for few of them, answers, budgets and switches are what they are with room for all."""
    given = [ALL[i] for i in (0, 2, 4, 5, 6, 8, 9)] * 2
    found = []
    for blocks in (None, 14):
        for llm in engine(slice_dir, tested_method, **options, num_gpu_blocks_override=blocks):
            outputs = ask(llm, given)
            spent = [output.kv_transfer_params for output in outputs]
            found.append((tokens_of(outputs), spent))
            assert (preemptions(llm) > 0) == (blocks is not None)
    assert_same_outputs(found[0][0], found[1][0])
    for left, right in zip(found[0][1], found[1][1], strict=True):
        if left is not None:
            assert right["vllm_ext"]["anchored_kl"] == pytest.approx(
                left["vllm_ext"]["anchored_kl"], rel=1e-3
            )
