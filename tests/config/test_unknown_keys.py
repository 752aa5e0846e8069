# SPDX-License-Identifier: Apache-2.0
"""Keys that are nearly ours are refused with the name that was meant; those that are nobody's are left to others."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.config import speculative
from vllm_ext.config.allowed import nearest
from vllm_ext.samplers.messages import quoted

KNOWN = ("trie", "contrastive", "contrastive_beta", "cad", "rpg_count", "vllm_ext")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trei", "trie"),  # two letters that have changed places are one edit
        ("tri", "trie"),
        ("contrastive_betta", "contrastive_beta"),
        ("contrastive-beta", "contrastive_beta"),
        ("Contrastive_Beta", "contrastive_beta"),
        ("kontrastiv", "contrastive"),
        ("kontrastif", None),  # three edits
        ("vllm-ext", "vllm_ext"),
        ("vllmext", "vllm_ext"),
        ("VLLM.EXT", "vllm_ext"),
        ("vllm_ascend", None),
        ("no_such_rule", None),
        ("cat", "cad"),
        ("max", None),  # two edits of three letters are another word
        ("", None),
        ("session_id", None),
    ],
)
def test_the_nearest_name(name: str, meant: str | None) -> None:
    assert nearest(name, KNOWN) == meant


def test_many_keys_cost_little() -> None:
    keys = [f"contrastive_xy{number:04}" for number in range(300)] + ["x" * 1_000_000] * 100
    nearest("warm", KNOWN)
    started = time.process_time()
    assert not any(nearest(key, KNOWN) for key in keys)
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("value", ["x" * 10**6, b"x" * 10**6, list(range(10**5)), {"a": "b" * 10**5}])
def test_values_are_quoted_in_part(value: Any) -> None:
    assert len(quoted(value)) <= 203
    assert quoted(value).endswith("...")
    assert quoted("short") == "'short'"


@pytest.mark.parametrize("key", ["vllm-ext", "vllmext", "vllm_ex", "VLLM_EXT", "vllm_etx"])
def test_near_misses_beside_our_key_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown key '{key}'. Did you mean 'vllm_ext'\?"):
        speculative.check_spelling(SimpleNamespace(additional_config={key: {"rules": {"dola": {}}}}))


@pytest.mark.parametrize("additional", [None, {}, {"vllm_ascend": 1, "torchair": {}, "vllm_ext": {}}, "hash"])
def test_keys_of_others_are_theirs(additional: Any) -> None:
    speculative.check_spelling(SimpleNamespace(additional_config=additional))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("disable_by_batch_size", 4, r"budget='goodput', the default, drafts less"),
        ("num_speculative_tokens_per_batch_size", [], r"budget='goodput'"),
        ("draft_tensor_parallel_size", 2, r"takes the ranks of the target \(tensor_parallel_size\)"),
        ("prompt_lookup_min", 2, r"min_match of methods rest and suffix_tree"),
        ("prompt_lookup_max", 4, r"max_match of methods rest and suffix_tree"),
        ("suffix_decoding_max_cached_requests", 4, r"memory_mb of method suffix_tree"),
        ("matrix_widht", 4, r"Did you mean 'matrix_width'\?"),
        ("nobodys", 4, r"4\. Options of"),
    ],
)
def test_keys_of_vllms_methods_are_answered_with_ours(key: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown option {key}=.*{says}"):
        speculative.parse({"method": "token_recycling", key: value})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"method": ["token_recycling", "stand"]},
            r'one name.*\{"method": "hybrid", "drafters": \[\.\.\.\]\}',
        ),
        (["token_recycling", "stand"], r'one name.*\{"method": "hybrid", "drafters": \[\.\.\.\]\}'),
        (
            "token_recycling",
            r"speculative_config='token_recycling' is not allowed; allowed: an object with a method",
        ),
        ({"methd": "token_recycling"}, r"unknown key 'methd'\. Did you mean 'method'\?"),
    ],
)
def test_what_names_no_method(given: Any, says: str) -> None:
    pytest.importorskip("vllm")
    assert not speculative.is_ours(given)
    with pytest.raises(ValueError, match=says):
        speculative.check_known(given)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("trei", "trie"), ("contrastive_betta", "contrastive_beta"), ("rpg_cuont", "rpg_count")],
)
def test_keys_of_requests_that_are_nearly_ours_are_refused(key: str, meant: str) -> None:
    vllm = pytest.importorskip("vllm")
    from vllm_ext.config import rules

    settings = rules.parse({"rpg": {}})
    with pytest.raises(
        ValueError, match=rf"vllm_xargs has an unknown key '{key}'\. Did you mean '{meant}'\?"
    ):
        settings.validate(vllm.SamplingParams(extra_args={key: 1}))
    settings.validate(vllm.SamplingParams(extra_args={"no_such_rule": "x", "session_id": "4", "max": 1}))
