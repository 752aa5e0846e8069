# SPDX-License-Identifier: Apache-2.0
"""Reflective verification in the engine: drafts are read twice in one step, and nothing else of it stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from distribution import BLOCK_SIZE
from helpers import assert_same_outputs, counted, generate, long_and_short_prompts
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

REFLECTIVE = {"verify": "reflective"}
NODES, PROMPT = 11, "the"


@pytest.fixture(scope="module")
def drafting(slice_dir: str) -> Iterator[Any]:
    """A server that says nothing of verification, but for the prompt."""
    method = {"method": "dyspec", "model": "self", "self_layers": 1, "num_speculative_tokens": NODES}
    yield from engine(
        slice_dir, {**method, "budget": "fixed", "verify_prompt": PROMPT}, block_size=BLOCK_SIZE
    )


def asking(weight: float, temperature: float = 0.0, **params: Any) -> SamplingParams:
    """A request without a seed."""
    return SamplingParams(
        **{"temperature": temperature, "max_tokens": 40, "ignore_eos": True, **params},
        extra_args={**REFLECTIVE, "verify_weight": weight},
    )


def test_without_weight_greedy_answers_are_plains(plain_slice_llm: Any, drafting: Any) -> None:
    """With it they are not: the mutation is the method."""
    inputs = long_and_short_prompts(plain_slice_llm, 8)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = generate(plain_slice_llm, inputs, [greedy] * 8)
    most = (NODES - len(drafting.get_tokenizer().encode(PROMPT, add_special_tokens=False))) // 2
    assert most >= 4
    for weight, same in ((0.0, True), (0.9, False)):
        found, counts = counted(drafting, inputs, [asking(weight)] * 8)
        assert (found == wanted) == same
        assert counts["spec_accepted_tokens"] > 8
        # Rows behind the first copy are no drafts.
        assert counts["spec_draft_tokens"] <= most * counts["spec_steps"]
        assert counts["fallbacks:proposer_error"] == 0


def test_neighbours_have_plains_tokens(plain_slice_llm: Any, drafting: Any) -> None:
    inputs = long_and_short_prompts(plain_slice_llm, 8)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40, ignore_eos=True) for i in range(8)
    ]
    beside = [asking(0.5), asking(0.5, 1.0), asking(0.9), asking(1.0)]
    found, _ = counted(drafting, [*inputs, *inputs[:4]], [*params, *beside])
    assert_same_outputs(generate(plain_slice_llm, inputs, params), found[:8])


def test_the_next_request_with_the_same_text_finds_no_scratch(plain_slice_llm: Any, drafting: Any) -> None:
    """What steps have left in blocks is the text alone, also where blocks are shared."""
    inputs = long_and_short_prompts(drafting, 4)
    answers, _ = counted(drafting, inputs, [asking(0.9)] * 4)
    longer = [prompt + answer for prompt, answer in zip(inputs, answers, strict=True)]
    greedy = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 4
    assert_same_outputs(generate(plain_slice_llm, longer, greedy), generate(drafting, longer, greedy))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"seed": 1}, "seed=1 does not go with verify"),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, "does not go with structured_outputs"),
    ],
)
def test_what_does_not_go_with_it_is_refused(drafting: Any, more: Any, said: str) -> None:
    with pytest.raises(VLLMValidationError, match=said):
        drafting.generate(["x"], asking(0.3, 1.0, **more), use_tqdm=False)
