# SPDX-License-Identifier: Apache-2.0
"""Counters of workers on a server's own ``/metrics``, and in ``LLM.get_metrics()``.

A worker's counts leave it with the output of a step. Its engine's scheduler (`scheduler.counts`) puts them into the
``SchedulerStats`` that vLLM sends to one of the API servers with the step's tokens, on whatever host that is. There a
stat logger (vLLM's ``vllm.stat_logger_plugins`` group) adds them to ordinary Prometheus counters. Only increments are
sent, each to one process: vLLM's ``/metrics`` adds up the counters of several API servers.

A script's ``LLM`` asks no plug-in for a stat logger. It asks its worker.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import prometheus_client
from vllm.v1.metrics import perf, reader
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_ext.config import rules, speculative
from vllm_ext.engine.counters import COUNTERS, DOCUMENTATION, GAUGES

NO_METHOD = "none"  # the label of servers whose rules learn, without a method of ours
_PREFIX = "vllm_ext:"  # of our names among vLLM's
_BITS = struct.Struct("=q"), struct.Struct("=d")


def put(stats: Any, counted: Mapping[str, float]) -> None:
    """Send counts along with a step's statistics.

    Another process decodes them by the types of vLLM's fields. One of these takes any names, and vLLM prints it in
    debugging only: the breakdown of a step by what it computes. Its values are integers, so a gauge is sent as the
    bits of its double.

    Args:
        stats: vLLM's ``SchedulerStats``.
        counted: by name, what was counted and the gauges that have changed.
    """
    if stats.perf_stats is None:
        stats.perf_stats = perf.PerfStats()
    if stats.perf_stats.debug_stats is None:
        stats.perf_stats.debug_stats = perf.DebugPerfStats(
            context_breakdown={},
            num_flops_per_gpu_breakdown={},
            num_read_bytes_per_gpu_breakdown={},
            num_write_bytes_per_gpu_breakdown={},
        )
    stats.perf_stats.debug_stats.context_breakdown.update(
        (_PREFIX + name, _recode(value, *_BITS) if name in GAUGES else value)
        for name, value in counted.items()
    )


def take(stats: Any) -> dict[str, float]:
    """What `put` has put into statistics, which are vLLM's own afterwards."""
    debug = None if stats is None or stats.perf_stats is None else stats.perf_stats.debug_stats
    if debug is None or not debug.context_breakdown:
        return {}
    sent = debug.context_breakdown
    names = [name.removeprefix(_PREFIX) for name in sent if name.startswith(_PREFIX)]
    return {
        name: _recode(value, *_BITS[::-1]) if name in GAUGES else value
        for name in names
        for value in [sent.pop(_PREFIX + name)]
    }


def _recode(value: float, target: struct.Struct, source: struct.Struct) -> Any:
    return target.unpack(source.pack(value))[0]


def snapshot(llm_engine: Any) -> list[Any]:
    """What ``LLM.get_metrics()`` shows of ours, in vLLM's own types; nothing where no method of ours runs.

    Args:
        llm_engine: vLLM's ``LLMEngine``.
    """
    vllm_config = llm_engine.vllm_config
    method = _method(vllm_config)
    if method is None:
        return []
    values: dict[str, float] = {}
    for of_worker in llm_engine.collective_rpc("vllm_ext_metrics"):  # rank 0 has some
        values |= of_worker
    labels = _labels(vllm_config, vllm_config.parallel_config.data_parallel_index, method)
    found: list[Any] = []
    for name in _shown(method) if values else ():
        if name in GAUGES:
            found.append(reader.Gauge(_PREFIX + name, labels, values[name]))
        else:
            plain, own = _split(name, labels)
            found.append(reader.Counter(_PREFIX + plain, own, values[name]))
    return found


def _method(vllm_config: Any) -> str | None:
    """What the label of that name says; None where nothing counts."""
    settings = speculative.from_vllm_config(vllm_config)
    if settings is not None:
        return settings.method
    ruled = rules.of_vllm_config(vllm_config)
    return NO_METHOD if ruled is not None and ruled.learns else None


def _shown(method: str) -> tuple[str, ...]:
    """The counters and gauges that there are: without a method counters of what rules keep."""
    if method == NO_METHOD:
        return tuple(name for name in COUNTERS if name.startswith("state_"))
    return (*COUNTERS, *GAUGES)


def _labels(vllm_config: Any, engine_index: int, method: str) -> dict[str, str]:
    return {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": str(engine_index),
        "method": method,
    }


def _split(name: str, labels: dict[str, str]) -> tuple[str, dict[str, str]]:
    """A counter's name and labels: some are one for each reason."""
    name, _, reason = name.partition(":")
    return name, {**labels, "reason": reason} if reason else labels


class StatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM calls ``record`` in the API server that gets the statistics of a step of the engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._method = _method(vllm_config)
        if self._method is not None:
            self._labels = _labels(vllm_config, engine_index, self._method)
        self._series: dict[
            str, Any
        ] = {}  # by name: a look-up by labels takes as long as all else of a step here

    def log_engine_initialized(self) -> None:
        """All our series are there from now on."""
        if self._method is not None:
            self._export(dict.fromkeys(_shown(self._method), 0))

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Export what has come with a step."""
        if self._method is not None:
            self._export(take(scheduler_stats))

    def _export(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._series:
                self._series[name] = _prometheus_series(name, self._labels)
            if name in GAUGES:
                self._series[name].set(value)
            else:
                self._series[name].inc(value)


# One collector of each name for a process: several engines in it differ by label.
_collectors: dict[str, Any] = {}


def _prometheus_series(name: str, labels: dict[str, str]) -> Any:
    """One engine's."""
    plain, labels = _split(name, labels)
    if plain not in _collectors:
        full = _PREFIX + plain
        if name in GAUGES:
            made: Any = prometheus_client.Gauge(
                full, GAUGES[name], tuple(labels), multiprocess_mode="mostrecent"
            )
        else:
            documentation = DOCUMENTATION.get(plain, "Steps that went on without drafts, by reason.")
            made = prometheus_client.Counter(full, documentation, tuple(labels))
        _collectors[plain] = made
    return _collectors[plain].labels(**labels)
