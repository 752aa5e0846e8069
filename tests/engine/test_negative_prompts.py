# SPDX-License-Identifier: Apache-2.0
"""Rule cad against negative prompts, and with images: the formula over the logits of two prompts, next to trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_idefics
import torch
from conftest import engine
from helpers import assert_same_outputs
from negative_prompts import CASES, PAGE, image
from tiny_idefics import IMAGE
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.engine

OPTIONS: dict[str, Any] = {
    "additional_config": {"vllm_ext": {"rules": {"cad": {"alpha": 1.0}}}},
    "max_model_len": 512,
    "limit_mm_per_prompt": {"image": 2},
}
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def seeing_dir(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_idefics.write(slice_dir, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def plain(seeing_dir: str) -> Iterator[Any]:
    yield from engine(seeing_dir, **OPTIONS, logprobs_mode="processed_logprobs")


@pytest.fixture(scope="module")
def trees(seeing_dir: str, tested_method: dict[str, Any], plain: Any) -> Iterator[Any]:
    yield from engine(seeing_dir, tested_method, **OPTIONS, num_gpu_blocks_override=17)


def ask(llm: Any, cases: list[Any], sampling: dict[str, Any], **extra_args: Any) -> list[Any]:
    inputs = [
        {"prompt": prompt, **({"multi_modal_data": {"image": list(map(image, seeds))}} if seeds else {})}
        for prompt, seeds, _, _ in cases
    ]
    asked = [
        SamplingParams(
            **{"max_tokens": 24, "ignore_eos": True, **sampling}, extra_args={**given, **extra_args} or None
        )
        for _, _, given, _ in cases
    ]
    outputs: list[Any] = llm.generate(inputs, asked, use_tqdm=False)
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def free(case: tuple[str, list[int], dict[str, Any], str]) -> Any:
    return (*case[:2], {}, "")


def test_p_is_the_formula_of_two_prompts(seeing_dir: str, plain: Any) -> None:
    """On the model as its authors wrote it: each token's log-probability, and that the other prompt has a say."""
    from transformers import AutoProcessor, Idefics3ForConditionalGeneration

    model = Idefics3ForConditionalGeneration.from_pretrained(seeing_dir, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(seeing_dir)

    def logits_of(prompt: str, seeds: list[int], answer: list[int]) -> torch.Tensor:
        images = list(map(image, seeds))
        given = processor(text=prompt, images=images or None, return_tensors="pt")
        given["input_ids"] = torch.cat([given["input_ids"], torch.tensor([answer])], 1)
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        with torch.inference_mode():
            rows: torch.Tensor = model(**given).logits[0, -len(answer) - 1 : -1]
        return rows.double()

    for sampling in (GREEDY, {"temperature": 1.0, "seed": 5}):
        outputs = ask(plain, CASES, {**sampling, "logprobs": 5})
        num_moved = 0
        for (prompt, seeds, given, other), output in zip(CASES, outputs, strict=True):
            answer, alpha = list(output.outputs[0].token_ids), given.get("cad_alpha", 1.0)
            z = logits_of(prompt, seeds, answer)
            z_0 = logits_of(other, seeds if IMAGE in other else [], answer)
            expected = ((1 + alpha) * z - alpha * z_0).log_softmax(1)
            num_moved += not torch.equal(expected.argmax(1), z.argmax(1))
            for row, found in enumerate(output.outputs[0].logprobs):
                for token, each in found.items():
                    assert each.logprob == pytest.approx(float(expected[row, token]), abs=5e-3), (given, row)
            if sampling is GREEDY:
                rows = torch.tensor(answer)[:, None]
                assert bool((expected.gather(1, rows)[:, 0] >= expected.amax(1) - 5e-3).all())
        assert num_moved > len(CASES) // 2


def test_next_to_trees(plain: Any, trees: Any) -> None:
    """In one batch, and more pairs than run at once; answers are those without drafts."""
    for cases, sampling in ((CASES, GREEDY), (CASES, SEEDED), (CASES[1:5] * 3, GREEDY)):
        expected = tokens_of(ask(plain, cases, sampling))
        assert_same_outputs(expected, tokens_of(ask(trees, cases, sampling)))
    (totals,) = trees.collective_rpc("vllm_ext_counters")
    assert totals["spec_emitted_tokens"] > 1.05 * totals["spec_steps"]
    assert totals["fallbacks:proposer_error"] == 0


def test_alpha_0_changes_nothing(plain: Any, trees: Any) -> None:
    expected = tokens_of(ask(plain, [free(each) for each in CASES], GREEDY))
    assert_same_outputs(expected, tokens_of(ask(plain, CASES, GREEDY, cad_alpha=0.0)))
    assert_same_outputs(expected, tokens_of(ask(trees, CASES, GREEDY, cad_alpha=0.0)))
    assert expected != tokens_of(ask(plain, CASES, GREEDY))


def test_no_negative_text_is_no_context(plain: Any) -> None:
    for case in CASES[1:4:2]:
        with_nothing = (*case[:2], {**case[2], "cad_negative": " "}, "")
        assert tokens_of(ask(plain, [case], GREEDY)) == tokens_of(ask(plain, [with_nothing], GREEDY))


def test_until_the_context_is_full(plain: Any, trees: Any) -> None:
    """The other prompt is the longer one, and drafts are cut where its end comes near."""
    negative = "It was a dark and stormy night, and nobody was at sea. " * 24
    case: Any = ("The sea is", [], {"cad_negative": negative}, negative)
    room = 512 - len(plain.get_tokenizer().encode(negative))
    assert 0 < room < 200
    outputs = [ask(llm, [case, free(case)], {**GREEDY, "max_tokens": None}) for llm in (plain, trees)]
    assert_same_outputs(tokens_of(outputs[0]), tokens_of(outputs[1]))
    for of_one in outputs:
        assert [len(each) for each in tokens_of(of_one)] == [room, 512 - 3]
        assert {output.outputs[0].finish_reason for output in of_one} == {"length"}
    exact = ask(trees, [case], {**GREEDY, "max_tokens": room})
    assert tokens_of(exact) == tokens_of(outputs[0][:1])
    with pytest.raises(VLLMValidationError, match=rf"cad_negative makes a prompt of {512 - room} tokens"):
        ask(trees, [case], {**GREEDY, "max_tokens": room + 1})
    assert ask(trees, CASES[:2], GREEDY)


def test_refused_requests(trees: Any) -> None:
    ends = ("What is this? " + IMAGE, [1], {"cad_negative": "A"}, "")
    with pytest.raises(
        VLLMValidationError, match="cad_negative does not go with a prompt that ends with an image"
    ):
        ask(trees, [ends], GREEDY)
    with pytest.raises(VLLMValidationError, match="cad_context='The village' is not in the prompt"):
        ask(trees, [(PAGE, [1, 2], {"cad_context": "The village", "cad_negative": "A"}, "")], GREEDY)
    with pytest.raises(VLLMValidationError, match="cad_context=None does not go with cad: it must be a part"):
        ask(trees, [(PAGE, [1, 2], {"cad": True}, "")], GREEDY)
