# SPDX-License-Identifier: Apache-2.0
"""What doctor says of GPUs that are not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.doctor import cuda as doctor_cuda
from vllm_ext.doctor.check import Check
from vllm_ext.doctor.cuda import Facts, Gpu

HOPPER = Gpu("NVIDIA H200", (9, 0), 139.8, 132)
BLACKWELL = Gpu("NVIDIA B200", (10, 0), 178.4, 148)


def facts(**changed: Any) -> Facts:
    usual: dict[str, Any] = {
        "gpus": [HOPPER],
        "backend": "FLASH_ATTN",
        "reasons": {},
        "runner": "V2",
        "batch_invariant": False,
    }
    return Facts(**usual | changed)


def report(found: Facts, **options: Any) -> dict[str, Check]:
    lines = list(doctor_cuda.checks(found, **options))
    assert len({line.what for line in lines}) == len(lines)
    return {line.what: line for line in lines}


def test_gpus_as_torch_tells_them() -> None:
    properties = [
        SimpleNamespace(name=name, major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)
        for name in ("A", "A", "B")
    ]
    cuda = SimpleNamespace(device_count=lambda: 3, get_device_properties=lambda index: properties[index])
    assert doctor_cuda.gpus_of(cuda) == [Gpu(name, (9, 0), 80.0, 132) for name in "AAB"]


class Platform:
    """vLLM's of CUDA: what it takes, and what it does not, each with its place in the order."""

    def __init__(self, valid: dict[str, int], invalid: dict[str, tuple[int, list[str]]]) -> None:
        self._valid, self._invalid = valid, invalid

    def get_valid_backends(self, capability: Any, config: Any) -> Any:
        valid = [
            SimpleNamespace(backend=SimpleNamespace(name=name), priority=priority)
            for name, priority in self._valid.items()
        ]
        return valid, {Member(name): why for name, why in self._invalid.items()}


class Member(str):
    """An enum's member."""

    @property
    def name(self) -> str:
        return str(self)


def test_the_backend_is_the_first_that_vllm_takes() -> None:
    platform = Platform(
        {"TRITON_ATTN": 2, "FLASH_ATTN": 1}, {"FLASHINFER": (0, ["not installed"]), "FLEX": (3, ["slow"])}
    )
    assert doctor_cuda.backend_of(platform, None, None) == ("FLASH_ATTN", {"FLASHINFER": "not installed"})
    nothing = Platform({}, {"FLASHINFER": (0, ["a", "b"])})
    assert doctor_cuda.backend_of(nothing, None, None) == (None, {"FLASHINFER": "a; b"})


def test_a_machine_where_all_is_well() -> None:
    lines = report(facts(gpus=[HOPPER, HOPPER]), nodes=15, most_rows=512)
    assert {line.status for line in lines.values()} == {"ok"}
    assert lines["GPU"].found == "2 x NVIDIA H200, compute capability 9.0, 140 GiB, 132 multiprocessors"
    assert lines["attention"].found == "FLASH_ATTN, for heads of 128 elements in bfloat16"
    assert lines["trees"].found == "trees, with FLASH_ATTN, on the V2 runner"
    assert lines["CUDA graphs"].found == (
        "whole decode steps of up to 1 row x 512 requests, 4 rows x 128 requests, 8 rows x 64 requests, "
        "16 rows x 32 requests (15 nodes, 512 rows at most)"
    )
    assert all(line.short for line in lines.values())


@pytest.mark.parametrize(
    ("changed", "what", "found", "way_out"),
    [
        (
            {"gpus": [BLACKWELL], "backend": "FLASHINFER"},
            "trees",
            "chains: FLASHINFER has no tree attention",
            "pass --attention-backend FLASH_ATTN or TRITON_ATTN",
        ),
        ({"batch_invariant": True}, "trees", "chains: VLLM_BATCH_INVARIANT=1", "unset VLLM_BATCH_INVARIANT"),
        ({"gpus": [HOPPER._replace(capability=(7, 5))]}, "GPU", "compute capability 7.5", "--dtype float16"),
        ({"gpus": []}, "GPU", "none is visible", "nvidia-smi"),
        (
            {"backend": None, "reasons": {"FLASH_ATTN": "broken"}},
            "attention",
            "no backend (not FLASH_ATTN: broken)",
            "report",
        ),
    ],
)
def test_what_is_not_well_has_a_way_out(
    changed: dict[str, Any], what: str, found: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = report(facts(**changed))[what]
    assert line.status in ("warn", "fail")
    assert found in line.found
    assert way_out in line.way_out


@pytest.mark.parametrize(
    ("changed", "graphs"),
    [
        ({"runner": "V1"}, "of all but attention (PIECEWISE)"),
        ({"runner": "V1", "backend": "FLASHINFER"}, "as vLLM captures them"),
        ({"backend": "FLASHINFER"}, "as vLLM captures them"),
    ],
)
def test_which_graphs_are_captured(changed: dict[str, Any], graphs: str) -> None:
    assert graphs in report(facts(**changed))["CUDA graphs"].found
