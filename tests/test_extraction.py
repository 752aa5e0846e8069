# SPDX-License-Identifier: Apache-2.0
"""The best span by vLLM's LLM: the requests that it gets, and what becomes of its answers. No engine is started."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_ext import extraction
from vllm_ext.samplers.exact_extract import search
from vllm_ext.samplers.passage import Passages

VOCAB, END = 400, 399


class Words:
    """Word n is token n, with a space or without: those above 199 have one."""

    size = VOCAB
    eos_token_id = END

    @property
    def pieces(self) -> list[bytes]:
        plain = [f"w{n}".encode() for n in range(200)]
        return [*plain, *(b" " + piece for piece in plain[:-1]), b""]

    def encode(self, text: str) -> list[int]:
        return [200 + int(word[1:]) for word in text.split()]


class FakeLLM:
    """Log-probabilities are a function of all tokens before."""

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        self.model_config = SimpleNamespace(logprobs_mode=logprobs_mode)
        self.batches: list[int] = []

    def get_tokenizer(self) -> Words:
        return Words()

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        self.batches.append(len(prompts))
        outputs = []
        for prompt, asked in zip(prompts, params, strict=True):
            assert asked.max_tokens == 1
            row = logprobs(prompt["prompt_token_ids"])
            sampled = int(row.argmax())
            position = {
                t: SimpleNamespace(logprob=float(row[t])) for t in [sampled, *asked.logprob_token_ids]
            }
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(logprobs=[position])]))
        return outputs


def logprobs(tokens: Sequence[int]) -> np.ndarray:
    logits = np.random.default_rng(list(tokens)).normal(size=VOCAB) * 4
    result: np.ndarray = logits - np.log(np.exp(logits).sum())
    return result


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Words()
    monkeypatch.setattr(extraction, "_vocabulary", lambda llm: vocabulary)


@pytest.mark.parametrize("normalize", [False, True])
def test_answers_are_those_of_the_search(normalize: bool) -> None:
    """One passage has more tokens than a request may ask about; one has none."""
    passages = [" ".join(f"w{n}" for n in range(190)), "w1 w2 w3 w1 w2", ""]
    prompts: list[Any] = ["w7 w8", [1, 2, 3], [4]]
    llm = FakeLLM()
    answers = extraction.extract(llm, prompts, passages, max_tokens=4, normalize=normalize)
    assert len(answers) == 3
    assert answers[2] is None
    for answer, ids, passage in zip(answers[:2], ([207, 208], [1, 2, 3]), passages[:2], strict=True):
        expected = search(
            lambda questions, ids=ids: [logprobs([*ids, *q.tokens])[q.wanted].tolist() for q in questions],  # type: ignore[misc]
            Passages(Words()).of(passage, END),
            END,
            4,
            normalize,
        )
        assert answer is not None
        assert expected is not None
        assert tuple(answer.token_ids) == expected.tokens
        assert answer.score == expected.score
        assert answer.logprob == expected.logprob
        assert f" {answer.text} " in f" {passage} "
    # 380 first tokens in three requests and 6 in one, of all prompts at once; then eight of each at most.
    assert llm.batches[0] == 4
    assert max(llm.batches[1:]) <= 16


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"passages": ["w1", "w2"]}, "1 prompts and 2 passages"),
        ({"max_tokens": 0}, "max_tokens=0 is not allowed"),
        ({"width": -1}, "width=-1 is not allowed"),
        ({"llm": FakeLLM("processed_logits")}, "logprobs_mode='processed_logits' gives no probabilities"),
    ],
)
def test_what_cannot_be_served(changes: dict[str, Any], says: str) -> None:
    arguments = {"llm": FakeLLM(), "prompts": ["w1"], "passages": ["w1"], **changes}
    with pytest.raises(ValueError, match=says):
        extraction.extract(**arguments)
