# SPDX-License-Identifier: Apache-2.0
"""Building, verifying and replacing datastores, on files and a tokenizer made here."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from vllm_ext.cli.main import app
from vllm_ext.data import atomic_files, datastore_build, datastore_merge, model_files
from vllm_ext.data import documents as datastore_input
from vllm_ext.data.documents import InputError, find_files, read_pieces
from vllm_ext.kernels import suffix_array_ref as ref
from vllm_ext.kernels.ngram_table import contents
from vllm_ext.proposers import datastore
from vllm_ext.proposers.aded import Aded, AdedOptions
from vllm_ext.proposers.base import Request, Sampling
from vllm_ext.proposers.datastore import Datastore, DatastoreError
from vllm_ext.proposers.hybrid import Hybrid, HybridOptions
from vllm_ext.proposers.rest import Rest, RestOptions

WORDS = [f"w{i}" for i in range(10)]


def save_tokenizer(folder: Path, words: Sequence[str]) -> str:
    """A model's folder whose tokens are words; the last id is the unknown word's."""
    folder.mkdir()
    ids = {word: i for i, word in enumerate([*words, "?"])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("models") / "words", WORDS)


def say(ids: Sequence[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def write(path: Path, texts: Sequence[Sequence[int]]) -> Path:
    path.write_text("".join(json.dumps({"text": say(ids)}) + "\n" for ids in texts))
    return path


def build(folder: Path, model: str | None, *inputs: Path, field: str = "text", append: bool = False) -> Any:
    return datastore_build.build(inputs, folder, model, field, append, lambda *_: None)


def documents(folder: Path) -> list[list[int]]:
    """All documents in the order of the files."""
    found: list[list[int]] = []
    store = Datastore.open(folder)
    for segment in store.segments:
        tokens = segment.tokens.tolist()
        assert tokens[0] == tokens[-1] == store.header.separator
        document: list[int] = []
        for token in tokens:
            if token != store.header.separator:
                document.append(token)
            elif document:
                found.append(document)
                document = []
    return found


def check_sorted(folder: Path) -> None:
    """Each segment's positions, all of them, in the order that is promised."""
    store = Datastore.open(folder)
    for segment in store.segments:
        tokens, separator = segment.tokens.tolist(), store.header.separator
        assert sorted(segment.suffixes.tolist()) == list(range(len(tokens)))
        keys = [ref.sort_key_ref(tokens, separator, at) for at in segment.suffixes.tolist()]
        assert keys == sorted(keys)


def drafts(folder: Path) -> dict[tuple[int, int], Any]:
    """The trees below all pairs of words, from every occurrence."""
    proposer = Rest(Datastore.open(folder), min_match=1, max_occurrences=4096)
    sampling = Sampling(0.0, 1.0, 0, 0.0, None)
    trees = {}
    for a in range(len(WORDS)):
        for b in range(len(WORDS)):
            [tree] = proposer.propose([Request("", np.array([a, b], np.int32), 2, 30, 30, sampling)])
            trees[a, b] = (tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist())
    return trees


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=8)


@given(texts)
@settings(deadline=None, max_examples=50)
def test_a_store_holds_each_document_sorted(corpus: list[list[int]]) -> None:
    folder, model = _scratch(), _shared_model()
    header, _ = build(folder / "store", model, write(folder / "in.jsonl", corpus))
    assert documents(folder / "store") == corpus
    assert header.num_documents == len(corpus)
    check_sorted(folder / "store")
    assert datastore.verify(folder / "store") == header
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datastore_build, "PART_TOKENS", 5)  # up to three segments
        header, _ = build(folder / "store", model, folder / "in.jsonl")
    assert list(chain(*documents(folder / "store"))) == list(chain(*corpus))  # a long document may be cut
    check_sorted(folder / "store")
    assert datastore.verify(folder / "store") == header


_folders: Iterator[Path]
_model: str


@pytest.fixture(autouse=True, scope="session")
def _for_hypothesis(tmp_path_factory: pytest.TempPathFactory, model: str) -> None:
    global _folders, _model
    _folders = (tmp_path_factory.mktemp("store") for _ in iter(int, 1))
    _model = model


def _scratch() -> Path:
    return next(_folders)


def _shared_model() -> str:
    return _model


@given(texts, texts, texts)
@settings(deadline=None, max_examples=25)
def test_appended_and_merged_stores_draft_as_one_built_at_once(
    first: list[list[int]], second: list[list[int]], third: list[list[int]]
) -> None:
    folder, model = _scratch(), _shared_model()
    files = [write(folder / f"{i}.jsonl", part) for i, part in enumerate((first, second, third))]
    build(folder / "whole", model, *files)
    build(folder / "parts", model, files[0])
    for file in files[1:]:
        build(folder / "parts", None, file, append=True)
    appended = Datastore.open(folder / "parts")  # stays usable when its files are replaced
    assert len(appended.segments) == 3
    expected = drafts(folder / "whole")
    assert drafts(folder / "parts") == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_files, "CHUNK", 7)
        header = datastore_merge.merge(folder / "parts", lambda *_: None)
    assert len(header.segments) == 1
    assert datastore.verify(folder / "parts") == header
    check_sorted(folder / "parts")
    assert documents(folder / "parts") == [*first, *second, *third]
    assert header.num_documents == len(first) + len(second) + len(third)
    assert drafts(folder / "parts") == expected
    assert sum(len(segment.tokens) for segment in appended.segments) == header.num_tokens
    assert len(list((folder / "parts").iterdir())) == 4  # header, lock and two files


def test_segments_are_merged_as_far_as_positions_reach(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "in.jsonl", [[1, 2, 3]])  # five tokens with separators
    build(tmp_path / "store", model, file)
    for _ in range(4):
        build(tmp_path / "store", model, file, append=True)
    monkeypatch.setattr(datastore, "MAX_SEGMENT_TOKENS", 12)
    header = datastore_merge.merge(tmp_path / "store", lambda *_: None)
    assert [segment.num_tokens for segment in header.segments] == [10, 10, 5]
    assert documents(tmp_path / "store") == [[1, 2, 3]] * 5


@pytest.mark.parametrize("num_words", [254, 255, 65534, 65535, 70000])
def test_any_vocabulary(tmp_path: Path, num_words: int) -> None:
    """Tokens of one, two and three bytes, up to those whose separator just fits."""
    model = save_tokenizer(tmp_path / "model", [f"w{i}" for i in range(num_words)])
    rng = np.random.default_rng(0)
    corpus = [
        rng.choice([0, 1, 255, 256, 257, num_words - 1], 50).clip(0, num_words - 1).tolist() for _ in range(4)
    ]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(f"w{i}" for i in ids)}) + "\n" for ids in corpus)
    )
    header, _ = build(tmp_path / "store", model, tmp_path / "in.jsonl")
    assert header.vocab_size == num_words + 1
    assert header.dtype == (np.uint16 if num_words < 65535 else np.int32)
    assert documents(tmp_path / "store") == corpus
    check_sorted(tmp_path / "store")


def test_long_documents_are_cut_where_they_must(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces for the tokenizer, which leaves them whole, and into segments, which does not."""
    monkeypatch.setattr(datastore_input, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(datastore_input, "READ_CHARACTERS", 50)
    monkeypatch.setattr(datastore_build, "BATCH_CHARACTERS", 100)
    long = np.random.default_rng(0).integers(0, 10, 600).tolist()
    text = "\n".join(say(long[i : i + 10]) for i in range(0, 600, 10))
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    (tmp_path / "b.txt").write_text(text)
    build(tmp_path / "store", model, tmp_path / "a.txt", tmp_path / "b.txt")
    assert documents(tmp_path / "store") == [[1, 2, 3], long]
    monkeypatch.setattr(datastore_build, "PART_TOKENS", 100)
    header, _ = build(tmp_path / "store", model, tmp_path / "b.txt")
    assert len(header.segments) == 3
    assert [token for part in documents(tmp_path / "store") for token in part] == long
    check_sorted(tmp_path / "store")


def test_a_line_longer_than_a_piece_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datastore_input, "PIECE_CHARACTERS", 10)
    for content in ("x" * 35, "ab\n" * 9, "x" * 9 + "\n" + "y" * 30, "\n" * 25, ""):
        (tmp_path / "f.txt").write_text(content)
        sources = find_files([tmp_path / "f.txt"])
        pieces = list(read_pieces(sources, [], "text"))
        assert "".join(piece.text for piece in pieces) == content
        assert all(len(piece.text) <= 10 for piece in pieces)
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert sum(piece.num_bytes for piece in pieces) == len(content)


def test_truncation_and_padding_of_a_models_tokenizer_are_off(tmp_path: Path, model: str) -> None:
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    corpus = [[1, 2], [1, 2, 3, 4, 5]]
    build(tmp_path / "store", str(tmp_path / "model"), write(tmp_path / "in.jsonl", corpus))
    assert documents(tmp_path / "store") == corpus


# Inputs


def test_code_folders(tmp_path: Path, model: str) -> None:
    code = tmp_path / "code"
    (code / "sub" / "deep").mkdir(parents=True)
    (code / ".git").mkdir()
    (code / "a.py").write_text("w1 w2")
    (code / "sub" / "README.md").write_bytes(b"\xef\xbb\xbfw3 w4")  # with a byte order mark
    (code / "sub" / "deep" / "no_suffix").write_text("w5 w6")
    (code / "empty.txt").write_text("")
    (code / ".git" / "config").write_text("w9 w9")
    (code / ".hidden").write_text("w9 w9")
    (code / "image.png").write_bytes(b"\x89PNG\x00\x00")
    (code / "latin1.txt").write_bytes("w9 é".encode("latin-1"))
    (code / "sub" / "deep" / "up").symlink_to(code)  # a loop
    (code / "sub" / "again.py").symlink_to(code / "a.py")
    (code / "outside").symlink_to(write(tmp_path / "outside.jsonl", [[7, 8]]))
    (code / "dangling").symlink_to(tmp_path / "nowhere")
    _, sources = build(tmp_path / "store", model, code)
    # A link's name decides how a file is read: `outside` is text, and its words are none of the tokenizer's.
    assert documents(tmp_path / "store") == [[1, 2], [10] * 3, [3, 4], [5, 6]]
    assert sources.skipped == [f"{code / 'dangling'}: No such file or directory"]
    assert sources.num_binary == 2


def test_what_cannot_be_read_is_named(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datastore_input, "READ_CHARACTERS", 8192)
    (tmp_path / "torn.txt").write_bytes(b"w1 w2 w3\n" * 5000 + b"\xff\xfe" + b" w4" * 9000)
    (tmp_path / "binary.txt").write_bytes(b"w1\x00w2")
    (tmp_path / "secret.txt").write_text("w5 w6")
    (tmp_path / "good.txt").write_text("w7 w8")
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:  # the tests may run as root
        if path.name == "secret.txt":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    names = [tmp_path / f"{name}.txt" for name in ("torn", "binary", "secret", "good")]
    _, sources = build(tmp_path / "store", model, *names)
    torn, good = documents(tmp_path / "store")
    assert torn[:6] == [1, 2, 3] * 2
    assert good == [7, 8]
    assert [line.partition(": ")[0] for line in sources.skipped] == [str(name) for name in names[:3]]
    assert "the rest of it is left out, as it is not UTF-8" in sources.skipped[0]
    assert "byte 2 is zero" in sources.skipped[1]
    assert "Permission denied" in sources.skipped[2]


def test_json_lines(tmp_path: Path, model: str) -> None:
    records = [
        {"body": "w1 w2", "text": "w9"},
        {"body": ["w3", "w4 w5"]},
        {"body": ""},
        {"body": None},
        {"body": "w6 \ud800"},  # half a surrogate pair: JSON can say it, UTF-8 cannot
    ]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    build(tmp_path / "store", model, tmp_path / "in.jsonl", field="body")
    assert documents(tmp_path / "store") == [[1, 2], [3], [4, 5], [6, 10]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"body": "w1"}', r"in.jsonl:2: there is no field 'text'; its fields: body. Use --field"),
        ("[1]", r"in.jsonl:2: there is no field 'text'.*it is no object"),
        ('{"text": ', r"in.jsonl:2: no JSON"),
        ("[" * 100_000, r"in.jsonl:2: no JSON \(maximum recursion depth"),
        ('{"text": 5}', r"in.jsonl:2: field 'text' holds 5; a string or a list of strings"),
        ('{"text": [["w1"]]}', r"in.jsonl:2: field 'text' holds \['w1'\]"),
    ],
)
def test_records_that_do_not_fit_are_named_and_leave_the_old_store(
    tmp_path: Path, model: str, line: str, says: str
) -> None:
    build(tmp_path / "store", model, write(tmp_path / "old.jsonl", [[1, 2]]))
    files = sorted((tmp_path / "store").iterdir())
    (tmp_path / "in.jsonl").write_text('{"text": "w1"}\n' + line)
    with pytest.raises(InputError, match=says):
        build(tmp_path / "store", model, tmp_path / "in.jsonl")
    assert documents(tmp_path / "store") == [[1, 2]]
    assert sorted((tmp_path / "store").iterdir()) == files


def test_records_that_do_not_fit_are_left_out_of_a_folder_and_named(tmp_path: Path, model: str) -> None:
    """A folder of source code holds all sorts of things."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text("w1 w2")
    (folder / "b.jsonl").write_text('{"text": "w3"}\n{"body": "w4"}\n{"text": "w5"}')
    (folder / "c.parquet").write_text("w6")
    (folder / "d.py").write_text("w7")
    (folder / "e.jsonl").write_text('{"text": ' + "[" * 100_000)
    _, sources = build(tmp_path / "store", model, folder)
    assert documents(tmp_path / "store") == [[1, 2], [3], [7]]
    record, table, deep = sources.skipped
    assert "e.jsonl:1: no JSON (maximum recursion depth" in deep
    assert "b.jsonl:2: there is no field 'text'" in record
    assert record.endswith("(the rest of the file is left out)")
    assert "c.parquet: no Parquet file" in table
    assert table.endswith("(the file is left out)")
    (folder / "a.py").unlink()
    (folder / "d.py").unlink()
    (folder / "e.jsonl").unlink()
    with pytest.raises(
        InputError, match=r"no text in it; nothing was built; left out: .*b.jsonl:1: there is no"
    ):
        build(tmp_path / "other", model, folder, field="turns")


def test_parquet(tmp_path: Path, model: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {"body": ["w1 w2", None, "w3"], "turns": [["w4", "w5 w6"], [], None], "n": [1, 2, 3]}
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    for field, expected in (("body", [[1, 2], [3]]), ("turns", [[4], [5, 6]])):
        build(tmp_path / "store", model, tmp_path / "in.parquet", field=field)
        assert documents(tmp_path / "store") == expected
    with pytest.raises(InputError, match=r"no column 'text'; its columns: body, turns, n. Use --field"):
        build(tmp_path / "store", model, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"row 0: field 'n' holds 1; a string"):
        build(tmp_path / "store", model, tmp_path / "in.parquet", field="n")
    (tmp_path / "in.parquet").write_text("w1")
    with pytest.raises(InputError, match="no Parquet file"):
        build(tmp_path / "store", model, tmp_path / "in.parquet")


@pytest.mark.parametrize("module", ["pydivsufsort", "pyarrow"])
def test_a_missing_library_names_the_extra(
    tmp_path: Path, model: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "in.parquet").write_text("")
    with pytest.raises(ValueError, match=rf"{module}: pip install 'vllm-ext\[datastore\]'"):
        build(tmp_path / "store", model, tmp_path / "in.parquet")


def test_inputs_that_make_no_store(tmp_path: Path, model: str) -> None:
    (tmp_path / "blank.txt").write_text(" \n ")
    with pytest.raises(InputError, match="there is no text in it; nothing was built"):
        build(tmp_path / "store", model, tmp_path / "blank.txt")
    with pytest.raises(InputError, match=r"INPUT='.*nowhere' does not exist"):
        build(tmp_path / "store", model, tmp_path / "nowhere")
    with pytest.raises(DatastoreError, match="there is no store"):
        datastore.read_header(tmp_path / "store")
    with pytest.raises(ValueError, match="--model is missing"):
        build(tmp_path / "store", None, tmp_path / "blank.txt")


# What is refused when a store is opened


@pytest.fixture
def store(tmp_path: Path, model: str) -> Path:
    build(tmp_path / "store", model, write(tmp_path / "in.jsonl", [[1, 2, 3, 4], [5, 6, 7]]))
    return tmp_path / "store"


def check(folder: Path, tokenizer: str, vocab_size: int = 11) -> None:
    """What a server does before it loads the model."""
    Rest.check(RestOptions(datastore=str(folder)), vocab_size, lambda: model_files.hash_of(tokenizer))


def test_aded_begins_with_a_store(store: Path, model: str, tmp_path: Path) -> None:
    options = AdedOptions(datastore=str(store), memory_mb=1)
    Aded.check(options, 11, lambda: model_files.hash_of(model))
    assert contents(Aded.from_options(options, 11).table).successors[:, 0].tolist() == [3, 4, 7]
    Aded.check(AdedOptions(), 11, lambda: pytest.fail("no store, no hash"))
    with pytest.raises(DatastoreError, match=r"the model only 10"):
        Aded.check(options, 10, lambda: model_files.hash_of(model))
    missing = AdedOptions(datastore=str(tmp_path / "nowhere"))
    for use in (Aded.from_options, lambda given, size: Aded.check(given, size, lambda: "")):
        with pytest.raises(DatastoreError, match=r"nowhere.*there is no store.*vllm-ext datastore build"):
            use(missing, 11)


def test_a_whole_store_passes(store: Path, model: str) -> None:
    check(store, model)
    check(store, model, vocab_size=99)  # models pad their vocabularies


@pytest.mark.parametrize("name", ["000001.tokens", "000001.suffixes", "header.json"])
@pytest.mark.parametrize("harm", ["flipped", "truncated", "longer", "missing", "empty"])
def test_damage_anywhere_is_refused_with_the_way_out(store: Path, model: str, name: str, harm: str) -> None:
    path = store / name
    content = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    else:
        if harm == "flipped":
            # In the header, a digit of the number of tokens.
            at = content.index(b'"num_tokens": ') + 14 if name == "header.json" else len(content) // 2
            content[at] ^= 1
        torn = {"truncated": bytes(content[:-1]), "longer": bytes(content) + b"x", "empty": b""}
        path.write_bytes(torn.get(harm, bytes(content)))
    if harm in ("truncated", "longer") and name == "header.json":
        path.write_bytes(
            content[:-9] if harm == "truncated" else content + b"}"
        )  # not only its last line's end
    says = rf"datastore='.*store': .*({name}|there is no store).*vllm-ext datastore build --model MODEL --output "
    with pytest.raises(DatastoreError, match=says):
        check(store, model)
    if harm != "flipped" or name == "header.json":  # a worker, which reads no checksums of files
        with pytest.raises(DatastoreError, match=says):
            Datastore.open(store)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", 2, r"its format has version 2, this vllm-ext reads version 1"),
        ("format", "other", r"header.json is not that of a datastore"),
        ("tokenizer", "x", r"header.json is damaged: its checksum"),
        ("segments", [], r"header.json is damaged: its checksum"),
    ],
)
def test_foreign_headers_are_refused(store: Path, model: str, key: str, value: Any, says: str) -> None:
    header = json.loads((store / "header.json").read_text())
    (store / "header.json").write_text(json.dumps({**header, key: value}))
    with pytest.raises(DatastoreError, match=says + r".*vllm-ext datastore build"):
        check(store, model)


def test_a_header_with_a_right_checksum_must_make_sense_too(store: Path) -> None:
    content = datastore.read_header(store).model_dump()
    updates: list[tuple[dict[str, Any], str]] = [
        ({"segments": []}, "segments"),
        ({"vocab_size": "11"}, "vocab_size"),
        ({"segments": [{**content["segments"][0], "name": "../x"}]}, r"segments\.0\.name"),
    ]
    for update, says in updates:
        changed = {**content, **update}
        text = json.dumps({**changed, "checksum": datastore._checksum(changed)})
        (store / "header.json").write_text(text)
        with pytest.raises(DatastoreError, match=f"damaged: {says}"):
            datastore.read_header(store)


@pytest.mark.parametrize(
    ("name", "number", "says"),
    [
        ("tokens", 12, r"000001.tokens has numbers from \d+ to 12; allowed: 0 to 11"),
        ("suffixes", 10, r"000001.suffixes has numbers from 0 to 10; allowed: 0 to 9"),
        ("suffixes", -1, r"000001.suffixes has numbers from -1 to 9; allowed: 0 to 9"),
    ],
)
def test_numbers_out_of_range_are_refused_whatever_the_checksums_say(
    store: Path, model: str, name: str, number: int, says: str
) -> None:
    path = store / f"000001.{name}"
    numbers = np.fromfile(path, np.uint16 if name == "tokens" else np.int32)
    numbers[4] = number
    numbers.tofile(path)
    content = datastore.read_header(store).model_dump()
    content["segments"][0][f"{name}_blake3"] = blake3(path.read_bytes()).hexdigest()
    (store / "header.json").write_text(json.dumps({**content, "checksum": datastore._checksum(content)}))
    with pytest.raises(DatastoreError, match=says + r".*vllm-ext datastore build"):
        check(store, model)


def test_a_header_that_is_no_file_or_too_deep_is_refused(store: Path, model: str) -> None:
    (store / "header.json").write_text("[" * 100_000)
    with pytest.raises(DatastoreError, match=r"header.json is damaged: it is no JSON"):
        check(store, model)
    (store / "header.json").unlink()
    os.mkfifo(store / "header.json")  # whoever opens it waits for a writer
    with pytest.raises(DatastoreError, match=r"header.json is no file of at most"):
        check(store, model)


def test_another_tokenizer_is_refused(store: Path, model: str, tmp_path: Path) -> None:
    other = save_tokenizer(tmp_path / "other", WORDS[::-1])
    hashes = model_files.hash_of(model)[:12], model_files.hash_of(other)[:12]
    says = rf"another tokenizer \('{model}', hash {hashes[0]}\) than this model's \(hash {hashes[1]}\).*build"
    with pytest.raises(DatastoreError, match=says):
        check(store, other)
    hybrid = HybridOptions(drafters=["token_recycling", {"method": "rest", "datastore": str(store)}])
    Hybrid.check(hybrid, 11, lambda: model_files.hash_of(model))
    with pytest.raises(DatastoreError, match=says):
        Hybrid.check(hybrid, 11, lambda: model_files.hash_of(other))
    with pytest.raises(DatastoreError, match=says):
        build(store, other, tmp_path / "in.jsonl", append=True)
    with pytest.raises(DatastoreError, match=r"token ids up to 10, the model only 10"):
        check(store, model, vocab_size=10)
    with pytest.raises(DatastoreError, match=r"token ids up to 10, the model only 10"):
        Rest.from_options(RestOptions(datastore=str(store)), 10)
    assert Rest.from_options(RestOptions(datastore=str(store)), 11).store.header.num_tokens == 10


def test_the_hash_is_that_of_ids_and_tokens(model: str, tmp_path: Path) -> None:
    longer = save_tokenizer(tmp_path / "longer", [*WORDS, "w10"])
    assert len({model_files.hash_of(name) for name in (model, longer)}) == 2
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    before = model_files.vocabulary_hash(tokenizer)
    assert before == model_files.vocabulary_hash(Tokenizer.from_file(f"{model}/tokenizer.json"))
    tokenizer.add_special_tokens(["<end>"])  # an id more
    assert model_files.vocabulary_hash(tokenizer) != before
    assert model_files.vocab_size(tokenizer) == len(WORDS) + 2


def test_a_model_without_tokenizer_json(model_dir: str, tmp_path: Path) -> None:
    """The same vocabulary in GPT-2's own files has the same hash: transformers makes it fast."""
    content = json.loads((Path(model_dir) / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_type": "gpt2"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert model_files.hash_of(str(tmp_path)) == model_files.hash_of(model_dir)
    with pytest.raises(ValueError, match=r"tokenizer='.*nowhere' cannot be loaded.*name a model's folder"):
        model_files.load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        model_files.load_tokenizer(str(tmp_path))


# Replacing a store

_KILLED = """
import os, signal, sys
from pathlib import Path
from vllm_ext.data import atomic_files, datastore_build, datastore_merge
kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
where, folder, model, source = sys.argv[1:]
if where == "merge":
    atomic_files.commit = kill
    datastore_merge.merge(Path(folder), lambda *_: None)
elif where == "replace":
    os.replace = kill
elif where == "sorting":
    datastore_build._suffix_sorter = lambda: kill
else:
    datastore_build._tokenise = kill
datastore_build.build([Path(source)], Path(folder), model, "text", where == "sorting", lambda *_: None)
"""


@pytest.mark.parametrize("where", ["tokenising", "sorting", "replace", "merge"])
def test_a_killed_build_leaves_the_old_store(store: Path, model: str, tmp_path: Path, where: str) -> None:
    build(store, model, write(tmp_path / "more.jsonl", [[8, 9, 8]]), append=True)
    before, old = drafts(store), datastore.read_header(store)
    source = write(tmp_path / "new.jsonl", [[3, 2, 1], [1, 2, 9]])
    command = [sys.executable, "-c", _KILLED, where, str(store), model, str(source)]
    assert subprocess.run(command, check=False).returncode == -9
    assert datastore.read_header(store) == old
    check(store, model)
    assert drafts(store) == before
    left = (
        {path.name for path in store.iterdir()}
        - {"header.json", "lock"}
        - {name for name, _, _ in old.files()}
    )
    assert left
    build(store, model, source)  # clears away what was left
    assert documents(store) == [[3, 2, 1], [1, 2, 9]]
    assert len(list(store.iterdir())) == 4


def test_an_error_in_mid_build_leaves_the_old_store(
    store: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(store.iterdir())

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datastore_build, "_suffix_sorter", lambda: full)
    with pytest.raises(OSError, match="No space left"):
        build(store, model, tmp_path / "in.jsonl")
    assert sorted(store.iterdir()) == files
    check(store, model)


def test_a_damaged_store_can_be_built_anew_but_not_added_to(store: Path, model: str, tmp_path: Path) -> None:
    (store / "000001.tokens").write_bytes(b"")
    with pytest.raises(DatastoreError, match=r"000001\.tokens is truncated"):
        datastore_merge.merge(store, lambda *_: None)
    (store / "header.json").write_text("{")
    with pytest.raises(DatastoreError, match="damaged"):
        build(store, model, tmp_path / "in.jsonl", append=True)
    build(store, model, tmp_path / "in.jsonl")
    check(store, model)
    assert len(list(store.iterdir())) == 4


def test_other_folders_and_other_writers_are_respected(store: Path, model: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with pytest.raises(DatastoreError, match=r"holds other files \('in.jsonl'\); name a new folder"):
        build(tmp_path, model, source)
    with pytest.raises(DatastoreError, match="is a file; name a folder"):
        build(source, model, source)
    with pytest.raises(DatastoreError, match="there is no store"):
        datastore_merge.merge(tmp_path / "nowhere", lambda *_: None)
    assert not (tmp_path / "nowhere").exists()
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for write_to in (lambda: build(store, model, source), lambda: datastore_merge.merge(store, print)):
            with pytest.raises(DatastoreError, match="being written to by another process; wait"):
                write_to()
    check(store, model)


def test_a_store_replaced_while_it_is_opened(
    store: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = datastore.read_header(store)
    build(store, model, write(tmp_path / "new.jsonl", [[9, 8]]))
    headers = iter([stale])
    read = datastore.read_header
    monkeypatch.setattr(datastore, "read_header", lambda folder: next(headers, None) or read(folder))
    assert Datastore.open(store).segments[0].tokens.tolist() == [11, 9, 8, 11]


def test_building_and_reading_need_neither_torch_nor_numba(store: Path, model: str, tmp_path: Path) -> None:
    """The first would cost the build's memory, the second vLLM's worker its start."""
    script = """
import sys
from pathlib import Path
from vllm_ext.data import datastore_build
from vllm_ext.proposers import datastore
folder, model, source = sys.argv[1:]
datastore_build.build([Path(source)], Path(folder), model, "text", False, lambda *_: None)
datastore.verify(Path(folder))
datastore.Datastore.open(folder)
assert not {"torch", "numba", "vllm", "transformers", "pyarrow"} & set(sys.modules)
from vllm_ext.kernels import suffix_array_numba
assert "torch" not in sys.modules  # nor does merging need torch
"""
    subprocess.run([sys.executable, "-c", script, str(store), model, str(tmp_path / "in.jsonl")], check=True)


def test_patterns_choose_files_of_folders(tmp_path: Path) -> None:
    for name in ("a.py", "b.md", "src/c.py", "src/deep/d.py", "src/tests/e.py", "tests/f.py", "named.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(**patterns: list[str]) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in find_files([tmp_path], **patterns).files]

    python = ["a.py", "src/c.py", "src/deep/d.py", "src/tests/e.py", "tests/f.py"]
    assert found(include=["*.py"]) == python
    assert found(include=["*.py"], exclude=["tests"]) == ["a.py", "src/c.py", "src/deep/d.py"]
    assert found(exclude=["src/*", "*.md", "tests"]) == ["a.py"]
    assert found(include=["b.*", "src/c.py"]) == ["b.md", "src/c.py"]
    # A file that is named itself counts.
    assert find_files([tmp_path / "named.md"], ["*.py"]).files == [tmp_path / "named.md"]
    with pytest.raises(InputError, match=r"--include=\['\*\.rs'\] and --exclude=\[\] leave no file of "):
        found(include=["*.rs"])


def test_the_field_is_looked_for_before_anything_is_read(tmp_path: Path, model: str) -> None:
    read: list[int] = []
    (tmp_path / "long.txt").write_text("words " * 1000)
    (tmp_path / "in.jsonl").write_text('{"body": "x"}\n')
    inputs = [tmp_path / "long.txt", tmp_path / "in.jsonl"]
    with pytest.raises(
        InputError, match=r"in\.jsonl:1: there is no field 'text'; its fields: body\. Use --field"
    ):
        datastore_build.build(
            inputs, tmp_path / "store", model, "text", False, lambda what, done, total: read.append(done)
        )
    assert not read
    assert not (tmp_path / "store").exists()


# The command line


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["datastore", *map(str, arguments)])


def test_commands(tmp_path: Path, model: str) -> None:
    store, source = tmp_path / "store", write(tmp_path / "in.jsonl", [[1, 2, 3], [4, 5]])
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "binary").write_bytes(b"\x00")
    (tmp_path / "code" / "dangling").symlink_to("nowhere")
    built = run("build", "--tokenizer", model, "--output", store, source, tmp_path / "code")
    assert built.exit_code == 0, built.output
    assert "2 documents, 8 tokens, 1 segment, 0.0 MB" in built.output
    assert f'--speculative-config \'{{"method": "rest", "datastore": "{store}"}}\'' in built.output
    assert "dangling: No such file" in built.output
    assert "left out: files that are no text: 1" in built.output
    assert run("build", "--append", "--output", store, source).exit_code == 0
    info = run("info", store, "--verify")
    assert "4 documents, 16 tokens, 2 segments" in info.output
    assert model_files.hash_of(model) in info.output
    assert "all checksums fit" in info.output
    assert "4 documents, 16 tokens, 1 segment" in run("merge", store).output
    tokens = next(store.glob("*.tokens"))
    tokens.write_bytes(tokens.read_bytes()[::-1])
    assert run("info", store).exit_code == 0
    damaged = run("info", store, "--verify")
    assert damaged.exit_code == 1
    assert f"{tokens.name} is damaged" in damaged.output
    refused = run("build", "--tokenizer", model, "--output", store, tmp_path / "nowhere")
    assert refused.exit_code == 2
    assert "does not exist" in refused.output


def test_the_server_refuses_a_store_before_it_loads_the_model(
    store: Path, model_dir: str, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    def start(folder: Path) -> Any:
        method = {"method": "rest", "datastore": str(folder)}
        args = EngineArgs(model=model_dir, dtype="float32", max_model_len=256, speculative_config=method)
        return args.create_engine_config()

    with pytest.raises(ValueError, match=r"datastore='.*store'.*another tokenizer.*vllm-ext datastore build"):
        start(store)
    (tmp_path / "in.txt").write_text("def add(a, b):\n    return a + b\n")
    build(tmp_path / "own", model_dir, tmp_path / "in.txt")
    assert start(tmp_path / "own").additional_config["vllm_ext"]["speculation"]["datastore"] == str(
        tmp_path / "own"
    )
    (tmp_path / "own" / "000001.suffixes").write_bytes(b"\x00")
    with pytest.raises(ValueError, match=r"000001.suffixes is truncated: it has 1 bytes"):
        start(tmp_path / "own")
