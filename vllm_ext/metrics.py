# SPDX-License-Identifier: Apache-2.0
"""Counters from the worker to the server's own ``/metrics``.

vLLM sends nothing of ours from worker to API server, so the worker counts in a small shared file and a stat
logger (vLLM's ``vllm.stat_logger_plugins`` group) moves what is new into ordinary Prometheus counters, which
also work with several API servers. Taking is done under a file lock: each increment is exported once.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_ext import config

logger = init_logger("vllm.vllm_ext")

# Why a step of a request went on with less than the method could do: without drafts, or with a chain.
FALLBACK_REASONS = ("proposer_error", "structured_output_chain", "no_grammar", "model_chain")

_DOCUMENTATION = {
    "spec_draft_tokens": "Draft tokens (tree nodes) verified by the target.",
    "spec_accepted_tokens": "Draft tokens accepted.",
    "spec_emitted_tokens": "Tokens emitted, accepted drafts and the target's own.",
    "spec_steps": "Steps of a request that emitted tokens; emitted / steps is tokens per step.",
    "state_loads": "Starts that took over what was learnt before.",
    "state_set_aside": "Starts that found saved state they could not use; the log has the file and the reason.",
    "state_saves": "Times what was learnt was saved.",
    "state_save_errors": "Times it could not be saved; the log has the cause.",
}
_FALLBACK = "fallbacks"
COUNTERS = (*_DOCUMENTATION, *(f"{_FALLBACK}:{reason}" for reason in FALLBACK_REASONS))
_PLACES = {name: place for place, name in enumerate(COUNTERS)}

# What the goodput budget thinks, of the last step it decided.
GAUGES = {
    "spec_budget_nodes_per_request": "Draft nodes per request the goodput budget chose last.",
    "spec_budget_gain": "Tokens per second the budget expects, as a multiple of not speculating.",
    "spec_budget_step_seconds": "Step time the budget predicts for its choice.",
    "spec_budget_target_efficiency": "Predicted time of a step without drafts over that of the budget's choice.",
    "spec_budget_correction": "Accepted drafts as a multiple of those the drafter predicted, recently.",
}


def counter_path(vllm_config: Any, engine_index: int) -> Path:
    """The counter file of one engine, in a folder of this user's own."""
    folder = Path(tempfile.gettempdir()) / f"vllm-ext-{os.getuid()}"
    # Ray's data-parallel engines carry their rank in the id; the API server's copy does not.
    instance = vllm_config.instance_id.partition("_dp")[0]
    return folder / f"{instance}-{engine_index}.counters"


class CounterFile:
    """Totals and exported totals of `COUNTERS`, shared by one worker and any number of API servers."""

    def __init__(self, path: Path, create: bool) -> None:
        """Open, or with ``create`` make, the file. Raises OSError when it cannot be opened."""
        if create:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        descriptor = os.open(path, flags, 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        # [2, num_counters]: row 0 counted by the worker, row 1 already exported. Gauges stand behind.
        shape = (2, len(COUNTERS))
        offset = 8 * shape[0] * shape[1]
        if create:
            os.ftruncate(descriptor, offset + 8 * len(GAUGES))
            atexit.register(path.unlink, missing_ok=True)
        self._cells = np.memmap(self._file, dtype=np.int64, mode="r+", shape=shape)
        self._gauges = np.memmap(self._file, dtype=np.float64, mode="r+", offset=offset, shape=(len(GAUGES),))
        self._counted = memoryview(self._cells[0])  # an array's single elements are slow to reach

    def add(self, amounts: Mapping[str, int]) -> None:
        """Worker side: count. Keys are names of `COUNTERS`."""
        for name, amount in amounts.items():
            self._counted[_PLACES[name]] += amount

    def set_gauges(self, values: Mapping[str, float]) -> None:
        """Worker side: keys are names of `GAUGES`."""
        for place, name in enumerate(GAUGES):
            self._gauges[place] = values[name]

    def gauges(self) -> dict[str, float]:
        """The values last set; zeros before."""
        return dict(zip(GAUGES, self._gauges.tolist(), strict=True))

    def totals(self) -> dict[str, int]:
        """All that was counted."""
        return dict(zip(COUNTERS, self._cells[0].tolist(), strict=True))

    def take(self) -> dict[str, int]:
        """Server side: what was counted and not yet exported, now marked as exported."""
        if not (self._cells[0] != self._cells[1]).any():
            return {}
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            total = self._cells[0].copy()
            new = total - self._cells[1]
            self._cells[1] = total
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return {name: int(amount) for name, amount in zip(COUNTERS, new, strict=True) if amount}


class StatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM calls ``record`` in the API server after every step of an engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        settings = config.from_vllm_config(vllm_config)
        self._active = settings is not None
        if settings is None:
            return
        self._path = counter_path(vllm_config, engine_index)
        self._labels = {
            "model_name": vllm_config.model_config.served_model_name,
            "engine": str(engine_index),
            "method": settings.method,
        }
        self._file: CounterFile | None = None

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Export what the worker has counted since the last call."""
        if not self._active:
            return
        if self._file is None:
            try:
                self._file = CounterFile(self._path, create=False)
            except OSError as error:
                # The engine runs on another host (multi-node data parallel, Ray).
                self._active = False
                logger.warning("vllm-ext: counters of engine %s are not exported: %s", engine_idx, error)
                return
            self._export(dict.fromkeys(COUNTERS, 0))
        if new := self._file.take():
            self._export(new)
            for name, value in self._file.gauges().items():
                _prometheus_gauge(name, tuple(self._labels)).labels(**self._labels).set(value)

    def log_engine_initialized(self) -> None:
        """Nothing to say: the method was logged when the config was made."""

    def _export(self, amounts: Mapping[str, int]) -> None:
        for name, amount in amounts.items():
            name, _, reason = name.partition(":")
            labels = {**self._labels, "reason": reason} if reason else self._labels
            _prometheus_counter(name, tuple(labels)).labels(**labels).inc(amount)


# One collector of each name for a process: several engines in it differ by label.
_prometheus_counters: dict[str, prometheus_client.Counter] = {}
_prometheus_gauges: dict[str, prometheus_client.Gauge] = {}


def _prometheus_counter(name: str, labels: tuple[str, ...]) -> prometheus_client.Counter:
    if name not in _prometheus_counters:
        documentation = _DOCUMENTATION.get(name, "Steps that went on without drafts, by reason.")
        _prometheus_counters[name] = prometheus_client.Counter(f"vllm_ext:{name}", documentation, labels)
    return _prometheus_counters[name]


def _prometheus_gauge(name: str, labels: tuple[str, ...]) -> prometheus_client.Gauge:
    if name not in _prometheus_gauges:
        _prometheus_gauges[name] = prometheus_client.Gauge(
            f"vllm_ext:{name}", GAUGES[name], labels, multiprocess_mode="mostrecent"
        )
    return _prometheus_gauges[name]
