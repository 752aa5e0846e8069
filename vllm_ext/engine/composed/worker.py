# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker of this platform with parts of ours: ``worker_cls`` names the class, and with it the parts."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from vllm_ext.engine.composed import parts

_ENGINE = "vllm_ext.engine"
# The outermost first.
PARTS = {
    "Speculation": f"{_ENGINE}.v1.worker.Speculation",
    "Rules": f"{_ENGINE}.v1.worker.Rules",
    "EncodedCache": f"{_ENGINE}.v1.worker.EncodedCache",
    "V2Speculation": f"{_ENGINE}.v2.worker.Speculation",
    "V2Rules": f"{_ENGINE}.v2.worker.Rules",
    "V2KeptBlocks": f"{_ENGINE}.v2.worker.KeptBlocks",
    "Counts": f"{_ENGINE}.worker_part.Counts",
}


def path_of(asked: Collection[str]) -> str:
    """What to put in ``worker_cls``: of the runner's own parts, by name."""
    return f"{__name__}.{parts.name_of(PARTS, asked)}"


@functools.cache
def __getattr__(name: str) -> type[Any]:
    from vllm.platforms import current_platform

    of_platform = "cpu_worker.CPUWorker" if current_platform.is_cpu() else "gpu_worker.Worker"
    return parts.compose(PARTS, f"{__name__}.{name}", f"vllm.v1.worker.{of_platform}")
