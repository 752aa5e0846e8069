# SPDX-License-Identifier: Apache-2.0
"""This machine, what it can do at best, and how long a call takes on it."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

COPIED = {"cpu": 128 << 20, "cuda": 1 << 30}  # bytes: several times a last-level cache
MATRIX = {"cpu": 1024, "cuda": 8192}  # rows, columns and depth


def machine(device: str) -> dict[str, str]:
    """The hardware and the versions that matter."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if line.startswith("model name")
    ]
    found = {"cpu": f"{names[0] if names else platform.processor()}, 1 core"}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        found["cuda"] = str(torch.version.cuda)
    found["python"] = platform.python_version()
    installed = {distribution.name: distribution.version for distribution in metadata.distributions()}
    for package in ("torch", "triton", "numba", "numpy"):
        found[package] = installed.get(package, "not installed")
    return found


def busy() -> str | None:
    """What a CPU's times were taken beside, if anything."""
    others = os.getloadavg()[0]
    return f"load {others:.1f}: not measured alone" if others > 1.3 else None


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a plain copy."""
    source = torch.ones(COPIED[device] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED[device] / seconds(lambda: target.copy_(source), device)[1]


def matrix_rate(device: str) -> float:
    """Operations per second of a matrix product: bfloat16 on a GPU, float32 on a CPU, where ours widen."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = MATRIX[device]
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: left @ right, device)[1]


def seconds(call: Callable[[], object], device: str, rounds: int = 15) -> tuple[float, float, float]:
    """The fifth that is fastest, the median, and the fifth that is slowest: quantiles 0.2, 0.5 and 0.8.

    On a GPU by CUDA events, the second-level cache cleared before each call. On a CPU calls follow each other.
    """
    if device == "cuda":
        from triton.testing import do_bench

        low, middle, high = do_bench(call, quantiles=[0.2, 0.5, 0.8])
        return low / 1e3, middle / 1e3, high / 1e3
    call()
    started = time.perf_counter()
    call()
    repeats = max(1, min(1000, int(0.01 / max(time.perf_counter() - started, 1e-7))))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - started) / repeats)
    low, middle, high = (statistics.quantiles(times, n=10, method="inclusive")[i] for i in (1, 4, 7))
    return low, middle, high
