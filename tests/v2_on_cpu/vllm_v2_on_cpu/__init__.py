# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner on a CPU, for tests alone: its Triton kernels run in Triton's interpreter.

With this folder on PYTHONPATH and TRITON_INTERPRET=1 Triton finds a backend for the CPU, so vLLM finds Triton, and
chooses V2. The rest is what its kernels need besides to be right in the interpreter, and to take some milliseconds each
instead of twice as many. Our own kernels run there too, as they do on a GPU; with V2_FORMS=cpu they are numba's, as
they are on a CPU.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

_registered = False


def register() -> None:
    """vLLM calls it in every process, before it makes a configuration."""
    global _registered
    if _registered or os.environ.get("TRITON_INTERPRET") != "1":
        return
    _registered = True
    _patch_once()
    _let_masks_be_numbers()
    _widen_bfloat16()
    _give_functions()
    import vllm.v1.sample.ops.topk_topp_sampler as sampling

    sampling.HAS_TRITON = False  # its kernel has what the interpreter has not; vLLM has one in torch
    if os.environ.get("V2_FORMS") != "cpu":
        from vllm_ext.kernels import backends

        backends.V2 = "triton"


def _patch_once() -> None:
    """The interpreter puts its functions into Triton's language for each call, of device functions too, and takes them
    out again: half of its time. Here nothing is compiled, so they may stay."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    nothing, done = types.SimpleNamespace(restore=lambda: None), set()

    def patch_lang(function: Any) -> Any:
        modules = frozenset(
            value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core
        )
        if modules not in done:
            done.add(modules)
            patch(function)
        return nothing

    interpreter._patch_lang = patch_lang


def _let_masks_be_numbers() -> None:
    """Compiled code takes a mask of integers; the interpreter's loads and stores want booleans."""
    import numpy as np
    from triton.runtime import interpreter

    def boolean(mask: Any) -> Any:
        if mask is None or mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, where, mask, *rest: load(self, where, boolean(mask), *rest)
    builder.create_masked_store = lambda self, where, values, mask, *rest: store(
        self, where, values, boolean(mask), *rest
    )


def _widen_bfloat16() -> None:
    """The interpreter multiplies the bits of bfloat16 as if they were integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot
    builder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)


def _give_functions() -> None:
    """Functions of CUDA's library, which in the interpreter return nothing."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    triton_utils: Any = sys.modules["vllm.triton_utils"]

    def of(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            values = function(x.handle.data).astype(x.handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(values, x.handle.dtype), x.type)

        return call

    names = {"log1p": np.log1p, "expm1": np.expm1, "exp": np.exp, "exp2": np.exp2, "log2": np.log2}
    names |= {"tanh": np.tanh, "fast_expf": np.exp, "fast_logf": np.log}
    triton_utils.tldevice = types.SimpleNamespace(**{name: of(function) for name, function in names.items()})
    modules: list[Any] = list(sys.modules.values())
    for module in modules:
        if getattr(module, "__name__", "").startswith("vllm.v1.worker.gpu") and hasattr(module, "tldevice"):
            module.tldevice = triton_utils.tldevice
