# SPDX-License-Identifier: Apache-2.0
"""Lists that the V2 runner has no room for are refused where the request is taken in, not in the worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_ext.config import v2_limits


def check(params: SamplingParams, on_v2: bool = True) -> None:
    vllm_config = SimpleNamespace(use_v2_model_runner=on_v2)
    v2_limits.check_request(vllm_config, SimpleNamespace(sampling_params=params))


def words(count: int, length: int) -> SamplingParams:
    params = SamplingParams(bad_words=["x"] * count)
    params._bad_words_token_ids = [[1] * length] * count
    return params


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids has 1025 entries; allowed"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries"),
        (
            {"stop_token_ids": list(range(129)), "min_tokens": 1},
            "stop_token_ids has 129 entries next to min_tokens",
        ),
    ],
)
def test_what_has_no_room_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(VLLMValidationError, match=said):
        check(SamplingParams(**given))
    check(SamplingParams(**given), on_v2=False)


def test_bad_words_and_their_tokens_are_counted() -> None:
    with pytest.raises(VLLMValidationError, match="bad_words has 129 entries"):
        check(words(129, 1))
    with pytest.raises(VLLMValidationError, match="bad_words in tokens has 1025 entries"):
        check(words(41, 25))
    check(words(128, 8))


def test_what_has_room_passes() -> None:
    check(SamplingParams())
    check(SamplingParams(allowed_token_ids=list(range(1024)), stop_token_ids=list(range(129))))
    check(SamplingParams(stop_token_ids=list(range(128)), min_tokens=3))
