# SPDX-License-Identifier: Apache-2.0
"""What a request says of its drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_ext.config import request_options

OURS = {"vllm_ext": {"speculation": {"method": "token_recycling"}}}


def check(given: Any, additional_config: Any = OURS) -> SamplingParams:
    params = SamplingParams(extra_args=given)
    request_options.check_request(SimpleNamespace(additional_config=additional_config), params)
    return params


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (None, None),
        ({}, None),
        ({"trie": "pets"}, None),
        ({"speculation": True}, None),
        ({"speculation": 1}, None),  # as vLLM's union of types may have it
        ({"speculation": False}, 0),
        ({"speculation": 0.0}, 0),
        ({"speculation_max_nodes": 3}, 3),
        ({"speculation_max_nodes": 0}, 0),
        ({"speculation": False, "speculation_max_nodes": 3, "other": [1]}, 0),
    ],
)
def test_how_many_nodes(given: Any, most: int | None) -> None:
    assert request_options.most_nodes(check(given)) == most


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speculation": "perhaps"}, "speculation='perhaps' is not allowed; allowed: boolean"),
        ({"speculation_max_nodes": -1}, "speculation_max_nodes=-1 is not allowed; allowed: integer or null"),
        ({"speculation_max_nodes": [3]}, r"speculation_max_nodes=\[3\] is not allowed"),
        ({"speculaton": False}, "unknown key 'speculaton'.* Did you mean 'speculation'"),
        ({"speculation_verify": "typical"}, "unknown key 'speculation_verify'; allowed: speculation, "),
    ],
)
def test_what_says_nothing_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(VLLMValidationError, match=said):
        check(given)


def test_servers_without_a_method_take_what_they_took() -> None:
    others: list[dict[str, Any]] = [{}, {"vllm_ext": {"rules": {"trie": {}}}}]
    for additional_config in others:
        check({"speculaton": 1, "speculation_max_nodes": -1}, additional_config)
    assert request_options.most_nodes(None) is None  # a pooling request
