# SPDX-License-Identifier: Apache-2.0
"""What a request says of its drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext.config import request_options, speculative
from vllm_ext.proposers.registry import METHODS, load_method
from vllm_ext.proposers.sure_text import EntropyRule
from vllm_ext.samplers.typical_acceptance import Typical

OURS = {"vllm_ext": {"speculation": {"method": "token_recycling"}}}


def check(
    given: Any, additional_config: Any = OURS, *, on_v2: bool = False, **sampling: Any
) -> SamplingParams:
    params = SamplingParams(extra_args=given, **sampling)
    vllm_config = SimpleNamespace(additional_config=additional_config, use_v2_model_runner=on_v2)
    request_options.check_request(vllm_config, params)
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


TYPICAL = {"verify": "typical"}
LOSSY = {"vllm_ext": {"speculation": {"method": "token_recycling", **TYPICAL, "verify_threshold": 0.25}}}


def rule(given: Any, server: Any = OURS, **sampling: Any) -> Typical | None:
    params = check(given, server, **sampling)
    settings = speculative.from_vllm_config(SimpleNamespace(additional_config=server))
    assert settings is not None
    return request_options.typical(settings.options, params)


@pytest.mark.parametrize(
    ("given", "server", "sampling", "wanted"),
    [
        (None, OURS, {}, None),
        ({"verify": "exact"}, OURS, {}, None),
        (TYPICAL, OURS, {}, (0.09, 0.3)),
        ({**TYPICAL, "verify_threshold": 0.16}, OURS, {}, (0.16, 0.4)),
        ({**TYPICAL, "verify_threshold": 1, "verify_alpha": 9.0}, OURS, {}, (1.0, 9.0)),
        (TYPICAL, OURS, {"temperature": 0.0}, None),
        (None, LOSSY, {}, (0.25, 0.5)),
        ({"verify_threshold": 0.16}, LOSSY, {}, (0.16, 0.4)),
        ({"verify": "exact"}, LOSSY, {}, None),
        (None, LOSSY, {"seed": 1}, None),
    ],
    ids=str,
)
def test_which_requests_are_lossy(given: Any, server: Any, sampling: Any, wanted: Any) -> None:
    found = rule(given, server, **sampling)
    assert (found and (found.threshold, found.alpha)) == (wanted and pytest.approx(wanted))


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        (
            {"verify": "lossy"},
            {},
            "verify='lossy' is not allowed; allowed: 'exact' or 'typical' or 'entropy' or 'reflective' or null",
        ),
        (
            {**TYPICAL, "verify_threshold": 0},
            {},
            "verify_threshold=0 is not allowed; .* above 0.0, at most 1.0",
        ),
        ({**TYPICAL, "verify_threshold": 1.5}, {}, "verify_threshold=1.5 is not allowed"),
        (
            {**TYPICAL, "verify_alpha": -1},
            {},
            "verify_alpha=-1 is not allowed; allowed: number or null, above 0.0",
        ),
        ({**TYPICAL, "verify_alpha": float("nan")}, {}, "verify_alpha=nan is not allowed"),
        ({**TYPICAL, "verify_thresold": 0.1}, {}, "Did you mean 'verify_threshold'"),
        ({"verify_threshold": 0.1}, {}, "verify_threshold=0.1 goes with verify='typical'"),
        (TYPICAL, {"seed": 7}, "seed=7 does not go with verify"),
        (
            TYPICAL,
            {"on_v2": True},
            "allowed on vLLM's V2 model runner: 'exact'. Serve with VLLM_USE_V2_MODEL",
        ),
    ],
)
def test_a_lossy_verification_that_would_not_be_is_refused(given: Any, more: Any, said: str) -> None:
    with pytest.raises(VLLMValidationError, match=said):
        check(given, **more)


ENTROPY = {"verify": "entropy"}
DRAFTING = {"vllm_ext": {"speculation": {"method": "dyspec", "model": "self"}}}
SURE = {"vllm_ext": {"speculation": {"method": "specdec_pp", "model": "self", **ENTROPY, "verify_window": 3}}}


def entropy_rule(given: Any, server: Any, **sampling: Any) -> EntropyRule | None:
    params = check(given, server, **sampling)
    settings = speculative.from_vllm_config(SimpleNamespace(additional_config=server))
    assert settings is not None
    assert request_options.typical(settings.options, params) is None
    return request_options.entropy_rule(settings.options, params)


@pytest.mark.parametrize(
    ("given", "server", "sampling", "wanted"),
    [
        (None, DRAFTING, {}, None),
        ({"verify": "exact"}, DRAFTING, {}, None),
        (ENTROPY, DRAFTING, {}, (1.0, 5)),
        ({**ENTROPY, "verify_entropy": 0.0}, DRAFTING, {}, (0.0, 5)),
        ({**ENTROPY, "verify_entropy": 2, "verify_window": 9}, DRAFTING, {}, (2.0, 9)),
        (ENTROPY, DRAFTING, {"temperature": 0.0}, (1.0, 5)),
        (None, SURE, {}, (1.0, 3)),
        ({"verify_entropy": 0.5}, SURE, {}, (0.5, 3)),
        ({"verify": "exact"}, SURE, {}, None),
        (None, SURE, {"seed": 1}, None),
    ],
    ids=str,
)
def test_of_which_requests_a_drafts_text_is_taken(
    given: Any, server: Any, sampling: Any, wanted: Any
) -> None:
    assert entropy_rule(given, server, **sampling) == wanted


@pytest.mark.parametrize(
    ("given", "server", "more", "said"),
    [
        (
            ENTROPY,
            OURS,
            {},
            "not allowed with method 'token_recycling'.*allowed with methods 'dyspec', 'specdec_pp'",
        ),
        ({**ENTROPY, "verify_entropy": -1}, DRAFTING, {}, "verify_entropy=-1 is not allowed"),
        ({**ENTROPY, "verify_window": 0}, DRAFTING, {}, "verify_window=0 is not allowed"),
        (
            {**ENTROPY, "verify_alpha": 0.1},
            DRAFTING,
            {},
            "verify_alpha=0.1 goes with verify='typical'.*'entropy'",
        ),
        ({"verify_entropy": 0.1}, DRAFTING, {}, "verify_entropy=0.1 goes with verify='entropy'.*exactly"),
        (
            {"verify": "exact", "verify_window": 2},
            SURE,
            {},
            "verify_window=2 goes with verify='entropy'.*exactly",
        ),
        ({"verify_entropy": 0.1}, SURE, {"seed": 7}, "seed=7 does not go with verify_entropy"),
        (ENTROPY, DRAFTING, {"seed": 7}, "seed=7 does not go with verify"),
        (ENTROPY, DRAFTING, {"on_v2": True}, "verify='entropy' is not allowed here; allowed on vLLM's V2"),
    ],
)
def test_a_drafts_text_that_would_not_be_taken_is_refused(
    given: Any, server: Any, more: Any, said: str
) -> None:
    with pytest.raises(VLLMValidationError, match=said):
        check(given, server, **more)


REFLECTIVE = {"verify": "reflective"}
TWICE = {
    "vllm_ext": {"speculation": {"method": "dyspec", "model": "self", **REFLECTIVE, "verify_weight": 0.5}}
}
STRUCTURED = {"structured_outputs": StructuredOutputsParams(regex="a")}


@pytest.mark.parametrize(
    ("given", "server", "sampling", "wanted"),
    [
        (None, DRAFTING, {}, None),
        (REFLECTIVE, DRAFTING, {}, 0.3),
        ({**REFLECTIVE, "verify_weight": 0}, DRAFTING, {}, 0.0),
        (None, TWICE, {"temperature": 0.0}, 0.5),
        ({"verify_weight": 1.0}, TWICE, {}, 1.0),
        ({"verify": "entropy"}, TWICE, {}, None),
        ({"verify": "exact"}, TWICE, {}, None),
        (None, TWICE, {"seed": 1}, None),
    ],
    ids=str,
)
def test_which_drafts_are_read_twice(given: Any, server: Any, sampling: Any, wanted: Any) -> None:
    params = check(given, server, **sampling)
    settings = speculative.from_vllm_config(SimpleNamespace(additional_config=server))
    assert settings is not None
    assert request_options.reflection_weight(settings.options, params) == wanted


def test_of_a_server_that_reads_twice_structured_requests_are_read_once() -> None:
    settings = speculative.from_vllm_config(SimpleNamespace(additional_config=TWICE))
    assert settings is not None
    assert request_options.reflection_weight(settings.options, check(None, TWICE, **STRUCTURED)) is None


@pytest.mark.parametrize(
    ("given", "server", "more", "said"),
    [
        (REFLECTIVE, OURS, {}, "verify='reflective' is not allowed with method 'token_recycling'"),
        ({**REFLECTIVE, "verify_weight": 1.5}, DRAFTING, {}, "verify_weight=1.5 is not allowed"),
        ({"verify_weight": 0.5}, DRAFTING, {}, "verify_weight=0.5 goes with verify='reflective'"),
        (REFLECTIVE, DRAFTING, {"seed": 7}, "seed=7 does not go with verify"),
        (REFLECTIVE, DRAFTING, STRUCTURED, "does not go with structured_outputs"),
        (
            REFLECTIVE,
            DRAFTING,
            {"on_v2": True},
            "verify='reflective' is not allowed here; allowed on vLLM's V2",
        ),
    ],
)
def test_a_second_reading_that_would_not_be_is_refused(given: Any, server: Any, more: Any, said: str) -> None:
    with pytest.raises(VLLMValidationError, match=said):
        check(given, server, **more)


@pytest.mark.parametrize("method", [name for name in METHODS if not load_method(name).writes_text])
def test_servers_whose_method_writes_no_text_are_refused_by_name(method: str) -> None:
    fields = load_method(method).Options.model_fields
    required = {name: "folder" for name, field in fields.items() if field.is_required()}
    given = {"method": method, **required, **load_method(method).tested_with, **ENTROPY}
    with pytest.raises(ValueError, match=f"verify='entropy' is not allowed with method {method!r}"):
        speculative.parse(given)


def test_servers_without_a_method_take_what_they_took() -> None:
    others: list[dict[str, Any]] = [{}, {"vllm_ext": {"rules": {"trie": {}}}}]
    for additional_config in others:
        check({"speculaton": 1, "speculation_max_nodes": -1}, additional_config)
    assert request_options.most_nodes(None) is None  # a pooling request
