# SPDX-License-Identifier: Apache-2.0
"""What Triton asks of a device, as far as the interpreter needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):  # type: ignore[misc]  # Triton is untyped to us
    """One device, which is always there."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_current_device(self) -> int:
        """The device's number."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError("the interpreter's time says nothing")
