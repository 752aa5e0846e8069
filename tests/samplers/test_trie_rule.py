# SPDX-License-Identifier: Apache-2.0
"""Rule trie: rows and constraints beside dictionaries; its file; what requests may ask for."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ASKED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from vllm_ext.kernels import trie, trie_ref
from vllm_ext.kernels.trie import NO_TOKEN, Trie
from vllm_ext.samplers import trie as trie_rule
from vllm_ext.samplers import trie_file
from vllm_ext.samplers.base import Row
from vllm_ext.samplers.trie import TrieConstraint, TrieOptions, TrieParams, TrieRule
from vllm_ext.samplers.trie_file import Header

VOCAB, END = 70, 63  # the end's bit is its word's sign
SEQUENCES = st.lists(st.lists(st.sampled_from([0, 1, 2, 31, 32, 69]), min_size=1, max_size=5), min_size=1)
HEADER = Header(
    created="now", tokenizer="toy", tokenizer_hash="abc", vocab_size=VOCAB, num_sequences=2, longest=3
)


def build(sequences: Sequence[Sequence[int]]) -> Trie:
    longest = max(map(len, sequences))
    rows = [[*sequence, *[NO_TOKEN] * (longest - len(sequence))] for sequence in sequences]
    return trie.build(np.array(rows, dtype=np.int32))


def prefixes_of(sequences: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return sorted({tuple(sequence[:n]) for sequence in sequences for n in range(len(sequence) + 1)})


@pytest.mark.parametrize("wide", [0, 2, 512])
@given(SEQUENCES, SEQUENCES)
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the first call compiles
def test_rows_keep_what_the_set_allows(
    monkeypatch: pytest.MonkeyPatch, wide: int, one: list[list[int]], two: list[list[int]]
) -> None:
    monkeypatch.setattr(trie_rule, "WIDE", wide)
    rule = TrieRule({"one": build(one), "two": build(two)}, VOCAB)
    rows, expected = [], []
    for name, sequences in (("one", one), ("two", two)):
        reference = trie_ref.build(sequences)
        for prefix in prefixes_of(sequences):
            rows.append(Row([5], prefix, END, TrieParams(trie=name), ASKED))
            expected.append(trie_ref.allowed(reference, prefix, END))
    before = torch.randn(len(rows) + 2, VOCAB)
    # Behind the end anything goes; behind what never was allowed, only the end.
    rows += [
        Row([5], [*one[0], END, 7], END, TrieParams(trie="one"), ASKED),
        Row([5], [50], END, TrieParams(trie="two"), ASKED),
    ]
    expected += [set(range(VOCAB)), {END}]
    after = before.clone()
    rule.apply(after, rows)
    for left, right, allowed in zip(before, after, expected, strict=True):
        assert set(torch.isfinite(right).nonzero().flatten().tolist()) == allowed
        assert (left[list(allowed)] == right[list(allowed)]).all()


@given(SEQUENCES)
@settings(deadline=None, max_examples=50)
def test_constraints_go_down_and_back(sequences: list[list[int]]) -> None:
    made, reference = build(sequences), trie_ref.build(sequences)
    for prefix in prefixes_of(sequences):
        constraint = TrieConstraint(made, prefix, END)
        allowed = trie_ref.allowed(reference, prefix, END)
        for token in range(VOCAB):
            assert constraint.accept(token) == (token in allowed)
            if token in allowed:
                constraint.rollback(1)
        forced = constraint.forced(3)
        path = list(prefix)
        for token in forced:
            assert trie_ref.allowed(reference, path, END) == {token}
            path.append(token)
        if len(forced) < 3 and (not path or path[-1] != END):
            assert len(trie_ref.allowed(reference, path, END)) > 1
    constraint = TrieConstraint(made, [], END)
    for token in (*sequences[0], END):
        assert constraint.accept(token)
    assert not constraint.accept(END)
    constraint.rollback(len(sequences[0]) + 1)
    assert constraint.accept(sequences[0][0])
    assert TrieConstraint(made, [*sequences[0], END], END).forced(3) == []


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    made = build([[1, 2, 3], [1, 2], [69]])
    file = tmp_path / "sets" / "toy.trie"
    for _ in range(2):  # the second time it replaces the first
        trie_file.write(file, made, HEADER)
    found, header = trie_file.open_trie(file)
    assert header == HEADER
    for left, right in zip(made, found, strict=True):
        assert left.dtype == right.dtype
        assert left.tolist() == right.tolist()
    assert [path.name for path in file.parent.iterdir()] == ["toy.trie"]
    trie_file.check("files.toy", str(file), VOCAB, lambda: "abc")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "toy.trie"

    def refused(**changes: Any) -> str:
        arguments = {"vocab_size": VOCAB, "tokenizer_hash": lambda: "abc", **changes}
        with pytest.raises(ValueError) as error:
            TrieRule.check(TrieOptions(files={"toy": str(file)}), **arguments)
        return str(error.value)

    assert "files.toy=" in refused()
    assert "cannot be read (No such file" in refused()
    for content in (b"", b"x" * 7, b"words", (3).to_bytes(8, "little") + b"no!", b"\xff" * 40):
        file.write_bytes(content)
        assert "is no file of a trie; make it again with `vllm-ext trie build`" in refused(), content
    made = build([[1, 2, 3], [1, 2], [69]])
    trie_file.write(file, made, HEADER)
    assert "made with another tokenizer (toy)" in refused(tokenizer_hash=lambda: "other")
    assert "has ids up to 69, the model up to 63" in refused(vocab_size=64)
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    assert "is not whole" in refused()
    file.write_bytes(b"")
    os.unlink(file)
    os.mkfifo(file)
    assert "something else than a file" in refused()
    os.unlink(file)
    for field, value in (("tokens", VOCAB), ("tokens", -2), ("first_edge", 90)):
        damaged = made._asdict()
        damaged[field] = damaged[field].copy()
        damaged[field][1] = value
        trie_file.write(file, Trie(**damaged), HEADER)
        assert "is damaged" in refused(), (field, value)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_bit_and_no_truncation_goes_unseen(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "toy.trie"
    made = build([[1, 2, 3], [1, 2, 4], [69], [5, 6]])
    if not (tmp_path / "whole.trie").exists():
        trie_file.write(tmp_path / "whole.trie", made, HEADER)
    content = bytearray((tmp_path / "whole.trie").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    first, last = data.draw(st.sampled_from([(0, 8), (8, header), (header, len(content))]))
    at = data.draw(st.integers(first, last - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    file.write_bytes(content)
    try:
        found, found_header = trie_file.verify(file)
    except ValueError:
        return
    # White space may change in a header that still says the same.
    assert first == 8
    assert found_header == HEADER
    assert all((left == right).all() for left, right in zip(made, found, strict=True))


def test_files_of_the_first_format_load_and_cannot_be_mistaken(tmp_path: Path) -> None:
    file = tmp_path / "toy.trie"
    made = build([[1, 2, 3], [69]])

    def save(**metadata: str) -> None:
        save_file(made._asdict(), file, {"header": HEADER.model_dump_json(), **metadata})

    save(format="vllm-ext trie 1")
    trie_file.check("files.toy", str(file), VOCAB, lambda: "abc")
    for metadata in (
        {"format": "vllm-ext trie 2"},
        {"format": "vllm-ext trie 1", "checksum": "0" * 64},
        {"format": "vllm-ext trie 3", "checksum": "0" * 64},
    ):
        save(**metadata)
        with pytest.raises(ValueError, match="is no file of a trie"):
            trie_file.open_trie(file)
    save(format="vllm-ext trie 2", checksum="0" * 64)
    with pytest.raises(ValueError, match="is damaged: its checksum does not fit; make it again"):
        trie_file.verify(file)


JUNK: list[Any] = [None, True, 3, -1, 2.5, "x", [], {}, [[]], {"a": []}, 10**30, "\udc80"]


@pytest.mark.parametrize(
    "place", ["all", "__metadata__", "tokens", "header", "shape", "data_offsets", "dtype", "deep"]
)
def test_headers_of_any_type_are_refused_by_name(tmp_path: Path, place: str) -> None:
    file = tmp_path / "toy.trie"
    trie_file.write(file, build([[1, 2, 3], [69]]), HEADER)
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:end])
    for junk in JUNK:
        changed: Any = copy.deepcopy(entries)
        if place == "all":
            changed = junk
        elif place in changed:
            changed[place] = junk
        elif place == "header":
            changed["__metadata__"]["header"] = junk if isinstance(junk, str) else json.dumps(junk)
        elif place != "deep":
            changed["tokens"][place] = junk
        text = b"[" * 100_000 + b"]" * 100_000 if place == "deep" else json.dumps(changed).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
        with pytest.raises(ValueError, match=r"(is no file of a trie|is not whole); make it again"):
            trie_file.verify(file)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("other", {}, "trie='other' is not allowed; allowed: 'toy', 'more'"),
        ("toy", {"structured": True}, "does not go with structured_outputs (response_format)"),
        (
            "toy",
            {"ignores_end": True, "min_tokens": 3},
            "not go with ignore_eos=True nor min_tokens=3: the set says",
        ),
        ("toy", {"lists_tokens": True}, "allowed_token_ids or bad_words"),
    ],
)
def test_requests_that_contradict_themselves(name: str, changes: dict[str, Any], says: str) -> None:
    options = TrieOptions(files={"toy": "a", "more": "b"})
    asked = replace(ASKED, **changes)
    problem = TrieRule.problem(options, TrieParams(trie=name), asked)
    assert problem is not None
    assert says in problem
    assert TrieRule.problem(options, TrieParams(trie="toy"), ASKED) is None
