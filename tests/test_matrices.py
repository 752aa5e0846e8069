# SPDX-License-Identifier: Apache-2.0
"""What is registered is tested: the matrices of exactness read the registries, and each entry has tests of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from vllm_ext.codecs.registry import CODECS
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
        if f"        {name})\n" not in script:  # which makes what it needs
            assert required <= proposer.tested_with.keys(), f"tested_with of {name}"
            proposer.Options.model_validate(dict(proposer.tested_with))


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


def test_every_codec_is_in_the_matrix() -> None:
    script = (SCRIPTS / "kv_matrix.sh").read_text()
    methods = {json.loads(each)["method"] for each in re.findall(r"'(\{.*?\})'", script)}
    assert methods == set(CODECS)
