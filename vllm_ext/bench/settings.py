# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-ext bench`` compares: the settings, and methods and batch sizes as users write them."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PLAIN = "plain"
SHORT = 15  # characters of a label that tables take as it is
NUM_SPECULATIVE_TOKENS = 5
# Filled in when not given: vLLM's own ngram default, matches of exactly 5 tokens, rarely drafts.
DEFAULT_OPTIONS = {"ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2}}


@dataclass(frozen=True)
class Method:
    """One column of the comparison."""

    name: str
    options: dict[str, Any]  # defaults filled in
    label: str  # as the user wrote it, spaces normalised

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """What vLLM is given; None for plain."""
        return None if self.name == PLAIN else {"method": self.name, **self.options}


@contextmanager
def own_state(method: Method) -> Iterator[Method]:
    """The method with a copy of its ``state_dir`` that is thrown away.

    A state takes in what its engine answers: in the next batch size, or the next run, it would know the prompts.
    """
    given = method.options.get("state_dir")
    if not given:
        yield method
        return
    with tempfile.TemporaryDirectory(prefix="vllm-ext-state-", ignore_cleanup_errors=True) as folder:
        if Path(given).expanduser().is_dir():
            shutil.copytree(Path(given).expanduser(), folder, dirs_exist_ok=True)
        yield replace(method, options={**method.options, "state_dir": folder})


def parse_methods(text: str) -> list[Method]:
    """``plain,ngram(prompt_lookup_max=3),more.json`` -> methods; a missing plain is put first.

    Raises:
        ValueError: text that is not such a list, unreadable JSON, a label given twice.
    """
    methods: list[Method] = []
    for item in split_outside_brackets(text):
        methods.extend(_from_file(Path(item)) if item.endswith(".json") else [_from_text(item)])
    if all(method.name != PLAIN for method in methods):
        methods.insert(0, _method(PLAIN, {}))
    labels = [method.label for method in methods]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(
            f"--methods={text!r}: {', '.join(twice)} is given more than once; allowed: each method "
            "and option set once. Remove one, or give them different options."
        )
    return methods


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are in no bracket and no double quotes; strip; drop empty items."""
    items, start, depth, quoted = [], 0, 0, False
    for position, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "([{":
            depth += 1
        elif not quoted and character in ")]}":
            depth -= 1
        elif character == "," and depth == 0 and not quoted:
            items.append(text[start:position])
            start = position + 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """For narrow tables: a method's name, with a number where several have it; the whole label where that is short."""
    short: dict[str, str] = {}
    for label in labels:
        name = _name(label)
        alike = [other for other in labels if _name(other) == name]
        if len(label) <= SHORT or label == name:
            short[label] = label
        else:
            short[label] = name if len(alike) == 1 else f"{name} {alike.index(label) + 1}"
    return short


def _name(label: str) -> str:
    return re.split(r"[(,]", label)[0]  # methods of the KV cache have their options behind a comma


def _from_text(item: str) -> Method:
    match = re.fullmatch(r"(\w[\w.\-]*)\s*(?:\((.*)\))?", item, re.DOTALL)
    if match is None:
        raise _bad_method(item)
    options = {}
    for pair in split_outside_brackets(match[2] or ""):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise _bad_method(item)
        options[key.strip()] = _json_or_text(value.strip())
    return _method(match[1], options)


def _from_file(path: Path) -> list[Method]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"--methods: {path} cannot be read as JSON ({error}); correct the path or the file."
        ) from None
    entries = content if isinstance(content, list) else [content]
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("method"), str):
            raise ValueError(
                f"--methods: {path} holds {entry!r}; allowed: an object with a text `method` and "
                "its options, or a list of those."
            )
    return [_method(entry.pop("method"), entry) for entry in entries]


def _method(name: str, given: dict[str, Any]) -> Method:
    given = {key.replace("-", "_"): value for key, value in given.items()}
    pairs = ", ".join(f"{key}={_compact(value)}" for key, value in given.items())
    label = f"{name}({pairs})" if pairs else name
    if "method" in given:
        raise ValueError(f"--methods: {label}: remove 'method', the name before the brackets is it.")
    if name == PLAIN:
        if given:
            raise ValueError(f"--methods: {label}: plain takes no options; remove them.")
        return Method(name, {}, label)
    defaults = {"num_speculative_tokens": NUM_SPECULATIVE_TOKENS, **DEFAULT_OPTIONS.get(name, {})}
    return Method(name, {**defaults, **given}, label)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _bad_method(item: str) -> ValueError:
    return ValueError(
        f"--methods: {item!r} is not a method; allowed: NAME, NAME(key=value, ...) or a path "
        "ending in .json, separated by commas."
    )


def parse_batch_sizes(text: str) -> list[int]:
    """``1,4`` -> [1, 4].

    Raises:
        ValueError: anything but different positive integers.
    """
    items = [item.strip() for item in text.split(",")]
    sizes = [int(item) for item in items if item.isascii() and item.isdigit()]
    if len(sizes) != len(items) or 0 in sizes or len(set(sizes)) != len(sizes):
        raise ValueError(f"--batch-size={text!r} is not allowed; allowed: positive integers, each once: 1,4.")
    return sizes


@dataclass(frozen=True)
class Settings:
    """What to compare on what."""

    model: str
    prompt_files: tuple[Path, ...]
    methods: tuple[Method, ...]  # plain among them
    batch_sizes: tuple[int, ...] = (1,)
    limit: int | None = None  # prompts; None: all
    max_tokens: int = 128
    temperature: float = 0.0  # above 0 answers are drawn, without seeds, and not compared
    rounds: int = 3
    dtype: str = "auto"
    workload: str = "fresh"
    max_model_len: int = 2048
    kv_cache_memory_bytes: int | None = None  # of each engine; None: 1 GiB on a CPU, an equal share of a GPU
    compile: bool | None = None  # None: not on a CPU, where it takes minutes to start
    verbose: bool = False
