# SPDX-License-Identifier: Apache-2.0
"""Whether an unpacked vLLM has our hooks, by its Python files alone: nothing of it is imported.

For versions that are not installed here, or cannot be: a CUDA wheel unpacked on a CPU. What a decorator or a metaclass
makes at run time is not seen, so this says less than `hooks.Hook.problem`; tests hold both to the same answers on the
vLLM that is installed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from vllm_ext.compat.hooks import Hook

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr | ast.stmt
MOST_STEPS = 20  # of imports followed from one name, and of bases of one class


class Files:
    """The Python files below a folder.

    Args:
        folder: has the folder ``vllm``.

    Raises:
        ValueError: it has not.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "vllm" / "__init__.py").is_file():
            raise ValueError(
                f"{folder}: has no vllm/__init__.py; unpack a wheel there (`python -m zipfile -e WHEEL {folder}`)"
            )
        self._folder = folder
        self._parsed: dict[str, ast.Module | None] = {}

    @classmethod
    def installed(cls) -> Files:
        """Those of the vLLM that is installed, found without importing it.

        Raises:
            ValueError: there is none.
        """
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ValueError("no vLLM is installed; install vllm, or name a folder that has its files.")
        return cls(Path(spec.origin).parents[1])

    def version(self) -> str:
        """Of the wheel's metadata; "unknown" without."""
        for metadata in sorted(self._folder.glob("vllm*.dist-info/METADATA")):
            for line in metadata.read_text(encoding="utf-8").splitlines():
                if line.startswith("Version: "):
                    return line.removeprefix("Version: ")
        return "unknown"

    def problem(self, hook: Hook) -> str | None:
        """As `hooks.Hook.problem`: None when the symbol is there as expected, else what is wrong."""
        if self._module(hook.module) is None:
            return f"missing (no module {hook.module})"
        found = self._find(hook.module, hook.name.split("."))
        if found is None:
            return f"missing (no {hook.name} in {hook.module})"
        if hook.parameters is None:
            return None
        actual = self._parameters(*found)
        if actual is None:
            return f"signature of {hook.name} is not written out"
        if tuple(actual[: len(hook.parameters)]) != hook.parameters:
            return f"signature ({', '.join(actual)}), expected ({', '.join(hook.parameters)}, ...)"
        return None

    def function(self, hook: Hook) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """What a hook's function is made of: of a class that is called, its constructor; None of all else."""
        found = self._find(hook.module, hook.name.split("."))
        if found is not None and isinstance(found[1], ast.ClassDef) and hook.parameters is not None:
            found = self._member(found[0], found[1], "__init__", MOST_STEPS)
        if found is None or not isinstance(found[1], ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        return found[1]

    def has(self, module: str, name: str) -> bool:
        """Whether ``from module import name`` has something to find."""
        return self._module(f"{module}.{name}") is not None or self._find(module, [name]) is not None

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._parsed:
            base = self._folder.joinpath(*name.split("."))
            path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            self._parsed[name] = ast.parse(path.read_bytes()) if path.is_file() else None
        return self._parsed[name]

    def _find(self, module: str, parts: list[str], steps: int = MOST_STEPS) -> tuple[str, Definition] | None:
        """Where a dotted name is defined: the module, and what of it. Imports are followed."""
        tree = self._module(module)
        if tree is None or not steps:
            return None
        found = _last(_statements(tree.body), parts[0])
        if found is None:
            # A module of this package.
            return self._find(f"{module}.{parts[0]}", parts[1:], steps - 1) if parts[1:] else None
        if isinstance(found, ast.ImportFrom):
            alias = next(alias for alias in found.names if (alias.asname or alias.name) == parts[0])
            source = self._source(module, found)
            if self._module(f"{source}.{alias.name}") is not None and parts[1:]:
                return self._find(f"{source}.{alias.name}", parts[1:], steps - 1)
            return self._find(source, [alias.name, *parts[1:]], steps - 1)
        for part in parts[1:]:
            if not isinstance(found, ast.ClassDef):
                return None
            member = self._member(module, found, part, steps - 1)
            if member is None:
                return None
            module, found = member
        return module, found

    def _member(self, module: str, of: ast.ClassDef, name: str, steps: int) -> tuple[str, Definition] | None:
        """A class's own, or that of the first base which has it."""
        if not steps:
            return None
        own = _last(_statements(of.body), name)
        if own is not None:
            return module, own
        for base_module, base in self._bases(module, of, steps):
            found = self._member(base_module, base, name, steps - 1)
            if found is not None:
                return found
        return None

    def _bases(self, module: str, of: ast.ClassDef, steps: int) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in of.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self._find(module, name.split("."), steps - 1)
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def _source(self, module: str, found: ast.ImportFrom) -> str:
        if not found.level:
            return found.module or ""
        parts = module.split(".")
        is_package = self._folder.joinpath(*parts).is_dir()
        parts = parts[: len(parts) - found.level + is_package]
        return ".".join([*parts, *([found.module] if found.module else [])])

    def _parameters(self, module: str, found: Definition) -> list[str] | None:
        """As `inspect.signature` names them: of a class those of its constructor."""
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in (*found.args.posonlyargs, *found.args.args)]
            if any(ast.unparse(decorator) == "classmethod" for decorator in found.decorator_list):
                names = names[1:]
            names += [found.args.vararg.arg] if found.args.vararg else []
            names += [argument.arg for argument in found.args.kwonlyargs]
            return names + ([found.args.kwarg.arg] if found.args.kwarg else [])
        if not isinstance(found, ast.ClassDef):
            return None
        written = self._member(module, found, "__init__", MOST_STEPS)
        if written is not None:
            names = self._parameters(*written) or []
            return names[1:]
        return self._fields(module, found)

    def _fields(self, module: str, of: ast.ClassDef) -> list[str]:
        """Of a dataclass or a named tuple, those of its bases first."""
        bases = self._bases(module, of, MOST_STEPS)
        inherited = (name for base_module, base in bases for name in self._fields(base_module, base))
        own = (
            statement.target.id
            for statement in of.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and not ast.unparse(statement.annotation).startswith(("ClassVar", "typing.ClassVar"))
        )
        return list(dict.fromkeys([*inherited, *own]))


def imports(folder: Path) -> Iterator[tuple[str, str, str]]:
    """What the Python files of a folder take from vLLM: file, module and name, those in functions too."""
    for path in sorted(folder.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm":
                for alias in node.names:
                    yield str(path.relative_to(folder)), str(node.module), alias.name


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, also under ``if`` and ``try``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _last(statements: Iterator[ast.stmt], name: str) -> Definition | None:
    """What defines a name, the last one if there are several; a definition rather than an import beside it."""
    found: Definition | None = None
    for statement in statements:
        if name in _names(statement) and not (isinstance(statement, ast.ImportFrom) and found is not None):
            found = statement
    return found


@functools.singledispatch
def _names(statement: ast.stmt) -> list[str]:
    """What a statement defines."""
    return []


@_names.register(ast.FunctionDef)
@_names.register(ast.AsyncFunctionDef)
@_names.register(ast.ClassDef)
def _(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[str]:
    return [statement.name]


@_names.register
def _(statement: ast.ImportFrom) -> list[str]:
    return [alias.asname or alias.name for alias in statement.names]


@_names.register
def _(statement: ast.Assign) -> list[str]:
    return [target.id for target in statement.targets if isinstance(target, ast.Name)]


@_names.register
def _(statement: ast.AnnAssign) -> list[str]:
    return [statement.target.id] if isinstance(statement.target, ast.Name) else []
