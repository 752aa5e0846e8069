# SPDX-License-Identifier: Apache-2.0
"""The matrices of exactness (`scripts/`) run over every registered method."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vllm_ext.codecs.registry import CODECS
from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.registry import METHODS, load_method

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_every_method_has_what_it_requires() -> None:
    script = (SCRIPTS / "matrix.sh").read_text()
    assert "registry import METHODS" in script
    given = {name for case in re.findall(r"(?m)^ +([a-z_ |]+)\)", script) for name in case.split(" | ")}
    for name in METHODS:
        options: type[MethodOptions] = load_method(name).Options
        if any(field.is_required() for field in options.model_fields.values()):
            assert name in given or f'[ "$method" = {name} ]' in script, (
                f"scripts/matrix.sh: options of {name}"
            )


def test_every_codec_is_in_the_matrix() -> None:
    script = (SCRIPTS / "kv_matrix.sh").read_text()
    methods = {json.loads(each)["method"] for each in re.findall(r"'(\{.*?\})'", script)}
    assert methods == set(CODECS)
