# SPDX-License-Identifier: Apache-2.0
"""Attention backends of ours in vLLM's registry, only while an engine of ours starts.

The registry belongs to a process, and so does vLLM's cache of what it has chosen. An engine that starts later in the
same process (VLLM_ENABLE_V1_MULTIPROCESSING=0) would get the backend of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By backend of vLLM's: our path, and the path that another package had registered; None: vLLM's own.
_ours: dict[Any, tuple[str, str | None]] = {}


def register(paths: Mapping[str, str]) -> None:
    """Have the engine that starts make layers with our backends. In the worker, before the model is built.

    Args:
        paths: of classes, by the name of the backend of vLLM's that each replaces. By name: the backend of another
            platform may not import.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in paths.items():
        backend = AttentionBackendEnum[name]
        there = backend.get_path() if backend.is_overridden() else None
        ours, theirs = _ours.get(backend, (None, None))
        register_backend(backend, path)
        _ours[backend] = path, theirs if there == ours else there
    _choose_again()


def clear() -> None:
    """Give back what was registered before: once an engine has started, and before another one's is configured."""
    if not _ours:
        return  # the process may not have imported vLLM's backends
    from vllm.v1.attention.backends.registry import register_backend

    while _ours:
        backend, (path, theirs) = _ours.popitem()
        if backend.get_path() != path:
            continue  # another package's, which came later
        if theirs is None:
            backend.clear_override()
        else:
            register_backend(backend, theirs)
    _choose_again()


def _choose_again() -> None:
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
