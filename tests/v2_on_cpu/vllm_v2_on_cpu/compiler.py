# SPDX-License-Identifier: Apache-2.0
"""What Triton asks of a backend, as far as the interpreter needs one."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

NOTHING = "there is nothing to compile for a CPU: set TRITON_INTERPRET=1"


class CPUBackend(BaseBackend):  # type: ignore[misc]  # Triton is untyped to us
    """Compiles nothing."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: Any) -> Any:
        raise NotImplementedError(NOTHING)

    def add_stages(self, stages: Any, options: Any, language: Any) -> None:
        raise NotImplementedError(NOTHING)

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError(NOTHING)

    def get_module_map(self) -> dict[str, Any]:
        return {}
