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
        """See the base class."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """See the base class."""
        return "interpreter"

    def parse_options(self, options: Any) -> Any:
        """See the base class."""
        raise NotImplementedError(NOTHING)

    def add_stages(self, stages: Any, options: Any, language: Any) -> None:
        """See the base class."""
        raise NotImplementedError(NOTHING)

    def load_dialects(self, context: Any) -> None:
        """See the base class."""
        raise NotImplementedError(NOTHING)

    def get_module_map(self) -> dict[str, Any]:
        """See the base class."""
        return {}
