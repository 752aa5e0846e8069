# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.config import speculative
from vllm_ext.proposers.registry import METHODS, load_method


def test_defaults() -> None:
    settings = speculative.parse({"method": "token_recycling"})
    assert settings.options.model_dump() == {
        "num_speculative_tokens": 16,
        "budget": "goodput",
        "linear_layers": "auto",
        "verify": "exact",
        "verify_threshold": 0.09,
        "verify_alpha": None,
        "verify_entropy": 1.0,
        "verify_window": 5,
        "verify_weight": 0.3,
        "verify_prompt": " Wait, is that right? Again:",
        "state_dir": None,
        "state_interval_minutes": 10.0,
        "matrix_width": 8,
        "context_tokens": 4,
        "tree": "dynamic",
    }
    assert str(settings).startswith("token_recycling (num_speculative_tokens=16, budget='goodput', ")


def test_a_choice_lists_what_it_can_be() -> None:
    with pytest.raises(
        ValueError, match=r"budget='auto' is not allowed; allowed: 'goodput' or 'shared' or 'fixed'"
    ):
        speculative.parse({"method": "token_recycling", "budget": "auto"})


def test_hyphens_as_in_vllm() -> None:
    settings = speculative.parse({"method": "token_recycling", "num-speculative-tokens": 3})
    assert settings.options.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("num_speculative_tokens", 0, "num_speculative_tokens=0 is not allowed; allowed: integer, 1 to 128"),
        ("num_speculative_tokens", -1, "num_speculative_tokens=-1 is not allowed"),
        (
            "num_speculative_tokens",
            129,
            "num_speculative_tokens=129 is not allowed; allowed: integer, 1 to 128",
        ),
        ("num_speculative_tokens", "5", "num_speculative_tokens='5' is not allowed"),
        ("num_speculative_tokens", 2.5, "num_speculative_tokens=2.5 is not allowed"),
        ("num_speculative_tokens", None, "num_speculative_tokens=None is not allowed"),
        ("matrix_width", True, "matrix_width=True is not allowed"),
        ("matrix_width", 33, "matrix_width=33 is not allowed; allowed: integer, 1 to 32"),
        ("matrix_widht", 8, "unknown option matrix_widht=8"),
        ("state_dir", "", "state_dir='' is not allowed; allowed: string or null"),
        ("state_dir", 3, "state_dir=3 is not allowed; allowed: string or null"),
        (
            "state_interval_minutes",
            0,
            "state_interval_minutes=0 is not allowed; allowed: number, 0.1 to 1440",
        ),
        ("model", "gpt2", "unknown option model='gpt2'"),
        (
            "state_dir",
            "~nouser/x",
            "state_dir='~nouser/x': Could not determine home directory; write the path",
        ),
        (
            "state_dir",
            "a\0b",
            "state_dir='a\\x00b': it has a NUL character, which no path can have; remove it",
        ),
        ("state_interval_minutes", float("nan"), "state_interval_minutes=nan is not allowed"),
    ],
)
def test_bad_options_name_field_value_allowed_and_way_out(option: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match="token_recycling") as caught:
        speculative.parse({"method": "token_recycling", option: value})
    message = str(caught.value)
    assert says in message
    # Always: every option with its range, and what to do.
    assert "matrix_width: integer, 1 to 32" in message
    assert "--speculative-config" in message


BRANCHING = "array, 1 to 32 long, each integer, 1 to 128"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "rsd_c", "branching": [0]}, f"branching.0=0 is not allowed; allowed: {BRANCHING}"),
        ({"method": "rsd_c", "branching": [10**9] * 32}, f"is not allowed; allowed: {BRANCHING}"),
        ({"method": "rsd_c", "branching": []}, f"branching=[] is not allowed; allowed: {BRANCHING}"),
        ({"method": "rsd_c", "branching": [1] * 33}, f"1] is not allowed; allowed: {BRANCHING}"),
        ({"method": "static_tree", "branching": [1.5]}, "branching.0=1.5 is not allowed"),
        (
            {"method": "suffix_tree", "memory_mb": 1e20},
            "memory_mb=1e+20 is not allowed; allowed: integer, 1 to",
        ),
        ({"method": "rest", "datastore": "~nouser/x"}, "datastore='~nouser/x': Could not determine home"),
        ({"method": "del", "exits": [3, 2]}, "exits=[3, 2]: must be numbers of layers from 1, ascending"),
        ({"method": "layerskip", "heads": "~nouser/x"}, "heads='~nouser/x': Could not determine home"),
        (
            {"method": "hybrid", "drafters": ["stand", "stand"]},
            "drafters=['stand', 'stand']: 'stand' is there more than once",
        ),
        (
            {"method": "stand", "max-order": 2, "max_order": 3},
            "speculative_config has 'max-order' and 'max_order', 2 and 3, which are the same option; give one",
        ),
        ({"method": "stand", 3: 3}, "unknown option 3=3"),
        ({"method": "stand", "x" * 10_000: "y" * 10_000}, "unknown option"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        speculative.parse({"model": "m", **given} if given["method"] in ("rsd_c", "static_tree") else given)
    assert "Correct or remove" in str(caught.value) or "give one" in str(caught.value)
    assert len(str(caught.value)) < 2_500


def test_a_home_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ext.demo import embedded_model

    monkeypatch.delenv("VLLM_EXT_CACHE", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ValueError, match="set VLLM_EXT_CACHE to a folder"):
        embedded_model.cache_dir()
    with pytest.raises(
        ValueError, match="state_dir='~/x': Could not determine home directory; write the path in full"
    ):
        speculative.parse({"method": "stand", "state_dir": "~/x"})


def test_unknown_method_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'token_recyling'\. Did you mean 'token_recycling'\? Methods of vllm-ext: .*spectr"
    ):
        load_method("token_recyling")


def test_unknown_method_lists_our_names_alone() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ValueError, match=r"'eagle33'\. Did you mean 'eagle3'\? Methods") as caught:
        speculative.check_known({"method": "eagle33"})
    assert str(caught.value).partition("Methods of vllm-ext: ")[2] == ", ".join(METHODS) + "."
    with pytest.raises(ValueError) as caught:
        speculative.check_known({"method": "x" * 10_000})
    assert len(str(caught.value)) < 600


def test_settings_survive_the_trip_to_a_worker() -> None:
    settings = speculative.parse({"method": "token_recycling", "matrix_width": 3})
    vllm_config = SimpleNamespace(
        additional_config={"vllm_ext": {"speculation": settings.to_additional_config()}, "other": 1}
    )
    assert speculative.from_vllm_config(vllm_config) == settings
    assert speculative.from_vllm_config(SimpleNamespace(additional_config={"other": 1})) is None


@pytest.mark.parametrize("method", METHODS)
def test_every_method_documents_its_options(method: str) -> None:
    proposer = load_method(method)
    assert proposer.summary
    assert proposer.paper
    for name, _, allowed, meaning in speculative.option_rows(proposer.Options):
        assert allowed, name
        assert meaning, name


def test_no_method_has_the_name_of_one_of_vllms() -> None:
    """Who asks for vLLM's own gets vLLM's own, with this package installed as without."""
    from vllm.config.speculative import SpeculativeMethod

    assert set(METHODS).isdisjoint(speculative._flatten(SpeculativeMethod))
