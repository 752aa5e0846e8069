# SPDX-License-Identifier: Apache-2.0
"""How the bench's methods and batch sizes are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.bench.settings import own_state, parse_batch_sizes, parse_methods, short_labels


def test_plain_is_added_first_and_has_no_config() -> None:
    plain, ngram = parse_methods("ngram")
    assert (plain.name, plain.label, plain.speculative_config) == ("plain", "plain", None)
    assert ngram.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


def test_plain_stays_where_it_is_put() -> None:
    assert [method.name for method in parse_methods("token_recycling, plain")] == [
        "token_recycling",
        "plain",
    ]


def test_options_in_brackets() -> None:
    text = 'plain, a(num-speculative-tokens=3, path=/x/y, flag = true, ids=[1, 2], text="b,c"),b()'
    _, a, b = parse_methods(text)
    assert a.options == {
        "num_speculative_tokens": 3,
        "path": "/x/y",
        "flag": True,
        "ids": [1, 2],
        "text": "b,c",
    }
    assert a.label == "a(num_speculative_tokens=3, path=/x/y, flag=true, ids=[1, 2], text=b,c)"
    assert (b.label, b.options) == ("b", {"num_speculative_tokens": 5})


def test_json_files(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    one.write_text('{"method": "ngram", "prompt_lookup_max": 3}')
    many.write_text('[{"method": "a"}, {"method": "a", "x": 1}]')
    labels = [method.label for method in parse_methods(f"plain,{one},{many}")]
    assert labels == ["plain", "ngram(prompt_lookup_max=3)", "a", "a(x=1)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram,ngram", "ngram is given more than once"),
        ("plain,plain", "plain is given more than once"),
        ("ngram(5)", "is not a method"),
        ("ngram(a=1", "is not a method"),
        ("a b", "is not a method"),
        ("plain(a=1)", "plain takes no options"),
        ("a(method=b)", "remove 'method'"),
        ("missing.json", "cannot be read"),
    ],
)
def test_methods_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_methods(text)


@pytest.mark.parametrize("content", ["3", '[{"name": "ngram"}]', '{"method": 1}'])
def test_method_files_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"m\.json holds"):
        parse_methods(str(file))


def test_batch_sizes() -> None:
    assert parse_batch_sizes("1, 4") == [1, 4]


@pytest.mark.parametrize("text", ["", "0", "1,1", "1,,2", "a", "-1", "1.5"])
def test_batch_sizes_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--batch-size="):
        parse_batch_sizes(text)


def test_short_labels_are_names_and_never_cut() -> None:
    labels = [
        "plain",
        "hybrid(budget=fixed, nodes=16)",
        "ngram(a=1)",
        "rest(drafters=none, x=1)",
        "rest(drafters=none, x=2)",
    ]
    assert list(short_labels(labels).values()) == ["plain", "hybrid", "ngram(a=1)", "rest 1", "rest 2"]


def test_a_state_takes_in_nothing_of_a_bench(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "learnt").write_text("before")
    (method,) = parse_methods(f"hybrid(state_dir={folder})")[1:]
    with own_state(method) as own:
        (copied,) = Path(own.options["state_dir"]).iterdir()
        assert copied.read_text() == "before"
        copied.write_text("after")
        assert (own.name, own.label) == (method.name, method.label)
    assert not copied.parent.exists()
    assert (folder / "learnt").read_text() == "before"
    (cold,) = parse_methods(f"hybrid(state_dir={tmp_path / 'none'})")[1:]
    with own_state(cold) as own:
        assert not list(Path(own.options["state_dir"]).iterdir())
    with own_state(parse_methods("plain")[0]) as plain:
        assert plain.speculative_config is None
