# SPDX-License-Identifier: Apache-2.0
"""The V2 runner on a CPU whose Triton is vLLM's business: our kernels are numba's there, and none is Triton's.

vLLM's own run in the interpreter here, as everywhere in the tests of V2.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import V2_METHOD, V2_MODEL_METHOD, v2_engine
from helpers import assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens

from vllm_ext.kernels import backends

pytestmark = pytest.mark.v2
METHODS = {
    "token_recycling": V2_METHOD,
    "hybrid": {**V2_METHOD, "method": "hybrid"},
    "dyspec": V2_MODEL_METHOD,
    "spectr": {**V2_MODEL_METHOD, "method": "spectr", "drafts": 2},
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.quick] * (name == "token_recycling")) for name in METHODS],
)
def test_no_kernel_of_ours_needs_triton(
    v2_plain: Any, v2_dir: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(backends, "V2", "auto")
    launched: set[tuple[str, str]] = set()
    launch = GridExecutor.__call__

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add((self.fn.__module__, self.fn.__name__))
        return launch(self, *args, **kwargs)

    llm = v2_engine(v2_dir, METHODS[method])
    kinds = [
        sampling(),
        sampling(temperature=0.8, seed=5, top_p=0.9, top_k=50),
        sampling(repetition_penalty=1.3, presence_penalty=0.5, logprobs=2),
        sampling(temperature=0.7, seed=9, min_p=0.05, logit_bias={300: 2.0}),
        sampling(bad_words=["a", "the"]),
        sampling(temperature=1.0, max_tokens=30),
    ]
    texts = [text * 2 for text in prompts(len(kinds), seed=31)]
    expected = tokens(generate(v2_plain, texts, kinds))
    before = counters(llm)
    monkeypatch.setattr(GridExecutor, "__call__", watching)
    found = tokens(generate(llm, texts, kinds))
    assert_same_outputs(expected[:-1], found[:-1])
    new = {name: total - before[name] for name, total in counters(llm).items()}
    assert new["spec_accepted_tokens"] > 10
    assert new["fallbacks:proposer_error"] == 0
    assert launched
    assert not [name for name in launched if not name[0].startswith("vllm.")]
