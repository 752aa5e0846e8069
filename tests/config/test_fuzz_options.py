# SPDX-License-Identifier: Apache-2.0
"""A quick share of scripts/fuzz_options.py: bad parameters and configurations are all refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")


@pytest.mark.usefixtures("model_dir")  # the script unpacks it too
def test_a_share_of_the_fuzz(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import fuzz_options
    from bad_options import Bad

    failed = fuzz_options.main(["--requests", "100", "--configs", "40", "--seed", "5"])
    out = capsys.readouterr().out
    assert not failed, out
    assert "140 tried with seed 5, 0 failures" in out
    # It can tell.
    bad = Bad("trie", "special", {})
    assert fuzz_options.problem_of(bad, None) == "was accepted"
    assert fuzz_options.problem_of(bad, "tri") == "the field is not named"
    assert fuzz_options.problem_of(bad, "trie: Traceback (most recent call last)") == "there is a traceback"
    assert fuzz_options.problem_of(bad, "trie" * 10_000) == "the message has 40000 characters"
    assert fuzz_options.problem_of(bad, "trie is not allowed") is None
