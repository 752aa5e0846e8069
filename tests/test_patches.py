# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from vllm_ext import patches

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
import vllm.v1.engine.input_processor, vllm.v1.engine.utils, vllm.v1.engine.llm_engine
import vllm.v1.worker.gpu_model_runner
import patched
from vllm_ext import patches, plugin
assert not patched.replaced()
plugin.register()
assert patched.replaced() == {"vllm.engine.arg_utils.EngineArgs.create_engine_config"}
for _ in range(2):
    patches.read_requests()
    patches.show_counters()
    patches.let_engines_end(1.0)
print(*sorted(patched.replaced()))
"""


def test_the_table_is_what_is_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        check=True,
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=f"{ROOT / 'tests'}:{ROOT}", VLLM_PLUGINS="none"),
    )
    assert set(done.stdout.splitlines()[-1].split()) == set(patches.REPLACED)
    for name in patches.REPLACED.values():
        assert callable(getattr(patches, name))


def test_nothing_else_changes_an_objects_class() -> None:
    given = set()
    for file in sorted((ROOT / "vllm_ext").glob("**/*.py")):
        tree = ast.parse(file.read_text())
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and module != "vllm_ext.patches":
                targets = [each.attr for each in node.targets if isinstance(each, ast.Attribute)]
                assert "__class__" not in targets, f"{file}:{node.lineno}: see patches.subclass_in_place"
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("subclass_in_place"):
                given.add((module, ast.unparse(node.args[1])))
    for name in patches.SUBCLASSED:
        module, _, mixin = name.rpartition(".")
        assert isinstance(getattr(import_module(module), mixin), type)
    mixins = {name.rpartition(".")[2] for name in patches.SUBCLASSED}
    assert {name for _, name in given} - {"kind"} <= mixins  # of `kind` an engine tells
