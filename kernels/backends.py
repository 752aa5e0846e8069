# SPDX-License-Identifier: Apache-2.0
"""What the kernels' forms have in common: which one runs, and how numba's are compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch  # kernels that take no tensors run in processes without it

Backend = Literal["auto", "torch", "numba", "triton"]


def choose(backend: Backend, tensor: torch.Tensor) -> Backend:
    """The form to run on tensors like this one: "auto" is numba on the CPU, triton on CUDA, torch elsewhere.

    Raises:
        ValueError: there is no such form, or it does not run on the tensor's device.
    """
    device = tensor.device.type
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} must be 'auto', 'torch', 'numba' or 'triton'; leave it out")
    if backend == "auto":
        return {"cpu": "numba", "cuda": "triton"}.get(device, "torch")  # type: ignore[return-value]
    if backend == "numba" and device != "cpu":
        raise ValueError(f"backend='numba' takes CPU tensors, not {tensor.device}; use backend='auto'")
    if backend == "triton" and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend='triton' takes CUDA tensors, not {tensor.device}; use backend='auto', or set "
            "TRITON_INTERPRET=1 before triton is imported"
        )
    return backend


def compile_cached(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """numba's ``njit`` or ``cfunc`` as a decorator whose code is kept on disk where a folder is writable."""

    def decorate(function: Any) -> Any:
        try:
            return compiler(*arguments, cache=True, **options)(function)
        except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
            return compiler(*arguments, **options)(function)

    return decorate
