# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md names every environment variable that the code reads or sets, and every file that it writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from vllm_ext.config import speculative
from vllm_ext.engine.state import state_file

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))
CODE = sorted(
    file
    for folder in ("vllm_ext", "proposers", "samplers", "codecs", "kernels")
    for file in (ROOT / folder).glob("**/*.py")
)

# Constants in capitals, in modules that touch the environment, which are no variables.
NO_VARIABLES = {"FLASH_ATTN", "TRITON_ATTN"}
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|CC|CXX|HOME|TMPDIR|USER|PYTHON[A-Z]+")
# Calls that make a file or a folder, by the function's name; `open` and `_open` where mode or flags say so.
WRITING = {
    *("write_text", "write_bytes", "tofile", "mkdir", "touch", "copytree", "symlink_to", "save_pretrained"),
    *("mkstemp", "mkdtemp", "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile"),
    *("save_file", "savez", "savez_compressed", "memmap", "open_memmap"),
}
FILE_NAME = re.compile(
    r"[\w-]*\.(safetensors|npz|npy|part|log|lock|tmp|jsonl?|pt|bin|tokens|suffixes|html|txt)|vllm-ext-\w+-"
)
# Names in modules that write, which are an example's, or those of a tokenizer's files.
NO_FILES = {"FILE.json", "merges.txt", "special_tokens_map.json"}
# In these, what is called with such a name writes nothing of its own: the module that they call is named.
CALLS_ANOTHER = {"vllm_ext/cli/train/exits.py"}


def variables(tree: ast.Module, source: str) -> Iterator[str]:
    """Names in capitals of a module that touches the environment, and what it reads from vLLM's ``envs``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "environ" in source:
            if VARIABLE.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "envs" and node.attr.isupper():
            yield node.attr


def writes(call: ast.Call) -> bool:
    """Whether a call makes a file or a folder."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in WRITING or ast.unparse(call.func) in ("torch.save", "np.save"):
        return True
    if name not in ("open", "_open"):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [str(each.value) for each in given if isinstance(each, ast.Constant)]
    return "O_CREAT" in ast.unparse(call) or any(
        re.fullmatch("[wax][bt+]*|r[bt]*[+]b?", mode) for mode in modes
    )


def writing_modules() -> Iterator[tuple[Path, ast.Module]]:
    """Those that make files or folders."""
    for file in CODE:
        tree = ast.parse(file.read_text())
        if any(isinstance(node, ast.Call) and writes(node) for node in ast.walk(tree)):
            yield file, tree


def test_every_variable_is_named() -> None:
    found = {}
    for file in CODE:
        source = file.read_text()
        for name in variables(ast.parse(source), source):
            found[name] = str(file.relative_to(ROOT))
    assert len(found) > 20  # the search works
    assert {name: file for name, file in found.items() if name not in NAMED | NO_VARIABLES} == {}
    assert set(found) >= NO_VARIABLES, "no longer there"


def test_every_module_that_writes_is_named() -> None:
    found = {str(file.relative_to(ROOT)) for file, _ in writing_modules()}
    assert len(found) > 20
    named = {
        file
        for file in (str(file.relative_to(ROOT)) for file in CODE)
        if file.removeprefix("vllm_ext/") in NAMED
    }
    assert sorted(found - named - CALLS_ANOTHER) == []
    assert sorted(named - found - {"kernels/backends.py"}) == [], "writes nothing any more"


def test_every_file_name_is_named() -> None:
    found = {}
    for file, tree in writing_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and FILE_NAME.fullmatch(str(node.value)):
                found[str(node.value)] = str(file.relative_to(ROOT))
    assert len(found) > 15
    assert {name: file for name, file in found.items() if name not in PAGE and name not in NO_FILES} == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Path(x).open('wb')", True),
        ("os.open(x, os.O_CREAT)", True),
        ("open(x, 'a')", True),
        ("open(x)", False),
        ("path.open('rb')", False),
        ("Datastore.open(folder)", False),
        ("torch.save(x, file)", True),
    ],
)
def test_what_writes(line: str, expected: bool) -> None:
    call = ast.parse(line, mode="eval").body
    assert isinstance(call, ast.Call)
    assert writes(call) is expected


def test_the_manifest_waits_for_the_save() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    (pod,) = (each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment")
    (server,) = pod["containers"]
    options = dict(argument.removeprefix("--").split("=", 1) for argument in server["args"])
    (pause,) = re.findall(r"\d+", " ".join(server["lifecycle"]["preStop"]["exec"]["command"]))
    needed = int(pause) + int(options["shutdown-timeout"]) + state_file.SHUTDOWN_SECONDS
    assert pod["terminationGracePeriodSeconds"] > needed
    method = speculative.parse(json.loads(options["speculative-config"]))
    mounted = {mount["mountPath"] for mount in server["volumeMounts"]}
    home = next(each["value"] for each in server["env"] if each["name"] == "HOME")
    assert {home, "/tmp", "/dev/shm"} <= mounted
    assert str(Path(method.options.state_dir or "").parent) in mounted
