# SPDX-License-Identifier: Apache-2.0
"""From what the user has asked for to vLLM's configuration, feature by feature."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_ext import patches
from vllm_ext.compat import compilers, hooks
from vllm_ext.config import runners, schedulers, speculative
from vllm_ext.engine import startup_log
from vllm_ext.engine.composed import scheduler, worker
from vllm_ext.engine.state import state_file
from vllm_ext.features import class_paths
from vllm_ext.features.base import Asked, Feature
from vllm_ext.features.kv_cache import KVCache
from vllm_ext.features.rules import Rules
from vllm_ext.features.speculation import Speculation
from vllm_ext.features.structured_outputs import StructuredOutputs

logger = init_logger("vllm.vllm_ext")

# A later one knows what an earlier one has parsed.
FEATURES: tuple[Feature, ...] = (KVCache(), StructuredOutputs(), Rules(), Speculation())


def create_engine_config(original: Any, args: Any, *more: Any, **options: Any) -> Any:
    """vLLM's ``EngineArgs.create_engine_config``, for engines that are asked for something of ours.

    Args:
        original: vLLM's.
        args: the user's ``EngineArgs``; they are as they were when it returns.
        more, options: of vLLM's call.

    Raises:
        ValueError: an unknown method, rule or option, or a feature that does not go with them.
        RuntimeError: this vLLM is too old or too new.
    """
    hooks.check_version()
    asked = Asked(runners.vllms_own())
    for feature in FEATURES:
        feature.parse(args, asked)
    for feature in FEATURES:
        feature.refuse(args, asked)
    rewritten: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    parts: list[str] = []
    for feature in FEATURES:
        rewritten |= feature.options(args, asked)
        settings |= feature.settings(asked)
        parts += feature.worker_parts(asked)
    if parts and args.worker_cls == "auto":
        rewritten["worker_cls"] = worker.path_of(parts)
    if settings:
        rewritten["additional_config"] = {
            **(args.additional_config or {}),
            speculative.ADDITIONAL_CONFIG_KEY: {**speculative.ours(args), **settings},
        }
    # The caller's EngineArgs keep what the user wrote, so that a second call sees the same.
    saved = {name: getattr(args, name) for name in rewritten}
    for name, value in rewritten.items():
        setattr(args, name, value)
    try:
        with startup_log.without(*([startup_log.CUSTOM_CLASS] if asked.method is not None else [])):
            vllm_config = original(args, *more, **options)
    finally:
        for name, value in saved.items():
            setattr(args, name, value)
    for feature in FEATURES:
        feature.check(vllm_config, asked)
    parts = [part for feature in FEATURES for part in feature.scheduler_parts(vllm_config, asked)]
    chosen = vllm_config.scheduler_config
    if parts and chosen.scheduler_cls is None:
        chosen.scheduler_cls = scheduler.path_of(parts, ahead=chosen.async_scheduling)
    elif parts:
        _put_before(
            chosen, parts if asked.on_v2 and asked.method is not None else {"Counts"}.intersection(parts)
        )
    _finish(vllm_config, asked, "worker_cls" in rewritten)
    return vllm_config


def _put_before(chosen: Any, parts: Collection[str]) -> None:
    """Let the user's own scheduler run behind some of our parts, or say why it cannot."""
    if not parts:
        return
    if (problem := schedulers.problem(chosen.scheduler_cls)) is not None:
        logger.warning("vllm-ext: no counters of ours on /metrics: %s", problem)
    else:
        users = schedulers.path_of(chosen.scheduler_cls)
        logger.info("vllm-ext: scheduler_cls %s runs behind our %s", users, ", ".join(parts))
        chosen.scheduler_cls = scheduler.path_over(parts, users)


def _finish(vllm_config: Any, asked: Asked, own_worker: bool) -> None:
    """What several features need, once."""
    if asked.rules is not None:
        patches.read_requests()
    if asked.method is not None or (asked.rules is not None and asked.rules.learns):
        patches.show_counters()
    parallel = vllm_config.parallel_config
    if own_worker and parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = class_paths.LEAVING_EXECUTOR
    patches.let_engines_end(state_file.SHUTDOWN_SECONDS)
    if missing := compilers.warning(vllm_config, current_platform.device_type):
        logger.warning("vllm-ext: %s", missing)
