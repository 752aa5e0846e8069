# SPDX-License-Identifier: Apache-2.0
"""From lists of allowed answers to the file of a trie."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.data import model_files
from vllm_ext.data.atomic_files import Progress, now
from vllm_ext.data.documents import InputError, json_fields
from vllm_ext.kernels import trie
from vllm_ext.kernels.trie import NO_TOKEN, Int32
from vllm_ext.samplers import trie_file
from vllm_ext.samplers.trie_file import Header

BATCH = 1 << 14  # sequences tokenized at once, by all cores
MOST_BYTES = 8 << 30  # of the padded sequences, which are sorted in memory


@dataclass
class Read:
    """What became of the inputs."""

    num_sequences: int = 0
    num_empty: int = 0


def build(
    inputs: Sequence[Path], output: Path, tokenizer: str, field: str, prefix: str, report: Progress
) -> tuple[Header, trie.Trie, Read]:
    """Write a file for rule ``trie``.

    Args:
        inputs: .txt, an answer a line; .jsonl, an answer a record, a string or token ids; .npy, int ``[num_sequences,
            longest]`` of token ids, -1 behind the end of shorter ones.
        output: the file; replaced at the end.
        tokenizer: a model's folder or Hugging Face id.
        field: of .jsonl records.
        prefix: text before each answer that is a string.
        report: of progress.

    Raises:
        ValueError: an input cannot be read as asked for, or holds an id that the tokenizer does not know.
    """
    loaded = model_files.load_tokenizer(tokenizer)
    vocab_size = model_files.vocab_size(loaded)
    read = Read()
    parts: list[tuple[Int32, Int32]] = []  # token ids one behind another, and lengths
    for path in inputs:
        if not path.is_file():
            raise InputError(f"INPUT={str(path)!r} is no file; name .txt, .jsonl and .npy files")
        parts += _read(path, field, prefix, loaded, vocab_size, read, report)
    if not read.num_sequences:
        raise InputError("the inputs hold no answer; name files that do")
    header, made = _make(parts, tokenizer, model_files.vocabulary_hash(loaded), vocab_size, report)
    trie_file.write(output, made, header)
    return header, made, read


def _make(
    parts: list[tuple[Int32, Int32]], tokenizer: str, tokenizer_hash: str, vocab_size: int, report: Progress
) -> tuple[Header, trie.Trie]:
    ids = np.concatenate([part[0] for part in parts])
    lengths = np.concatenate([part[1] for part in parts])
    longest = int(lengths.max())
    if 4 * longest * len(lengths) > MOST_BYTES:
        raise InputError(
            f"{len(lengths):,} answers, the longest of {longest:,} tokens, would take "
            f"{4 * longest * len(lengths) / 1e9:.0f} GB; leave out the longest"
        )
    report("sorting", 0, 1)
    sequences = np.full((len(lengths), longest), NO_TOKEN, dtype=np.int32)
    sequences[np.arange(longest) < lengths[:, None]] = ids
    made = trie.build(sequences)
    report("sorting", 1, 1)
    header = Header(
        created=now(),
        tokenizer=tokenizer,
        tokenizer_hash=tokenizer_hash,
        vocab_size=vocab_size,
        num_sequences=int(made.final.sum()),
        longest=longest,
    )
    return header, made


def _read(
    path: Path, field: str, prefix: str, tokenizer: Any, vocab_size: int, read: Read, report: Progress
) -> Iterator[tuple[Int32, Int32]]:
    if path.suffix.lower() == ".npy":
        yield _matrix(path, vocab_size, read)
        return
    answers = _records(path, field) if path.suffix.lower() == ".jsonl" else _lines(path)
    size, done = path.stat().st_size, 0
    while batch := list(itertools.islice(answers, BATCH)):
        done += sum(num_bytes for _, _, num_bytes in batch)
        texts = [prefix + answer for answer, _, _ in batch if isinstance(answer, str) and answer]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        rows: list[list[int]] = []
        for answer, where, _ in batch:
            if not answer:
                read.num_empty += 1
            elif isinstance(answer, str):
                rows.append(next(encoded).ids)
            else:
                rows.append(_ids(answer, where, vocab_size))
        read.num_sequences += len(rows)
        report(f"tokenizing {path.name}", done, size)
        if rows:
            lengths = np.array([len(row) for row in rows], dtype=np.int32)
            yield np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


# Each answer, where it stands, and the bytes that were read for it.
_Answers = Iterator[tuple[Any, str, int]]


def _lines(path: Path) -> _Answers:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"), where, len(line)
            except UnicodeDecodeError as error:
                raise InputError(f"{where}: not UTF-8 text ({error.reason}); convert the file") from None


def _records(path: Path, field: str) -> _Answers:
    for where, given, num_bytes in json_fields(path, field):
        if not isinstance(given, str | list):
            raise InputError(
                f"{where}: field {field!r} holds {given!r:.80}; a string or a list of token ids is needed"
            )
        yield given, where, num_bytes


def _ids(answer: list[Any], where: str, vocab_size: int) -> list[int]:
    for token in answer:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InputError(f"{where}: {token!r:.80} is no token id; allowed: 0 to {vocab_size - 1}")
    return answer


def _matrix(path: Path, vocab_size: int, read: Read) -> tuple[Int32, Int32]:
    try:
        rows = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise InputError(f"{path}: no .npy file of numbers ({error})") from None
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise InputError(
            f"{path}: holds {rows.dtype} {list(rows.shape)}; integers [num_sequences, longest] are needed"
        )
    wrong = (rows >= vocab_size) | (rows < NO_TOKEN)
    if wrong.any():
        row = int(wrong.any(1).argmax())
        raise InputError(
            f"{path}: row {row} holds {rows[row][wrong[row]][0]}, no token id; allowed: 0 to {vocab_size - 1}"
        )
    there = rows != NO_TOKEN
    lengths = there.sum(1)
    behind = (there[:, 1:] & ~there[:, :-1]).any(1)
    if behind.any():
        raise InputError(
            f"{path}: row {int(behind.argmax())} goes on behind its end; -1 may stand at the end only"
        )
    read.num_empty += int((lengths == 0).sum())
    read.num_sequences += int((lengths > 0).sum())
    return rows[there].astype(np.int32), lengths[lengths > 0].astype(np.int32)
