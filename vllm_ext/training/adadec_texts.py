# SPDX-License-Identifier: Apache-2.0
"""The texts that ``vllm-ext adadec learn`` reads: windows of files of code, and completions behind their prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ext.data.documents import InputError, Sources, find_files, json_lines, read_pieces

PROMPTS = ("prompt", "complete_prompt")  # fields of .jsonl records, the first that is there
COMPLETIONS = ("completion", "canonical_solution", "solution")
CHARACTERS_PER_TOKEN = 16  # a file's beginning of so many times as are wanted in all is enough
# In folders, unless others are asked for: programming languages by the endings of their files.
ENDINGS = (
    "py js jsx ts tsx java kt scala go rs c h cc cpp cxx hpp cs swift m "
    "rb php pl lua r jl sh sql hs ml ex exs erl clj dart zig f90 vb groovy"
)
CODE = tuple(f"*.{ending}" for ending in ENDINGS.split())


@dataclass(frozen=True)
class Text:
    """What one request reads."""

    tokens: list[int]
    counts_from: int  # of the first token that counts, behind another

    @property
    def count(self) -> int:
        """Of tokens that count."""
        return len(self.tokens) - self.counts_from


@dataclass
class Found:
    """The texts, and what was left out on the way."""

    texts: list[Text] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    num_binary: int = 0

    @property
    def count(self) -> int:
        """Of tokens that count."""
        return sum(text.count for text in self.texts)


class _Record(NamedTuple):
    prompt: str
    completion: str


def read_texts(
    inputs: Sequence[Path], include: Sequence[str], tokenizer: Any, most: int, context: int, seed: int
) -> Found:
    """As many texts as have so many tokens that count, the last cut to that.

    Files and records come in an order that the seed gives. A file gives one window, at a place that the seed gives,
    and others when all files have given one.

    Args:
        inputs: files of code, .jsonl files, and folders.
        include: patterns of the files in folders; none: `CODE`.
        tokenizer: of the library tokenizers.
        most: tokens that count.
        context: tokens of a text.
        seed: of orders and places.

    Raises:
        InputError: an input does not exist or is not of these kinds, a record has not what is needed, or nothing is
            left to read.
    """
    if wrong := [path for path in inputs if path.suffix.lower() == ".parquet"]:
        raise InputError(
            f"INPUT={str(wrong[0])!r} is not allowed; allowed: files of code, folders of them, and .jsonl files of "
            f"records with {_either(PROMPTS)} and {_either(COMPLETIONS)}"
        )
    sources = find_files(inputs, include or CODE)
    units: list[Path | _Record] = []
    for path in sources.files:
        units += _records(path) if path.suffix.lower() == ".jsonl" else [path]
    draw = random.Random(seed)
    draw.shuffle(units)
    found, rest = Found(skipped=sources.skipped), []
    left = most
    # What a model begins each text with.
    begin: list[int] = tokenizer.encode("", add_special_tokens=True).ids
    for unit in units:
        if left <= 0:
            break
        if isinstance(unit, _Record):
            texts = _behind_prompt(unit, begin, tokenizer, context)
        else:
            text = _text(unit, inputs, most * CHARACTERS_PER_TOKEN, found)
            texts = _windows(text, begin, tokenizer, context)
            draw.shuffle(texts)
        left -= _take(found.texts, texts[:1], left)
        rest += texts[1:]
    _take(found.texts, rest, left)
    if not found.texts:
        reasons = "; ".join(found.skipped[:3]) or "no file holds a token behind another"
        raise InputError(f"the inputs hold no code to read ({reasons}); name files that do")
    return found


def _take(into: list[Text], texts: Sequence[Text], most: int) -> int:
    """Add texts of at most so many tokens that count; returns how many they have."""
    left = most
    for text in texts:
        if left > 0:
            into.append(Text(text.tokens[: text.counts_from + left], text.counts_from))
            left -= into[-1].count
    return most - left


def _text(path: Path, inputs: Sequence[Path], characters: int, found: Found) -> str:
    """A file's beginning; what is no text is noted."""
    one = Sources([path], 0, found.skipped)
    parts: list[str] = []
    length = 0
    for piece in read_pieces(one, inputs, ""):
        parts.append(piece.text)
        length += len(piece.text)
        if length >= characters:
            break
    found.num_binary += one.num_binary
    return "".join(parts)


def _windows(text: str, begin: list[int], tokenizer: Any, context: int) -> list[Text]:
    """All of a file, in pieces of the context's size; one that is behind another and short is left out."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    size = context - len(begin)
    windows = [ids[at : at + size] for at in range(0, len(ids), size)]
    if len(windows) > 1 and len(windows[-1]) < size // 2:
        windows.pop()
    counts_from = max(len(begin), 1)
    return [Text([*begin, *each], counts_from) for each in windows if len(begin) + len(each) > counts_from]


def _behind_prompt(record: _Record, begin: list[int], tokenizer: Any, context: int) -> list[Text]:
    """One text, or none of a record without tokens; a prompt that is too long loses its beginning."""
    prompt, completion = (tokenizer.encode(part, add_special_tokens=False).ids for part in record)
    room = context - len(begin)
    prompt = prompt[len(prompt) - min(len(prompt), max(room - len(completion), room // 2)) :]
    before = [*begin, *prompt]
    tokens = [*before, *completion][:context]
    counts_from = max(len(before), 1)
    return [Text(tokens, counts_from)] if len(tokens) > counts_from else []


def _records(path: Path) -> Iterator[_Record]:
    for where, record, _ in json_lines(path):
        yield _Record(*(_field(record, names, where) for names in (PROMPTS, COMPLETIONS)))


def _field(record: Any, names: Sequence[str], where: str) -> str:
    named = [name for name in names if isinstance(record, dict) and name in record]
    if not named:
        fields = ", ".join(record) if isinstance(record, dict) else "none, it is no object"
        raise InputError(
            f"{where}: there is no field {_either(names)}; its fields: {fields}. Rename the one you mean"
        )
    value = record[named[0]]
    if not isinstance(value, str):
        raise InputError(
            f"{where}: field {named[0]!r} holds {value!r:.80}; allowed: text. Correct or remove the line"
        )
    # JSON can hold half a surrogate pair, which is no text.
    return value.encode("utf-8", "replace").decode()


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
