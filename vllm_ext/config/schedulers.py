# SPDX-License-Identifier: Apache-2.0
"""A scheduler class of the user's own, and whether parts of ours can stand before it on the V2 model runner."""

from __future__ import annotations

from typing import Any


def path_of(scheduler_cls: Any) -> str:
    """``module.Class``, as vLLM's option takes it."""
    if isinstance(scheduler_cls, str):
        return scheduler_cls
    return f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"


def problem(scheduler_cls: Any) -> str | None:
    """Why V2 does not run it behind our parts; None: it does, or there is none.

    Raises:
        ValueError: there is no such class.
    """
    if scheduler_cls is None:
        return None
    from vllm.v1.core.sched.scheduler import Scheduler

    path = path_of(scheduler_cls)
    found = scheduler_cls if isinstance(scheduler_cls, type) else _load(path)
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        return f"scheduler_cls={path!r} does not derive from vLLM's Scheduler"
    if isinstance(scheduler_cls, type) and not _is_named(scheduler_cls):
        return f"scheduler_cls={path!r} has no such name in its module"
    return None


def is_ahead(scheduler_cls: Any) -> bool:
    """Whether it can schedule a step before the last one's tokens are known: as vLLM's AsyncScheduler does."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return issubclass(_load(path_of(scheduler_cls)), AsyncScheduler)


def _is_named(kind: type[Any]) -> bool:
    """Whether another process finds a class by its name."""
    try:
        return _load(path_of(kind)) is kind
    except ValueError:
        return False


def _load(path: str) -> Any:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    try:
        return resolve_obj_by_qualname(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"scheduler_cls={path!r} cannot be loaded ({error}); it must be the path of a class, module.Class. Correct "
            "it, or leave it out."
        ) from None
