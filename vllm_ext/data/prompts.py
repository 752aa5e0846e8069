# SPDX-License-Identifier: Apache-2.0
"""The prompts of ``vllm-ext bench``: reading, selecting, dealing out to rounds. No vLLM in here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

# Batches' worth of prompts in a turn. A shared machine's speed drifts by a third within ten minutes; a turn takes half
# a minute where that happens, and beginning one about a second.
TURN_BATCHES = 4
WORKLOADS = ("fresh", "repeat")
PROMPT_FIELDS = ("messages", "turns", "question", "prompt")

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    source: str  # file:line
    category: str
    messages: list[dict[str, Any]]  # OpenAI chat


def load_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """The prompts of the JSON-lines files, in order; of ``FILE:N`` at most ``N`` of each of its categories.

    Raises:
        ValueError: an unreadable file or a line without a prompt, as file:line.
    """
    prompts = []
    for given in paths:
        path, per_category = _split_number(given)
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts={path} cannot be read ({error}); correct the path.") from None
        of_file = [
            _prompt(line, f"{path}:{number}", path.stem)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        members: dict[str, list[int]] = {}
        for place, prompt in enumerate(of_file):
            members.setdefault(prompt.category, []).append(place)
        kept = sorted(place for places in members.values() for place in evenly_spaced(places, per_category))
        prompts += [of_file[place] for place in kept]
    if not prompts:
        raise ValueError("--prompts: the files hold no prompt; give at least one JSON line.")
    return prompts


def _split_number(given: Path) -> tuple[Path, int | None]:
    """``FILE:N`` taken apart, unless a file has that very name."""
    name, colon, number = str(given).rpartition(":")
    if not colon or not number.isdigit() or given.exists():
        return given, None
    if int(number) == 0:
        raise ValueError(f"--prompts={given}: 0 prompts of each category; give at least 1.")
    return Path(name), int(number)


def _prompt(line: str, source: str, default_category: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not JSON ({error}); give one JSON object a line.") from None
    fields = [name for name in PROMPT_FIELDS if name in entry] if isinstance(entry, dict) else []
    if not fields:
        raise ValueError(f"{source}: no prompt; allowed: an object with one of {', '.join(PROMPT_FIELDS)}.")
    field = fields[0]
    value = entry[field]
    if field == "turns" and isinstance(value, list) and value:
        value = value[0]  # a second turn would depend on the method's own first answer
    if field == "messages":
        valid = isinstance(value, list) and bool(value)
        valid = valid and all(isinstance(message, dict) and "role" in message for message in value)
    else:
        valid = isinstance(value, str) and bool(value.strip())
    if not valid:
        raise ValueError(
            f"{source}: {field}={value!r} is not a prompt; allowed: a text, for `turns` a list of "
            "texts, for `messages` a list of chat messages."
        )
    messages = value if field == "messages" else [{"role": "user", "content": value}]
    return Prompt(source, str(entry.get("category", default_category)), messages)


def evenly_spaced(items: Sequence[T], limit: int | None) -> list[T]:
    """At most ``limit`` items, spread over all: prompt files are often sorted by category."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


def rounds_of(num_prompts: int, num_rounds: int, workload: str) -> list[list[int]]:
    """The prompt indices of each round: disjoint for ``fresh``, all each time for ``repeat``.

    Raises:
        ValueError: an unknown workload, or a round without a prompt.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"--workload={workload!r} is not allowed; allowed: {', '.join(WORKLOADS)}")
    if workload == "repeat":
        return [list(range(num_prompts)) for _ in range(num_rounds)]
    if num_prompts < num_rounds:
        raise ValueError(
            f"--rounds={num_rounds} is not allowed with {num_prompts} prompts; allowed: at most "
            "one round a prompt. Lower --rounds, or give more prompts."
        )
    return [list(range(first, num_prompts, num_rounds)) for first in range(num_rounds)]


def turns_of(members: Sequence[int], batch_size: int) -> list[Sequence[int]]:
    """A round's prompts in parts: what a method answers before it is the next one's turn. The last may be larger."""
    size = TURN_BATCHES * batch_size
    count = max(len(members) // size, 1)
    return [members[part * size : (part + 1) * size if part + 1 < count else None] for part in range(count)]
