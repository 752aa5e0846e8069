# SPDX-License-Identifier: Apache-2.0
"""Grammars that somebody else in the process has compiled."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import xgrammar

from vllm_ext.samplers import shared_grammars
from vllm_ext.samplers.grammar import Grammars

END = 0


class Letters:
    """The end, and some letters."""

    pieces = (b"", b"a", b"b", b"c")
    size = 4

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(each.encode()) for each in text]


def compile_it(regex: str) -> Any:
    """As vLLM does: the tokenizer names the end."""
    info = xgrammar.TokenizerInfo(list(Letters.pieces), vocab_size=Letters.size, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1).compile_regex(regex)


def test_what_is_shared_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "_make", None)
    letters = Letters()
    compiled = compile_it("ab*")
    shared_grammars.share(letters, "regex", "ab*", compiled)
    grammars = Grammars(letters, seconds=1.0)
    found = grammars.get("regex", "ab*", END, 0.0)
    assert found is not None
    assert found is grammars.get("regex", "ab*", END, 0.0)
    behind = found.behind([1])
    assert behind is not None
    assert behind.ends()
    assert behind.allowed().tolist() == [END, 2]


def test_whose_and_how_long() -> None:
    """Of a vocabulary, a kind and a source; while somebody has it."""
    letters, compiled = Letters(), compile_it("a|b")
    shared_grammars.share(letters, "regex", "a|b", compiled)
    assert shared_grammars.find(letters, "regex", "a|b") is compiled
    assert shared_grammars.find(Letters(), "regex", "a|b") is None
    assert shared_grammars.find(letters, "grammar", "a|b") is None
    assert shared_grammars.find(letters, "regex", "a|c") is None
    del compiled
    gc.collect()
    assert shared_grammars.find(letters, "regex", "a|b") is None
