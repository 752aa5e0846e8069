# SPDX-License-Identifier: Apache-2.0
"""Counters from the worker to the server's own ``/metrics``, and to ``LLM.get_metrics()`` in scripts.

vLLM sends nothing of ours from worker to API server, so the worker counts in a small shared file
(`counter_file`) and a stat logger (vLLM's ``vllm.stat_logger_plugins`` group) moves what is new into ordinary
Prometheus counters, which also work with several API servers. It does so after each step of an engine, and every few
seconds besides, as an idle engine also saves what it has learnt.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prometheus_client
from vllm.logger import init_logger
from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_ext.config import rules, speculative
from vllm_ext.engine import counter_file
from vllm_ext.engine.counter_file import COUNTERS, DOCUMENTATION, GAUGES, ServerCounts, WorkerCounts

logger = init_logger("vllm.vllm_ext")

NO_METHOD = "none"  # the label of servers whose rules learn, without a method of ours
IDLE_SECONDS = 2.0  # between looks at the counters of an engine that does nothing


def counter_path(vllm_config: Any, engine_index: int) -> Path:
    """The counter file of one engine.

    Raises:
        OSError: there is no folder for it that this user alone can write to.
    """
    # Ray's data-parallel engines carry their rank in the id; the API server's copy does not.
    instance = vllm_config.instance_id.partition("_dp")[0]
    return counter_file.folder() / f"{instance}-{engine_index}{counter_file.SUFFIX}"


def worker_counts(vllm_config: Any) -> WorkerCounts:
    """What this worker, the first of its engine, counts in; where there can be no file, it says so and has none."""
    try:
        counts = WorkerCounts(counter_path(vllm_config, vllm_config.parallel_config.data_parallel_index))
    except OSError as error:
        logger.warning("vllm-ext: no counters on /metrics and in LLM.get_metrics(): %s", error)
        return WorkerCounts(None)
    atexit.register(counts.remove)
    return counts


class Counters:
    """What a worker has counted since start-up: rank 0, by whose file it reaches the server. Others count nothing."""

    def __init__(self, vllm_config: Any) -> None:
        rank = vllm_config.parallel_config.rank
        self._file: WorkerCounts | None = worker_counts(vllm_config) if rank == 0 else None

    def add(self, amounts: Mapping[str, int]) -> None:
        """Count, by name."""
        if self._file is not None:
            self._file.add(amounts)

    def count(self, name: str, amount: int = 1) -> None:
        """Count what has one name."""
        if amount:
            self.add({name: amount})

    def show_budget(self, state: Mapping[str, float]) -> None:
        """What a budget says of itself."""
        if self._file is not None:
            self._file.show_budget(state)

    def totals(self) -> dict[str, int]:
        """By name; nothing on ranks that do not count."""
        return {} if self._file is None else self._file.totals()

    def close(self) -> None:
        """The worker ends; may be called again."""
        if self._file is not None:
            self._file.remove()


def snapshot(vllm_config: Any) -> list[Any]:
    """What ``LLM.get_metrics()`` shows of ours, in vLLM's own types; nothing where no method of ours runs.

    Args:
        vllm_config: the engine's.
    """
    method = _method(vllm_config)
    if method is None:
        return []
    index = vllm_config.parallel_config.data_parallel_index
    labels = _labels(vllm_config, index, method)
    try:
        counts = ServerCounts(counter_path(vllm_config, index))
    except OSError as error:
        logger.warning("vllm-ext: there are no counters of this engine: %s", error)
        return []
    try:
        totals, gauges = counts.totals(), counts.gauges()
    finally:
        counts.close()
    found: list[Any] = []
    shown = _shown(method)
    for name, value in totals.items():
        if name not in shown:
            continue
        name, _, reason = name.partition(":")
        found.append(
            reader.Counter(f"vllm_ext:{name}", {**labels, **({"reason": reason} if reason else {})}, value)
        )
    if method != NO_METHOD:
        found += [reader.Gauge(f"vllm_ext:{name}", labels, value) for name, value in gauges.items()]
    return found


def _method(vllm_config: Any) -> str | None:
    """What the label of that name says; None where nothing counts."""
    settings = speculative.from_vllm_config(vllm_config)
    if settings is not None:
        return settings.method
    ruled = rules.of_vllm_config(vllm_config)
    return NO_METHOD if ruled is not None and ruled.learns else None


def _shown(method: str) -> tuple[str, ...]:
    """The counters that there are: without a method those of what rules keep."""
    return tuple(name for name in COUNTERS if method != NO_METHOD or name.startswith("state_"))


def _labels(vllm_config: Any, engine_index: int, method: str) -> dict[str, str]:
    return {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": str(engine_index),
        "method": method,
    }


class StatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM calls ``record`` in the API server after every step of an engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        method = _method(vllm_config)
        self._active = method is not None
        if method is None:
            return
        self._config, self._index, self._method = vllm_config, engine_index, method
        self._labels = _labels(vllm_config, engine_index, method)
        self._file: ServerCounts | None = None

    def log_engine_initialized(self) -> None:
        """The engine is ready: all our series are there from now on, with what its start has counted."""
        self._refresh()
        if self._active:
            threading.Thread(
                target=_keep_fresh, args=(weakref.ref(self),), name="vllm-ext-metrics", daemon=True
            ).start()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Export what the worker has counted since the last call."""
        self._refresh()

    def _refresh(self) -> bool:
        """Export what is new; whether there can be more later."""
        if not self._active:
            return False
        try:
            if self._file is None:
                self._file = ServerCounts(counter_path(self._config, self._index))
                self._export(dict.fromkeys(_shown(self._method), 0))
                self._show(dict.fromkeys(GAUGES, 0.0))
            if new := self._file.take():
                self._export(new)
                self._show(self._file.gauges())
        except OSError as error:
            # The engine runs on another host (multi-node data parallel, Ray), or somebody cut the file short.
            self._active = False
            logger.warning("vllm-ext: counters of engine %s are not exported: %s", self._index, error)
        return self._active

    def _export(self, amounts: dict[str, int]) -> None:
        for name, amount in amounts.items():
            name, _, reason = name.partition(":")
            labels = {**self._labels, "reason": reason} if reason else self._labels
            _prometheus_counter(name, tuple(labels)).labels(**labels).inc(amount)

    def _show(self, values: dict[str, float]) -> None:
        for name, value in values.items() if self._method != NO_METHOD else ():
            _prometheus_gauge(name, tuple(self._labels)).labels(**self._labels).set(value)


def _keep_fresh(logger_of: weakref.ref[StatLogger]) -> None:
    """Export what an engine counts between requests, as long as its stat logger lives."""
    waiting = threading.Event()
    while (stat_logger := logger_of()) is not None and stat_logger._refresh():
        del stat_logger
        waiting.wait(IDLE_SECONDS)


# One collector of each name for a process: several engines in it differ by label.
_prometheus_counters: dict[str, prometheus_client.Counter] = {}
_prometheus_gauges: dict[str, prometheus_client.Gauge] = {}


def _prometheus_counter(name: str, labels: tuple[str, ...]) -> prometheus_client.Counter:
    if name not in _prometheus_counters:
        documentation = DOCUMENTATION.get(name, "Steps that went on without drafts, by reason.")
        _prometheus_counters[name] = prometheus_client.Counter(f"vllm_ext:{name}", documentation, labels)
    return _prometheus_counters[name]


def _prometheus_gauge(name: str, labels: tuple[str, ...]) -> prometheus_client.Gauge:
    if name not in _prometheus_gauges:
        _prometheus_gauges[name] = prometheus_client.Gauge(
            f"vllm_ext:{name}", GAUGES[name], labels, multiprocess_mode="mostrecent"
        )
    return _prometheus_gauges[name]
