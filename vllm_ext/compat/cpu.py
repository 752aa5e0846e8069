# SPDX-License-Identifier: Apache-2.0
"""What a CPU cannot do in hardware, and what that costs."""

from __future__ import annotations

import platform

EMULATED = (
    "this CPU has no AVX-512: bfloat16 products are emulated, and rows of drafts cost nearly what plain steps do "
    "(docs/tuning.md has the figures)"
)
WAY_OUT = "--dtype float32 decodes faster here, and prompts are read several times as fast"


def emulates_bfloat16() -> bool:
    """Whether products of bfloat16 matrices are slow here: on x86 without AVX-512, by what PyTorch has found."""
    import torch

    return (
        platform.machine() in ("x86_64", "AMD64") and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    )
