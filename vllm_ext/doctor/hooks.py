# SPDX-License-Identifier: Apache-2.0
"""Whether a vLLM, installed or unpacked, has what we use of it, and does with it what we have read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.doctor.check import Check

if TYPE_CHECKING:
    from vllm_ext.compat import hooks
    from vllm_ext.compat.source_scan import Files

# What is lost where a symbol of a table is missing, and the way out beside another vLLM.
WITHOUT_V2 = "or set VLLM_USE_V2_MODEL_RUNNER=0: methods run on V1 as well"
WITHOUT_CUDA = "or use a CPU"
NOT_READ = "compare float32 answers with `vllm-ext bench --dtype float32`, and report this"


def hooks_of_installed() -> Iterator[Check]:
    """Of the vLLM that is installed: its symbols, by importing it, and its functions' bodies, by its files."""
    from vllm_ext.compat import hooks_v2, source_scan

    for table, symbols in hooks_v2.TABLES.items():
        for hook in symbols:
            yield _hook(table, hook, hook.problem())
    yield from _bodies(source_scan.Files.installed())


def checks_of_files(folder: Path) -> Iterator[Check]:
    """The same, and the names that our files import, of a vLLM that is unpacked there and not imported.

    Raises:
        ValueError: there is none.
    """
    from vllm_ext.compat import hooks, hooks_v2, source_scan

    files = source_scan.Files(folder)
    problem = hooks.version_problem(files.version())
    yield Check("fail" if problem else "ok", "vLLM", f"{files.version()} in {folder}", problem or "")
    for table, symbols in hooks_v2.TABLES.items():
        for hook in symbols:
            yield _hook(table, hook, files.problem(hook))
    yield from _bodies(files)
    taken = list(source_scan.imports(Path(__file__).parents[1]))
    missing = [(file, module, name) for file, module, name in taken if not files.has(module, name)]
    for file, module, name in missing:
        yield Check("fail", "import", f"{name} of {module}, in {file}: missing", "report this")
    if not missing:
        yield Check("ok", "import", f"all {len(taken)} names that our files import are there")


def _hook(table: str, hook: hooks.Hook, problem: str | None) -> Check:
    """The line of one symbol. Without a symbol of V1 no method runs; without one of another table some do."""
    from vllm_ext.compat import hooks

    way_out = f"install vllm >={hooks.MIN_VERSION},<{hooks.BELOW_VERSION}"
    way_out = ", ".join([way_out, *{"V2": [WITHOUT_V2], "CUDA": [WITHOUT_CUDA]}.get(table, [])])
    return Check(
        ("fail" if table == "V1" else "warn") if problem else "ok",
        f"seam {table}",
        f"{hook.name}: {problem or hook.why}",
        way_out if problem else "",
    )


def _bodies(files: Files) -> Iterator[Check]:
    """A line for each body that nobody has read or that differs between the versions, and one for all."""
    from vllm_ext.compat import bodies

    found = list(bodies.bodies(files))
    for body in found:
        what, versions = f"body {body.table}", list(bodies.read().get(body.name, {}))
        if not body.read_in:
            read = ", ".join(versions) or "no version"
            yield Check("warn", what, f"{body.name}: not as we have read it in {read}", NOT_READ)
        elif len(body.read_in) < len(versions):
            differs = ", ".join(version for version in versions if version not in body.read_in)
            yield Check("ok", what, f"{body.name}: as in {', '.join(body.read_in)}, not as in {differs}")
    count = sum(bool(body.read_in) for body in found)
    text = f"{count} of {len(found)} functions of vLLM are as we have read them"
    yield Check("ok", "bodies", text, short=text)
