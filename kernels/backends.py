# SPDX-License-Identifier: Apache-2.0
"""What the kernels' forms have in common: which one runs, and how numba's are compiled."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch  # kernels that take no tensors run in processes without it

logger = logging.getLogger("vllm.vllm_ext")

Backend = Literal["auto", "torch", "numba", "triton"]

# Of the V2 runner's kernels. Its tests set "triton" before an engine is made: on CPU tensors, in Triton's interpreter.
V2: Backend = "auto"


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


def as_arrays(tensors: Any) -> Any:
    """A named tuple of CPU tensors as one of NumPy's views of them, for numba."""
    return tensors._make(tensor.numpy() for tensor in tensors)


def compile_cached(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """numba's ``njit`` or ``cfunc`` as a decorator whose code is kept on disk where that can be done.

    A folder that is not writable, a full disk and a file that cannot be read cost the time to compile again, no more;
    the latter two are logged, and the file is written again.
    """

    def decorate(function: Any) -> Any:
        try:
            compiled = compiler(*arguments, cache=True, **options)(function)
        except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
            return compiler(*arguments, **options)(function)
        except Exception as error:  # one with a signature is compiled here
            compiled = compiler(*arguments, **options)(function)
            _say(f"of {function.__qualname__}", error)
            _forget(function)
            return compiled
        if hasattr(compiled, "_cache"):
            compiled._cache = _ForgivingCache(compiled._cache)
        return compiled

    return decorate


class _ForgivingCache:
    """numba's cache of a function, in which no fault of a file or disk reaches whoever calls the function."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The code for a signature; None where there is none that can be read."""
        try:
            return self._cache.load_overload(signature, target_context)
        except Exception as error:
            _say(f"in {self._cache.cache_path}", error)
            with contextlib.suppress(OSError):
                self._cache.flush()  # else it stays as it is: it is read before it is written
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        """Keep the code for a signature, if there is room."""
        try:
            self._cache.save_overload(signature, data)
        except Exception as error:
            _say(f"in {self._cache.cache_path}", error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _forget(function: Any) -> None:
    """Empty the list of what is kept of a function: the next start writes it again."""
    from numba.core.caching import FunctionCache

    with contextlib.suppress(OSError, RuntimeError):
        FunctionCache(function).flush()


@functools.cache
def _warn_once(where: str, what: str) -> None:
    logger.warning(
        "vllm-ext: numba's compiled code %s cannot be kept or read (%s): kernels are compiled again, which takes up to "
        "a minute at each start. Free the disk, or remove the folder; NUMBA_CACHE_DIR names another one.",
        where,
        what,
    )


def _say(where: str, error: Exception) -> None:
    """Log a fault once for each folder and kind."""
    _warn_once(where, str(error)[:200] or type(error).__name__)
