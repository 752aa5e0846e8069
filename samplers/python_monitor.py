# SPDX-License-Identifier: Apache-2.0
"""What may follow a dot in Python code, by jedi: the `python` monitor of rule `monitor`.

jedi is shown the code, and a repository where the server names one. What the code imports is looked up there, in the
standard library and in the packages that are installed beside the server: in no working directory, and not by
PYTHONPATH. All of it is read, not run, but for compiled modules, which a process of their own imports. Code may name
other folders, by ``sys.path`` or by dots before an import: these are left alone.
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
# Of jedi's, where it looks for what is imported by dots, and which folders the code adds to ``sys.path``.
_LEVEL, _ADDED = "_level_to_base_import_path", "check_sys_path_modifications"
_OWN = re.compile(r"(?<![\w.])(self|cls)\.\Z")


def attributes(code: str, root: str | None = None, file: str | None = None) -> Sequence[str]:
    """Names of the attributes of what the code ends with; none in strings, in comments, and where others may exist.

    Others may exist of

    - ``self`` and ``cls``: their class is being written, and a statement may give it one more;
    - what has a ``__getattr__``: argparse's namespaces, mocks, modules that import lazily;
    - what has no public ones, such as a variable that is None until later;
    - where jedi fails.

    Args:
        code: up to a dot and with it; nothing else needs to be whole.
        root: folder of the repository that it belongs to; its packages are looked up in it and in its ``src``.
        file: where the code's file is in there: what it imports by dots is looked up from there.
    """
    if _OWN.search(code) or any(literal.end() == len(code) for literal in _LITERAL.finditer(code)):
        return ()
    jedi = load_jedi()
    try:
        path = None if root is None or file is None else Path(root, file)
        found = jedi.Script(code, path=path, environment=_environment(), project=_project(root)).complete()
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


def find_jedi() -> tuple[Any, Any, Any]:
    """jedi, and two of its modules.

    Raises:
        ImportError: there is none, or not one that we know.
    """
    import jedi  # type: ignore[import-untyped]
    from jedi.inference import imports, sys_path  # type: ignore[import-untyped]

    if not (hasattr(imports, _LEVEL) and hasattr(sys_path, _ADDED)):
        raise ImportError(f"jedi {jedi.__version__} is not known here; install jedi 0.20")
    return jedi, imports, sys_path


@functools.cache
def load_jedi() -> Any:
    """jedi, which from here on leaves folders alone that only the code names.

    It has no option for that: two of its functions are replaced, in the monitors' process.
    """
    jedi, imports, sys_path = find_jedi()
    of_level = getattr(imports, _LEVEL)

    def within_the_project(project_path: str, directory: str, level: int) -> tuple[Any, Any]:
        names, folder = of_level(project_path, directory, level)
        is_in = folder is not None and Path(folder).is_relative_to(project_path)
        return (names, folder) if is_in else (None, None)

    setattr(imports, _LEVEL, within_the_project)
    setattr(sys_path, _ADDED, lambda _: [])
    return jedi


@functools.cache
def _environment() -> Any:
    """The server's own Python, in a process of its own that ends with this one."""
    return load_jedi().create_environment(sys.executable, safe=False)


@functools.cache
def _project(root: str | None) -> Any:
    paths = sysconfig.get_paths()
    folders = [] if root is None else [root, str(Path(root, "src"))]
    folders += [paths["stdlib"], paths["platstdlib"], str(Path(paths["platstdlib"]) / "lib-dynload")]
    folders += [paths["purelib"], paths["platlib"]]
    # jedi looks for calls of a function in all Python files of a project's folder: without a repository there are none.
    return load_jedi().Project(
        root or os.devnull, sys_path=list(dict.fromkeys(folders)), smart_sys_path=False
    )
