# SPDX-License-Identifier: Apache-2.0
"""What may follow a dot in Python code, by jedi: the `python` monitor of rule `monitor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_PROJECT = (
    "/nonexistent"  # jedi looks for modules in the interpreter's own path, not in the working directory
)


def attributes(code: str) -> Sequence[str]:
    """Names of the attributes of what the code ends with.

    Modules are those of the server's Python, and jedi imports none but compiled ones.

    Args:
        code: up to a dot and with it; nothing else needs to be whole.

    Returns:
        The names; none where jedi knows nothing, in strings and in comments.
    """
    import jedi  # type: ignore[import-untyped]
    import parso

    # jedi takes a comment for a place where any name may come.
    module: Any = parso.parse(code)  # type: ignore[no-untyped-call]
    if "#" in module.get_last_leaf().prefix.rpartition("\n")[2]:
        return ()
    script = jedi.Script(
        code, environment=jedi.InterpreterEnvironment(), project=jedi.Project(NO_PROJECT, added_sys_path=())
    )
    last = code.rpartition("\n")[2]
    found = script.complete(code.count("\n") + 1, len(last))
    return [name.name for name in found if name.type != "keyword"]
