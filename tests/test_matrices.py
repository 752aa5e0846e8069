# SPDX-License-Identifier: Apache-2.0
"""What is registered is tested: the matrices of exactness read the registries, and each entry has tests of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from recorded import recorded_name

from vllm_ext.codecs.registry import CODECS, load_codec
from vllm_ext.config import kv_cache
from vllm_ext.kernels import block_forms_numba
from vllm_ext.proposers.registry import METHODS, load_method
from vllm_ext.samplers.registry import RULES, load_rule
from vllm_ext.samplers.steering import SteeringRule

TESTS = Path(__file__).parent
SCRIPTS = TESTS.parent / "scripts"


def test_every_method_has_what_it_requires() -> None:
    script = (SCRIPTS / "matrix.sh").read_text()
    assert "registry import METHODS" in script
    for name in METHODS:
        proposer = load_method(name)
        required = {key for key, field in proposer.Options.model_fields.items() if field.is_required()}
        if not re.search(
            rf"^        (.* )?{name}( .*)?\)$", script, re.MULTILINE
        ):  # which makes what it needs
            assert required <= proposer.tested_with.keys(), f"tested_with of {name}"
            proposer.Options.model_validate(dict(proposer.tested_with))


def test_engines_are_started_in_one_folder() -> None:
    """Where `scripts/test.sh` collects them."""
    parts = re.findall(r'"((?:engine|v2)[^|"]*)\|([^"]*)"', (SCRIPTS / "test.sh").read_text())
    assert len(parts) == 3
    assert {where for _, where in parts} == {"tests/engine"}
    of_engines = re.compile(r"\bmark\.(engine|v2|shared)\b")
    elsewhere = [file for file in TESTS.rglob("test_*.py") if file.parts[len(TESTS.parts)] != "engine"]
    assert not [file for file in elsewhere if of_engines.search(file.read_text())]


def test_every_rule_has_an_example_that_it_takes() -> None:
    """For the engine tests, which ask for each rule of the registry."""
    for name in RULES:
        rule = load_rule(name)
        switch = {name: True} if issubclass(rule, SteeringRule) else {}
        assert hasattr(rule, "example"), f"example of {name}"
        assert switch or rule.example, f"example of {name}"
        rule.Params.model_validate({**switch, **rule.example})


@pytest.mark.parametrize(
    ("folder", "registry"), [("proposers", METHODS), ("samplers", RULES)], ids=["methods", "rules"]
)
def test_everything_registered_has_tests(folder: str, registry: Mapping[str, str]) -> None:
    """Beside those that read the registry: a test file that imports its module, or gives its name."""
    texts = [file.read_text() for file in (TESTS / folder).glob("test_*.py")]
    for name, path in registry.items():
        module = path.partition(":")[0].rpartition(".")[2]
        wanted = re.compile(rf'{folder}\.{module} import|{folder} import .*\b{module}\b|"{name}"')
        assert any(wanted.search(text) for text in texts), f"tests/{folder}/test_{module}.py"


def test_every_codec_is_in_the_matrix(tmp_path: Path) -> None:
    """What the script runs, with pytest left out."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(
        [SCRIPTS / "kv_matrix.sh"], env=environment, capture_output=True, text=True, check=True
    )
    given = [json.loads(each) for each in re.findall(r"(?m)^== (.*)$", done.stdout)]
    assert {each["method"] for each in given} == set(CODECS)
    for each in given:
        kv_cache.parse(each)


def test_every_codec_is_described() -> None:
    """A row in the folder's table, a paragraph among the methods, and kernels."""
    root = SCRIPTS.parent
    rows = re.findall(r"(?m)^\| `(\w+)` \|", (root / "codecs" / "README.md").read_text())
    assert rows == list(CODECS)
    page = (root / "docs" / "kv.md").read_text()
    for name in CODECS:
        assert f"**`{name}`**" in page, f"docs/kv.md: {name}"
        form = block_forms_numba.form_of(load_codec(name).KERNELS or name)
        for function in ("encode_block", "decode_keys", "decode_values"):
            assert hasattr(form, function), f"{form.__name__}: {function}"


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ({"method": "hybrid"}, "hybrid"),
        ({"method": "hybrid", "drafters": ["aded", {"method": "layerskip", "width": 2}]}, "hybrid+layerskip"),
        (
            {
                "method": "hybrid",
                "drafters": [
                    {"method": "vllm", "speculative_config": {"method": "draft_model", "model": "M"}}
                ],
            },
            "hybrid+vllm:draft_model",
        ),
        ({"method": "dyspec", "model": "M", "cascade": "token_recycling"}, "dyspec+cascade"),
    ],
)
def test_a_combination_has_a_record_of_its_own(method: Mapping[str, Any], name: str) -> None:
    """Or what passed with it would count for the method alone."""
    assert recorded_name(method) == name
