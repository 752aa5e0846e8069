# SPDX-License-Identifier: Apache-2.0
"""What may follow a dot in Python code, by jedi: the `python` monitor of rule `monitor`.

jedi is shown the code alone. What it imports is looked up in the standard library and in the packages that are
installed beside the server: in no working directory, and not by PYTHONPATH. Packages are read, not run, but for
compiled modules, which a process of their own imports.
"""

from __future__ import annotations

import functools
import keyword
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ext.samplers.messages import quoted

logger = logging.getLogger("vllm.vllm_ext")

# Strings and comments, as far as they go; f-strings are strings. jedi reads one that is not closed as code.
_LITERAL = re.compile(
    r"""\#[^\n]*  |  ('{3}|"{3}) (?:\\.|(?!\1).)* (?:\1|\Z)  |  (['"]) (?:\\.|(?!\2)[^\n\\])* (?:\2|(?=\n)|\Z)""",
    re.DOTALL | re.VERBOSE,
)
_OWN = re.compile(r"(?<![\w.])(self|cls)\.\Z")


def attributes(code: str) -> Sequence[str]:
    """Names of the attributes of what the code ends with; none in strings, in comments, and where others may exist.

    Others may exist of

    - ``self`` and ``cls``: their class is being written, and a statement may give it one more;
    - what has a ``__getattr__``: argparse's namespaces, mocks, modules that import lazily;
    - what has no public ones, such as a variable that is None until later;
    - where jedi fails.

    Args:
        code: up to a dot and with it; nothing else needs to be whole.
    """
    if _OWN.search(code) or any(literal.end() == len(code) for literal in _LITERAL.finditer(code)):
        return ()
    import jedi  # type: ignore[import-untyped]

    try:
        found = jedi.Script(code, environment=_environment(), project=_project()).complete()
    except Exception as error:  # it trips over code of many kinds
        _log(type(error).__name__, quoted(error))
        return ()
    names = {name.name for name in found if not keyword.iskeyword(name.name)}
    if "__getattr__" in names or all(name.startswith("_") for name in names):
        return ()
    return sorted(names)


_failed: set[str] = set()


def _log(kind: str, what: str) -> None:
    """Once for each kind of error."""
    if kind in _failed:
        return
    _failed.add(kind)
    logger.warning(
        "vllm-ext: jedi failed, and monitor 'python' restricts nothing there: %s: %s. The same kind of error is not "
        "logged again.",
        kind,
        what,
    )


@functools.cache
def _environment() -> Any:
    """The server's own Python, in a process of its own that ends with this one."""
    import jedi

    return jedi.create_environment(sys.executable, safe=False)


@functools.cache
def _project() -> Any:
    import jedi

    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["platstdlib"], str(Path(paths["platstdlib"]) / "lib-dynload")]
    folders += [paths["purelib"], paths["platlib"]]
    # jedi looks for calls of a function in all Python files of a project's folder: here there are none.
    return jedi.Project(os.devnull, sys_path=list(dict.fromkeys(folders)), smart_sys_path=False)
