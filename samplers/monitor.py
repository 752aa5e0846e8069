# SPDX-License-Identifier: Apache-2.0
"""Identifiers that exist: behind a dot, what a static analysis of the code so far says may come.

A monitor is a function from code that ends with a dot to names. Until one of them is written out the next token must go
on with it, or end it with a character that can be in no name; a monitor that knows no name forbids nothing. What it
knows of the repository that the code belongs to is the server's to say (`root`), and the request's where in it the code
stands (`monitor_file`).

Source: "Monitor-Guided Decoding of Code LMs with Static Analysis of Repository Context", arXiv 2306.10763, its monitor
for dereferences. There the analysis is a language server's, of Java and others; here it is jedi's, of Python.
"""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from vllm_ext.kernels.sparse import Int32
from vllm_ext.kernels.token_mask import keep_tokens
from vllm_ext.samplers import python_monitor
from vllm_ext.samplers.background import Making, Process
from vllm_ext.samplers.base import (
    Asked,
    Row,
    Rule,
    RuleOptions,
    RuleParams,
    Vocabulary,
    load_function,
    text_of,
)
from vllm_ext.samplers.kept import Kept, digest
from vllm_ext.samplers.messages import quoted

Monitor = Callable[[str, str | None], Sequence[str]]  # of code, and of where in the repository it stands
PYTHON = "vllm_ext.samplers.python_monitor:attributes"
KEPT_BYTES = 16 << 20  # of names behind dots, and of the tokens that begin them
FRESH_SECONDS = 30  # how long what is known of code in a repository is taken to be so: its files change
TAIL = 64  # tokens in which an identifier that was begun has its dot
SITE = re.compile(r"(?<=[\w)\]}\"'])\.(\w*)\Z")
HEAD = re.compile(r"\w*")


class MonitorOptions(RuleOptions):
    analysis_seconds: float = Field(
        default=10.0,
        gt=0.0,
        le=600.0,
        description="longest time that a monitor may take for one dot, beside the engine",
    )
    monitors: dict[str, str] = Field(
        default={},
        description="monitors that requests can name besides 'python', and the Python function of each, as "
        "package.module:function; it is given code that ends with a dot, and as root and file, where it has parameters "
        "of these names, what is below; it returns the names that may follow",
    )
    root: str | None = Field(
        default=None,
        min_length=1,
        description="folder of the repository that the code belongs to, whose modules the monitor 'python' knows then; "
        "whoever may send requests can learn names that are defined in it",
    )


class MonitorParams(RuleParams):
    monitor: str = Field(description="name of the monitor; 'python' completes attributes, by jedi")
    monitor_context: str | None = Field(
        default=None, description="code that stands before the output; none: what the prompt has"
    )
    monitor_file: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="where the code's file is, or will be, below the server's root: what it imports by dots is looked "
        "up from there",
    )


class _NotYet(Exception):
    """A monitor is still at it."""


class MonitorRule(Rule):
    """Names that a monitor knows."""

    closed = True
    waits = True
    summary = "identifiers behind a dot exist, by static analysis"
    paper = "arXiv 2306.10763"
    Options = MonitorOptions
    Params = MonitorParams
    example: ClassVar[Mapping[str, Any]] = {"monitor": "python"}

    def __init__(
        self,
        monitors: Mapping[str, Monitor],
        vocabulary: Vocabulary,
        apart: Process | None = None,
        fresh: float | None = None,
    ) -> None:
        """
        Args:
            monitors: by name.
            vocabulary: the target's.
            apart: a process that the monitors run in.
            fresh: seconds for which what they say is taken to be so; None: for good.
        """
        self._vocabulary, self._apart, self._fresh = vocabulary, apart, fresh
        self._monitors = monitors
        # By digests: code may be long, and there is a dot in many of its places.
        self._names: Making[frozenset[str]] = Making(
            Kept(KEPT_BYTES, lambda names: sum(map(len, names)) + 60 * len(names))
        )
        self._ids: Kept[Int32 | None] = Kept(KEPT_BYTES, lambda ids: 100 if ids is None else 100 + ids.nbytes)

    @classmethod
    def from_options(cls, options: MonitorOptions, vocabulary: Vocabulary) -> MonitorRule:
        """See the base class; they run in a process of their own."""
        process = Process(lambda: (f"{__name__}:prepare", [list(_all(options).values())]))

        root = None if options.root is None else str(_folder(options.root))

        def ask(where: str, code: str, file: str | None) -> Sequence[str]:
            try:
                names: Sequence[str] = process.call(
                    f"{__name__}:call", [where, code, root, file], options.analysis_seconds
                )
            except TimeoutError:
                raise TimeoutError(
                    f"a monitor took more than {options.analysis_seconds:g} s, which is analysis_seconds of the "
                    "server's rule; give it less code"
                ) from None
            return names

        monitors = {name: functools.partial(ask, where) for name, where in _all(options).items()}
        return cls(monitors, vocabulary, process, FRESH_SECONDS if root else None)

    @classmethod
    def check(cls, options: MonitorOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See the base class; imports the monitors."""
        for name, where in _all(options).items():
            load_function(f"monitors.{name}", where)
        if "python" not in options.monitors:
            try:
                python_monitor.find_jedi()
            except ImportError as error:
                raise ValueError(
                    f"monitors: the monitor 'python' needs jedi ({error}): pip install 'vllm-ext[monitor]'; or name "
                    "one of your own 'python'"
                ) from None
        if options.root is not None:
            _folder(options.root)

    @classmethod
    def problem(cls, options: MonitorOptions, params: MonitorParams, asked: Asked) -> str | None:
        if params.monitor not in _all(options):
            known = ", ".join(map(repr, _all(options)))
            return f"monitor={quoted(params.monitor)} is not allowed; allowed: {known}"
        if (file := params.monitor_file) is not None:
            if options.root is None:
                return (
                    f"monitor_file={quoted(file)}: this server knows no repository; start it with root in the options "
                    "of rule 'monitor', or leave monitor_file out"
                )
            if file.startswith("/") or ".." in PurePosixPath(file).parts or "\0" in file:
                return (
                    f"monitor_file={quoted(file)} is not allowed; allowed: a path below the server's root, such as "
                    "'package/module.py'"
                )
        if asked.structured:
            return "monitor does not go with structured_outputs (response_format): leave one of them out"
        return None

    def warm_up(self) -> None:
        _ = self._by_text
        if self._apart is not None:  # it starts, and imports what most code needs
            self._names.get(digest("warm up"), lambda: self._ask("python", "import os\nos.", None), 0.0)

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        self.waiting = waiting = []
        patience = self.patience
        for place, row in enumerate(rows):
            try:
                ids = self._allowed(row, patience)
            except _NotYet:
                waiting.append(place)
                patience = 0.0
                continue
            if ids is not None:
                index = torch.from_numpy(ids).long().to(logits.device)
                if bool((logits[place, index] == -torch.inf).all()):
                    continue  # something else, such as allowed_token_ids, has forbidden all of them
                keep_tokens(logits, [place], [ids])

    def _allowed(self, row: Row, patience: float | None = None) -> Int32 | None:
        """What may follow; None where anything may.

        Raises:
            _NotYet: it is not known in time.
        """
        # Looked at first: most rows stand behind no dot, and all text need not be put together for them.
        tail = self._text(row.output[-TAIL:])
        if len(row.output) < TAIL:
            context = row.params.monitor_context
            tail = (self._text(row.prompt[-TAIL:]) if context is None else context[-TAIL:]) + tail
        if row.end in row.output or not SITE.search(tail):
            return None
        code = self._code(row)
        site = SITE.search(code) if code else None
        if code is None or site is None:
            return None
        before, typed = code[: site.start(1)], site[1]
        file, age = (
            row.params.monitor_file,
            "" if self._fresh is None else str(time.monotonic() // self._fresh),
        )
        key = digest(row.params.monitor, before, file or "", age)
        names = self._names.get(key, lambda: self._ask(row.params.monitor, before, file), patience)
        if names is None:
            raise _NotYet
        ids = self._ids.of(digest(key, typed), lambda: self._tokens(names, typed))
        if ids is None:
            return None
        return np.append(ids, np.int32(row.end)) if typed in names else ids

    def _code(self, row: Row) -> str | None:
        """The code that a row stands behind; None in prose. A fence in the output begins again, behind the context."""
        output, before = self._text(row.output), row.params.monitor_context
        code = open_code(output, row.params.monitor)
        if code is None:
            return None
        if before is None and "```" not in output and self._is_conversation(row.prompt):
            return None
        if before is None:
            before = "" if "```" in output else open_code(self._text(row.prompt), row.params.monitor) or ""
        return f"{before}{code}"

    def _is_conversation(self, prompt: Sequence[int]) -> bool:
        """Whether a special token stands behind text: what has no fence there is prose, which "a list." may end."""
        special = False
        for token in reversed(prompt):
            if special and self._vocabulary.pieces[token]:
                return True
            special |= not self._vocabulary.pieces[token]
        return False

    def _text(self, tokens: Sequence[int]) -> str:
        return text_of(self._vocabulary, tokens).decode(errors="replace")

    def _ask(self, monitor: str, code: str, file: str | None) -> frozenset[str]:
        """Names behind the dot that some code ends with."""
        return frozenset(name for name in self._monitors[monitor](code, file) if name)

    def _tokens(self, names: frozenset[str], typed: str) -> Int32 | None:
        """Tokens that go on with a name of which some is there; None where there is no such name."""
        left = {name[len(typed) :] for name in names if name.startswith(typed)}
        if not left:
            return None
        begun, ended = self._by_text
        beginnings = {rest[:length] for rest in left for length in range(1, len(rest) + 1)}
        ids = [begun[text] for text in beginnings if text in begun]
        ids += [ended[rest] for rest in left if rest in ended]
        found: Int32 = np.sort(np.concatenate(ids)) if ids else np.empty(0, dtype=np.int32)
        # A name whose characters no token has: nothing can be said.
        return found if len(found) else None

    @functools.cached_property
    def _by_text(self) -> tuple[dict[str, Int32], dict[str, Int32]]:
        """Tokens that are part of a name, by their text; others, by what of it stands before a name's end."""
        begun: dict[str, list[int]] = {}
        ended: dict[str, list[int]] = {}
        for token, piece in enumerate(self._vocabulary.pieces):
            # What is no whole character can only begin behind a name; what has no text comes nowhere.
            text = piece.decode(errors="replace")
            head = HEAD.match(text)[0]  # type: ignore[index]  # it matches everything
            if text:
                (begun if head == text else ended).setdefault(head, []).append(token)
        as_arrays = [
            {text: np.array(ids, dtype=np.int32) for text, ids in which.items()} for which in (begun, ended)
        ]
        return as_arrays[0], as_arrays[1]


def prepare(monitors: list[str]) -> None:
    """In the monitors' process: import them, and what most code needs, which is to count as no analysis."""
    for where in monitors:
        load_function("monitors", where)
    if PYTHON in monitors:
        call(PYTHON, "import os\nos.", None, None)


def call(where: str, code: str, root: str | None, file: str | None) -> list[str]:
    """In the monitors' process: what one of them says."""
    monitor = load_function("monitors", where)
    known = {"root": root, "file": file}
    try:
        wanted = set(inspect.signature(monitor).parameters)
    except ValueError:  # one that is not written in Python
        wanted = set()
    return [str(name) for name in monitor(code, **{name: known[name] for name in known if name in wanted})]


def _folder(root: str) -> Path:
    """A repository's.

    Raises:
        ValueError: it is none.
    """
    try:
        folder = Path(root).expanduser().absolute()
        if folder.is_dir():
            return folder
    except (RuntimeError, ValueError, OSError):
        pass
    raise ValueError(f"root={quoted(root)} is no folder; name that of the repository, or leave root out")


def _all(options: MonitorOptions) -> dict[str, str]:
    return {"python": PYTHON, **options.monitors}


def open_code(text: str, monitor: str) -> str | None:
    """What stands in the last fence (```) of a text if that is open; all of a text without fences; else None.

    None too where the fence names a language that is neither Python nor the monitor's name.
    """
    before, fence, code = text.rpartition("```")
    if not fence:
        return text
    language, _, code = code.partition("\n")
    wanted = not language.strip() or language.split()[0].lower() in {
        "python",
        "py",
        "python3",
        monitor.lower(),
    }
    return code if wanted and not before.count("```") % 2 else None
