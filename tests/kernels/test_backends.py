# SPDX-License-Identifier: Apache-2.0
"""What the kernels have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from vllm_ext.kernels import backends


@pytest.mark.parametrize("compiler", [numba.njit, lambda **options: numba.cfunc("int64(int64)", **options)])
def test_code_is_compiled_where_nothing_can_be_cached(compiler: Any) -> None:
    asked: list[bool] = []

    def no_locator(*, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiler()

    def increment(number: int) -> int:
        return number + 1

    compiled = backends.compile_cached(no_locator)(increment)
    assert getattr(compiled, "ctypes", compiled)(41) == 42
    assert asked == [True, False]


KERNEL = """
import logging
from numba import int64, cfunc, njit
from vllm_ext.kernels.backends import compile_cached

@compile_cached(njit)
def lazy(number):
    return number + 1

@compile_cached(cfunc, "int64(int64)")
def eager(number):
    return number + 2
"""


@pytest.mark.parametrize(
    "damage",
    [
        "truncated code",
        "full disk",
        pytest.param("truncated index", marks=pytest.mark.slow),
        pytest.param("empty", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_cache_and_a_full_disk_cost_time_alone(tmp_path: Path, damage: str) -> None:
    (tmp_path / "damaged.py").write_text(KERNEL)
    script = "import damaged; print(damaged.lazy(41), damaged.eager.ctypes(40))"

    def run(before: str = "") -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
        return subprocess.run(
            [sys.executable, "-c", before + script],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )

    full = (
        "import numba.core.caching as c, errno\n"
        "def full(self, *a): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "c.IndexDataCacheFile._save_data = full\n"
    )
    if damage == "full disk":
        found = run(full)
        assert "No space left on device" in found.stderr
    else:
        assert run().stderr == ""
        suffix = "*.nbi" if damage == "truncated index" else "*.nbc"
        files = list((tmp_path / "cache").rglob(suffix))
        assert len(files) == 2
        for file in files:
            file.write_bytes(b"" if damage == "empty" else file.read_bytes()[: file.stat().st_size // 2])
        found = run()
        assert found.stderr.count("vllm-ext: numba's compiled code") == 2
        assert "remove the folder" in found.stderr
    assert (found.returncode, found.stdout) == (0, "42 42\n"), found.stderr
    if damage != "truncated code":
        return
    run()  # writes again what has a signature
    again = run()
    assert (again.returncode, again.stdout, again.stderr) == (0, "42 42\n", "")


def test_the_form_is_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, meta = torch.empty(1), torch.empty(1, device="meta")
    assert [backends.choose("auto", tensor) for tensor in (cpu, meta)] == ["numba", "torch"]
    with pytest.raises(ValueError, match=r"backend='numba' takes CPU tensors, not meta; .*'auto'"):
        backends.choose("numba", meta)
    with pytest.raises(ValueError, match=r"backend='triton' takes CUDA tensors, not cpu; .*TRITON_INTERPRET"):
        backends.choose("triton", cpu)
    with pytest.raises(ValueError, match=r"backend='cuda' must be 'auto', 'torch'"):
        backends.choose("cuda", cpu)  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.choose("triton", cpu) == "triton"
