# SPDX-License-Identifier: Apache-2.0
"""Rules that read layers and a second model, next to trees: the tokens that the same rule gives without speculation
(float32), and those that the papers' formulas give on the model as its authors wrote it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rule_faults
import slices
import torch
from conftest import engine
from helpers import assert_same_outputs, own_prompts, preemptions
from typer.testing import CliRunner
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_ext.samplers.registry import RULES as REGISTERED
from vllm_ext.samplers.registry import load_rule
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
# Options that show more than a rule's defaults do.
SHARP: dict[str, dict[str, Any]] = {
    "contrastive": {"alpha": 0.05},
    "anchored": {"k": 0.4},
    "entropy_adaptive": {"threshold": 4.0, "dwell": 2},
    "lol": {"omega": 0.5, "alpha": 0.05},
    "dola": {"candidates": [0, 1], "norm": True},
    "cad": {"alpha": 1.0},
    "adadec": {"threshold": 1.0},
    "svdecode": {"strength": 8.0, "alpha": 0.01},
    "caad": {"strength": 4.0, "threshold": 0.1},
}
RULES = [name for name in REGISTERED if issubclass(load_rule(name), SteeringRule)]


@pytest.fixture(scope="module")
def options(slice_dir: str, model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of two rules are made of the first tokens' prompts, by commands."""
    from vllm_ext.cli.main import app

    folder = tmp_path_factory.mktemp("guides")
    answers = ["It is a small town by the sea.", "There are three of them.", "Nobody knows why."]
    examples = [
        json.dumps({"prompt": prompt, "answer": answer})
        for prompt, answer in zip(own_prompts(), answers, strict=False)
    ]
    (folder / "examples.jsonl").write_text("\n".join(examples))
    first_layer = slices.write(Path(model_dir), tmp_path_factory.mktemp("one"), layers=1, heads=8, kv_heads=2)
    rules = {name: dict(SHARP.get(name, {})) for name in RULES}
    for name in RULES:
        if issubclass(load_rule(name).Options, CompanionOptions):
            rules[name]["model"] = first_layer
    for name, more in (("caad", []), ("svdecode", ["--original", first_layer])):
        rules[name]["file"] = str(folder / name)
        arguments = [name, "build", str(folder / "examples.jsonl"), "--model", slice_dir]
        result = CliRunner().invoke(app, [*arguments, "--output", rules[name]["file"], *more])
        assert result.exit_code == 0, result.output
        assert "of 3 answers" in result.output
    return {"additional_config": {"vllm_ext": {"rules": rules}}}


@pytest.fixture(scope="module")
def plain(slice_dir: str, options: dict[str, Any]) -> Iterator[Any]:
    yield from engine(slice_dir, **options)


@pytest.fixture(scope="module")
def trees(
    slice_dir: str, options: dict[str, Any], tested_method: dict[str, Any], plain: Any, plain_slice_llm: Any
) -> Iterator[Any]:
    # The last engine made in a process is the one whose metrics there are. It has room for 17 times 128 tokens.
    yield from engine(slice_dir, tested_method, **options, num_gpu_blocks_override=17)


def params(sampling: dict[str, Any], **extra_args: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **sampling}, extra_args=extra_args or None)


def prompts_of(llm: Any, count: int) -> list[list[int]]:
    return [llm.get_tokenizer().encode(own_prompts()[i % 8]) for i in range(count)]


def context_of(index: int) -> str:
    text = own_prompts()[index % 8]
    return text[: len(text) * 2 // 3].strip()


def ask(llm: Any, given: list[SamplingParams], first: int = 0) -> list[Any]:
    prompts = prompts_of(llm, first + len(given))[first:]
    inputs, asked = [{"prompt_token_ids": tokens} for tokens in prompts], []
    for index, each in enumerate(given):
        context = context_of(first + index)
        each = each.clone()
        if each.extra_args:
            each.extra_args = {
                key: context if value == "two thirds" else value for key, value in each.extra_args.items()
            }
        asked.append(each.clone())
    outputs: list[Any] = llm.generate(inputs, asked, use_tqdm=False)
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
    params(GREEDY, lol=True),
    params(GREEDY, svdecode=True),
    params(GREEDY, caad=True),
    params(GREEDY, cad_context="two thirds"),
    params({**SEEDED, "n": 2, "logprobs": 1}, cad_context="two thirds", cad_alpha=0.5),
    params({**SEEDED, "repetition_penalty": 1.1}, cad_context="two thirds", contrastive=True),
    params(GREEDY, adadec=True),
    params({**GREEDY, "logprobs": 1}, adadec_threshold=0.5, adadec_candidates=2, adadec_lookahead=3),
    params({**SEEDED, "seed": 5}, lol_instruction="two thirds", lol_mu=0.3),
    params(SEEDED, contrastive_beta=1.5),
    params({**SEEDED, "n": 2, "top_p": 0.9}, dola_alpha=0.01),
    params(SEEDED, anchored_k=0.05),
    params(SEEDED, entropy_adaptive_threshold=5.0),
    params({**GREEDY, "repetition_penalty": 1.2, "logprobs": 2}, dola=True, contrastive=True),
    params({**SEEDED, "seed": 4}, svdecode=True, caad=True, lol_beta=0.2),
    params(GREEDY),
    params(SEEDED),
]
SHOWN = {key for each in ALL for key in each.extra_args or ()}
ALL[-2:-2] = [
    params(GREEDY, **{name: True}, **load_rule(name).example)
    for name in RULES
    if SHOWN.isdisjoint(load_rule(name).Params.model_fields)
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


@pytest.mark.parametrize("index", range(10))
def test_each_rule_alone_and_four_at_once(plain: Any, trees: Any, expected: list[Any], index: int) -> None:
    alone = ask(trees, [ALL[index]], first=index)
    assert_same_outputs(tokens_of(expected[index : index + 1]), tokens_of(alone))
    assert_same_outputs(tokens_of(ask(plain, [ALL[index]] * 4)), tokens_of(ask(trees, [ALL[index]] * 4)))


def test_free_requests_are_as_without_rules(plain_slice_llm: Any, expected: list[Any]) -> None:
    free = ask(plain_slice_llm, ALL[-2:], first=len(ALL) - 2)
    ruled = ask(plain_slice_llm, [params(GREEDY)] * 10)
    for index in range(10):  # what follows is about something
        assert tokens_of(ruled)[index] != tokens_of(expected)[index], index
    assert_same_outputs(tokens_of(free), tokens_of(expected[-2:]))


def test_cached_prefixes_that_the_companion_has_not_read(plain: Any, trees: Any) -> None:
    """A free request has left a prompt's blocks in the cache; the next one's companion needs its own."""
    prompt = {"prompt_token_ids": prompts_of(plain, 8)[4] * 6}
    assert len(prompt["prompt_token_ids"]) > 2 * 128
    given = [params(GREEDY, contrastive=True), params(GREEDY), params(GREEDY, lol=True)]
    first = [plain.generate([prompt], given[i].clone(), use_tqdm=False)[0] for i in (0, 2, 1)]
    then = [trees.generate([prompt], given[i].clone(), use_tqdm=False)[0] for i in (1, 0, 2)]
    assert_same_outputs(tokens_of([first[2], first[0], first[1]]), tokens_of(then))
    # The second that asks for a companion finds what the first one's has read.
    assert then[1].num_cached_tokens == 0
    assert then[2].num_cached_tokens >= 128


def mistake_rows(worker: Any) -> None:
    """The mutation: all rows of a walk read what stands beside the first."""
    from vllm_ext.engine.steering.aux_logits import StepAuxLogits

    kept: Any = StepAuxLogits
    kept.honest = StepAuxLogits.call
    kept.call = lambda self, rows: kept.honest(self, rows * 0)


def mend_rows(worker: Any) -> None:
    from vllm_ext.engine.steering.aux_logits import StepAuxLogits

    kept: Any = StepAuxLogits
    kept.call = kept.honest


def test_rows_beside_the_wrong_ones_are_caught(trees: Any, expected: list[Any]) -> None:
    trees.collective_rpc(mistake_rows)
    try:
        wrong = ask(trees, ALL)
    finally:
        trees.collective_rpc(mend_rows)
    for index in (0, 1, 2, 4, 6, 8):
        assert tokens_of(wrong[index : index + 1]) != tokens_of(expected[index : index + 1]), index


def leave_pairs(worker: Any) -> None:
    """The mutation: primaries go on where their pairs are not in the step."""
    from vllm_ext.engine.steering.paired_rows import PairedRows

    kept: Any = PairedRows
    kept.honest = PairedRows.begin

    def begin(self: Any, *args: Any) -> Any:
        rows = kept.honest(self, *args)
        self.held = []
        return rows

    kept.begin = begin


def mend_pairs(worker: Any) -> None:
    from vllm_ext.engine.steering.paired_rows import PairedRows

    kept: Any = PairedRows
    kept.begin = kept.honest


def test_more_pairs_than_run_at_once(plain: Any, trees: Any) -> None:
    """16 requests run at once: behind a free one the last of the first eight pairs begins with one half."""
    given = [params(GREEDY), *(params(GREEDY, cad_context="two thirds") for _ in range(10))]
    expected = [tokens_of(ask(plain, [each], first=index))[0] for index, each in enumerate(given)]
    assert_same_outputs(expected, tokens_of(ask(plain, given)))
    assert_same_outputs(expected, tokens_of(ask(trees, given)))
    plain.collective_rpc(leave_pairs)
    try:
        wrong = tokens_of(ask(plain, given))
    finally:
        plain.collective_rpc(mend_pairs)
    assert [index for index in range(len(given)) if wrong[index] != expected[index]] == [8]


def test_seeds_of_prompts_in_parts(plain: Any) -> None:
    """Eight prompts of 900 tokens are more than a step takes: what is drawn of one that goes on takes no noise."""
    prompts = [{"prompt_token_ids": (prompt * 40)[:900]} for prompt in prompts_of(plain, 8)]
    given = [params(SEEDED) for _ in prompts]
    alone = [plain.generate([prompt], params(SEEDED), use_tqdm=False)[0] for prompt in prompts]
    plain.reset_prefix_cache()
    together = plain.generate(prompts, given, use_tqdm=False)
    assert_same_outputs(tokens_of(alone), tokens_of(together))


def test_a_pair_shares_cached_prefixes(plain: Any) -> None:
    prompt = prompts_of(plain, 8)[4] * 6
    text = plain.get_tokenizer().decode(prompt[-20:-10])
    outputs = [
        plain.generate(
            [{"prompt_token_ids": prompt}], params(GREEDY, cad_context=text, cad_alpha=a), use_tqdm=False
        )[0]
        for a in (0.0, 0.0, 1.0)
    ]
    assert outputs[1].num_cached_tokens >= 256
    assert tokens_of(outputs[:1]) == tokens_of(outputs[1:2]) != tokens_of(outputs[2:])
    free = plain.generate([{"prompt_token_ids": prompt}], params(GREEDY), use_tqdm=False)
    assert_same_outputs(tokens_of(free), tokens_of(outputs[:1]))


def test_the_formulas_on_the_model_itself(slice_dir: str, expected: list[Any], plain: Any) -> None:
    """Each greedy token is the best by float64 formulas over the logits of transformers, up to rounding. The companion
    is the first layer.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(slice_dir, dtype=torch.float32)
    prompts = prompts_of(plain, 10)

    def scores_of(
        index: int, prompt: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prompt = prompts[index] if prompt is None else prompt
        tokens = list(expected[index].outputs[0].token_ids)
        with torch.inference_mode():
            states = model.model(torch.tensor([[*prompt, *tokens]]), output_hidden_states=True)
            rows = slice(len(prompt) - 1, -1)
            early = [model.lm_head(model.model.norm(states.hidden_states[i][0, rows])) for i in (0, 1)]
            final = model.lm_head(states.last_hidden_state[0, rows])
        return torch.tensor(tokens), torch.stack(early).double(), final.double()

    def check(tokens: torch.Tensor, contrast: torch.Tensor, final: torch.Tensor, alpha: float) -> None:
        contrast[final < final.amax(1, keepdim=True) + math.log(alpha)] = -torch.inf
        assert bool((contrast.gather(1, tokens[:, None])[:, 0] >= contrast.amax(1) - 1e-3).all())
        assert not torch.equal(contrast.argmax(1), final.argmax(1))

    tokens, early, final = scores_of(0)  # contrastive
    check(tokens, 1.5 * final - 0.5 * early[1], final, 0.05)

    tokens, early, final = scores_of(6)  # lol: half of one layer is none of them
    log_p, log_a = final.log_softmax(1), early[1].log_softmax(1)
    low = 2.0 * early[1].log_softmax(1) - early[0].log_softmax(1)
    check(tokens, 2.0 * log_p - log_a + 0.5 * low, final, 0.05)

    tokens, early, final = scores_of(2)  # dola
    ids = final.topk(128, 1).indices
    log_q, log_early = (
        final.gather(1, ids).log_softmax(1),
        early.gather(2, ids.expand(2, *ids.shape)).log_softmax(2),
    )
    middle = ((log_q.exp() + log_early.exp()) / 2).log()
    divergence = (log_q.exp() * (log_q - middle) + log_early.exp() * (log_early - middle)).sum(2) / 2
    chosen = divergence.argmax(0)
    check(tokens, final - early[chosen, torch.arange(len(tokens))], final, 0.1)

    tokens, _, final = scores_of(9)  # cad
    pieces = [plain.get_tokenizer().decode([token]) for token in prompts[9]]
    num_left_out = len(context_of(9))
    first = next(i for i in range(len(pieces)) if len("".join(pieces[:i])) >= num_left_out)
    _, _, without = scores_of(9, prompts[9][first:])
    check(tokens, 2.0 * final - without, final, 1e-9)


def test_looking_ahead_by_hand(slice_dir: str, plain: Any, expected: list[Any]) -> None:
    """Greedy, but at each token that is not sure the formula over three continuations."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(slice_dir, dtype=torch.float32)
    tokenizer = plain.get_tokenizer()
    lines = {token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])}

    def log_p_of(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            log_p: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(0)
        return log_p

    def ahead(tokens: list[int], log_p: float) -> float:
        behind: list[float] = []
        while len(behind) < 5 and tokens[-1] not in lines:
            value, token = log_p_of(tokens).max(0)
            behind.append(float(value))
            tokens = [*tokens, int(token)]
        return (log_p + sum(behind)) / (1 + len(behind))

    prompt, output, num_unsure, num_moved = prompts_of(plain, 13)[12], list[int](), 0, 0
    for _ in range(40):
        log_p = log_p_of([*prompt, *output])
        best = log_p.topk(3)
        token = int(best.indices[0])
        if float(torch.special.entr(log_p.exp()).sum()) > 1.0:
            num_unsure += 1
            tried = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            scores = [ahead([*prompt, *output, each], value) for each, value in tried]
            token = int(best.indices[scores.index(max(scores))])
            num_moved += token != int(best.indices[0])
        output.append(token)
    assert output == list(expected[12].outputs[0].token_ids)
    assert num_unsure > num_moved > 0


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
        (SEEDED, {"adadec": True}, "temperature=0.9 does not go with adadec"),
        (GREEDY, {"adadec": True, "dola": True}, "rule 'adadec' does not go with 'dola'"),
        (GREEDY, {"cad": True}, "cad_context=None does not go with cad"),
        (GREEDY, {"cad_context": "not in it"}, "cad_context"),
        (
            GREEDY,
            {"cad_context": "two thirds", "lol_instruction": "two thirds"},
            "cad and lol do not go together in one request",
        ),
        (
            {**GREEDY, "prompt_logprobs": 1},
            {"cad_context": "two thirds"},
            "prompt_logprobs do not go with a rule",
        ),
        (GREEDY, {"vllm_ext_twin_owner": "0"}, "vllm_ext_twin_owner: it is the engine's own"),
        (GREEDY, {"contrastive_alpha": 2.0}, "contrastive_alpha=2.0 is not allowed"),
    ],
)
def test_wrong_requests_are_refused(
    trees: Any, sampling: dict[str, Any], extra_args: dict[str, Any], says: str
) -> None:
    with pytest.raises(VLLMValidationError, match=says):
        ask(trees, [params(sampling, **extra_args)])


@pytest.mark.slow
def test_what_was_kept_outlives_preemptions(plain: Any, trees: Any) -> None:
    """In a cache with room for half of them answers and budgets are what they are with room for all."""
    given = [ALL[i].clone() for i in (0, 2, 4, 5, 9, 10, 14, 15, 17, 18)] * 2 + [ALL[12].clone()]
    for each in given:
        each.max_tokens = 150
    expected, before = ask(plain, given), preemptions(trees)
    actual = ask(trees, given)
    assert preemptions(trees) > before
    assert_same_outputs(tokens_of(expected), tokens_of(actual))
    for left, right in zip(expected, actual, strict=True):
        if left.kv_transfer_params is not None:
            found = right.kv_transfer_params["vllm_ext"]["anchored_kl"]
            assert found == pytest.approx(left.kv_transfer_params["vllm_ext"]["anchored_kl"], rel=1e-3)


@rule_faults.WHERE
@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_raises_ends_its_request_alone(plain: Any, trees: Any, name: str, where: str) -> None:
    def asking(index: int) -> SamplingParams:
        given = {"cad_context": context_of(index)} if name == "cad" else {name: True}
        return params({**GREEDY, "max_tokens": 16}, **given)

    llm = trees if where == rule_faults.TREE else plain
    prompts = rule_faults.tokens_of(llm, 3)
    rule_faults.check_that_one_request_ends(llm, name, asking, params(GREEDY), where, prompts)
    assert counters(trees)["fallbacks:proposer_error"] == 0
