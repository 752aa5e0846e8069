# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs without CUDA: what is launched between two points is recorded, and replayed on the same memory.

As in a graph, what the host does in between is not part of it, whatever was computed from a tensor's values stays as it
was, and each result lies where it lay. Recorded are torch's operators and Triton's launches, which the interpreter
runs; and functions that are named, whole, as torch does not see what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import attention

# What copies from the host: a graph must not.
FROM_HOST = tuple((torch, name) for name in ("from_numpy", "tensor", "as_tensor"))
WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")
_recording: list[RecordedGraph] = []


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is, here
    """Instead of ``torch.cuda.CUDAGraph``: records while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = []
        self._paused = 0

    def __enter__(self) -> Any:
        _recording.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        _recording.pop()
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "vllm":  # attention: what it launches depends on what vLLM has said before
            with self:
                return getattr(attention, func.overloadpacket.__name__)(*args, **kwargs)
        result = func(*args, **kwargs)
        if not self._paused:
            if func.overloadpacket.__name__ in WAITS:
                raise AssertionError(f"{func} waits for the device: a graph cannot hold it")
            new = _new(result, (args, kwargs))
            if new or func._schema.is_mutable:  # else a view
                self.calls.append((func, args, kwargs, new))
        return result

    @property
    def paused(self) -> bool:
        """Whether a function runs that is recorded whole."""
        return self._paused > 0

    def whole(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call of what torch does not see."""
        self._paused += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._paused -= 1
        if not self._paused:
            self.calls.append((function, args, kwargs, _new(result, (args, kwargs))))
        return result

    def replay(self) -> None:
        """All of it again."""
        with torch.inference_mode():
            for function, args, kwargs, kept in self.calls:
                result = function(*args, **kwargs)
                for place, value in zip(kept, _new(result, (args, kwargs)), strict=True):
                    place.copy_(value)


def _new(result: Any, given: Any) -> list[torch.Tensor]:
    """Tensors of a result that lie where no argument does."""
    tensors = [
        [each for each in _pytree.tree_leaves(part) if isinstance(each, torch.Tensor)]
        for part in (given, result)
    ]
    memory, found = ([each.untyped_storage().data_ptr() for each in part] for part in tensors)
    return [each for each, place in zip(tensors[1], found, strict=True) if place not in memory]


@contextmanager
def recorded_instead_of_captured(
    unseen: Sequence[tuple[Any, str]] = (), forbidden: Sequence[tuple[Any, str]] = ()
) -> Iterator[None]:
    """vLLM's managers of graphs record.

    Args:
        unseen: owner and name of functions that are recorded whole.
        forbidden: likewise, of those that no graph can hold.
    """
    from triton.runtime.interpreter import GridExecutor
    from vllm.v1.worker.gpu import cudagraph_utils

    def seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _recording:
                return function(*args, **kwargs)
            return _recording[-1].whole(function, *args, **kwargs)

        return call

    def refused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            captured = _recording and not _recording[-1].paused
            assert not captured, f"{function} while a graph is captured"
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (*FROM_HOST, *forbidden):
            patch.setattr(owner, name, refused(getattr(owner, name)))
        for owner, name in ((GridExecutor, "__call__"), *unseen):
            patch.setattr(owner, name, seen(getattr(owner, name)))
        patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
        patch.setattr(torch.cuda, "graph", lambda graph, *args, **kwargs: graph)
        for name in ("graph_capture", "capture_pool"):
            patch.setattr(cudagraph_utils, name, lambda *args, **kwargs: nullcontext())
        patch.setattr(cudagraph_utils, "current_stream", lambda: None)
        patch.setattr(type(cudagraph_utils.current_platform), "get_global_graph_pool", lambda self: None)
        yield
