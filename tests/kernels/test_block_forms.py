# SPDX-License-Identifier: Apache-2.0
"""How numba's code on disk is told apart: by what a kernel calls."""

from __future__ import annotations

import shutil
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.caching import FunctionCache

from vllm_ext.kernels import block_forms_numba, encoded_attention_numba, merge_spans_numba
from vllm_ext.kernels.block_forms_numba import form_of, sources

CALLED = "encoded_passes_numba", "vllm_ext.kernels.gear_numba"


def test_a_hash_is_of_all_that_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources(*CALLED)
    assert before != sources("encoded_passes_numba", "kivi_numba")
    for file in block_forms_numba.FOLDER.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(block_forms_numba, "FOLDER", tmp_path)
    assert sources(*CALLED) == before
    for name, counts in {
        "gear_numba": True,  # named
        "codes_numba": True,  # imported by it
        "retrieval_numba": True,  # imported by the passes
        "numba_vectors": True,  # imported by all of them
        "kivi_numba": False,
        "trie_numba": False,
    }.items():
        file = tmp_path / f"{name}.py"
        text = file.read_text()
        file.write_text(text + "# changed\n")
        assert (sources(*CALLED) != before) == counts, name
        file.write_text(text)


def test_a_kernels_key_has_the_hash_and_the_codec() -> None:
    codegen = numba.core.registry.cpu_target.target_context.codegen()

    def keys(codec: str, called: str) -> list[object]:
        form = form_of(codec)
        made = [
            *encoded_attention_numba._passes(form, np.float32, called),
            merge_spans_numba._merges(form, called),
        ]
        return [FunctionCache(each)._index_key(numba.types.void(), codegen) for each in made]

    assert keys("kivi", "a") == keys("kivi", "a")
    for others in (keys("kivi", "b"), keys("gear", "a")):
        assert all(one != other for one, other in zip(keys("kivi", "a"), others, strict=True))


def test_a_codec_without_kernels_is_named() -> None:
    with pytest.raises(ValueError, match="codec 'none' has no numba kernels; use backend='torch'"):
        form_of("none")
    with pytest.raises(ValueError, match=r"kivi_numba has no kernel that merges; use backend='torch'"):
        merge_spans_numba._compiled(form_of("kivi"))
