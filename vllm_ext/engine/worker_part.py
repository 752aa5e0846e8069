# SPDX-License-Identifier: Apache-2.0
"""What parts of the worker do on either runner; `engine.composed.worker` lists them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_ext.compat import hooks
from vllm_ext.config import kv_cache, rules
from vllm_ext.engine import backend_overrides, process_exit, step_extras
from vllm_ext.engine.counters import Counters
from vllm_ext.engine.startup_log import Started

logger = init_logger("vllm.vllm_ext")


class WorkerPart:
    """Refuses a vLLM that has moved, logs what is served, and ends the process at once."""

    HOOKS: ClassVar[Sequence[hooks.Hook]]  # of the runner's

    counters: Counters | None = None  # of parts that count; `Counts` sends them
    # vLLM's.
    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        """vLLM's; before it any model could be loaded for nothing."""
        process_exit.watch()
        hooks.check_hooks(self.HOOKS)
        self.register()
        super().init_device()  # type: ignore[misc]

    def register(self) -> None:
        """Make classes of ours known to vLLM, which is the one that we know."""

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last step before serving; then the log says what is served."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        backend_overrides.clear()
        self.make_ready()
        if self.vllm_config.parallel_config.rank == 0:
            logger.info("%s", self.started())
        return times

    def make_ready(self) -> None:
        """What is left to do before the first request."""

    def started(self) -> Started:
        """What is served, for the log."""
        ruled, kv = rules.of_vllm_config(self.vllm_config), kv_cache.from_config(self.vllm_config)
        return Started(
            rules=() if ruled is None else list(ruled.options), kv=None if kv is None else kv.method
        )

    def shutdown(self) -> None:
        """vLLM's. Also called when start-up has failed, at any point of it."""
        super().shutdown()  # type: ignore[misc]
        process_exit.may_leave()


class Counts:
    """Sends what other parts have counted, with the output of each step that has something to say."""

    counters: Counters | None = None

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; a step of no request has its output here."""
        return self._with_counts(super().execute_model(*args, **kwargs))  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_counts(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _with_counts(self, output: Any) -> Any:
        if output is None or self.counters is None or not (counted := self.counters.take_new()):
            return output
        if output is EMPTY_MODEL_RUNNER_OUTPUT:  # of all steps
            output = copy.copy(output)
        step_extras.set_of(output).counted = counted
        return output

    def vllm_ext_counters(self) -> dict[str, int]:
        """This rank's totals since start-up, for ``LLM.collective_rpc``; empty on ranks that do not count."""
        return {} if self.counters is None else self.counters.totals()

    def vllm_ext_metrics(self) -> dict[str, float]:
        """With the gauges."""
        return {} if self.counters is None else {**self.counters.totals(), **self.counters.gauges()}
