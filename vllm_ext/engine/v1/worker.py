# SPDX-License-Identifier: Apache-2.0
"""Parts of the worker on the V1 runner: mixins in front of vLLM's for this platform (`engine.composed.worker`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_ext import patches
from vllm_ext.compat import hooks, hooks_v1
from vllm_ext.config import kv_cache, rules, speculative
from vllm_ext.engine import metrics, process_exit, rule_faults, step_extras
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.counter_file import WorkerCounts
from vllm_ext.engine.models import cpu_linear
from vllm_ext.engine.startup_log import MIN_P, Started, without
from vllm_ext.engine.state.keeper import Checkpointer
from vllm_ext.engine.v1 import logits_processor, model_runner, steering_runner
from vllm_ext.engine.v1.drafter import Drafter

logger = init_logger("vllm.vllm_ext")


class WorkerPart:
    """What every part does: it refuses a vLLM that has moved, logs what is served, and ends the process at once."""

    # vLLM's.
    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        """vLLM's; before it any model could be loaded for nothing."""
        process_exit.watch()
        hooks.check_hooks(hooks_v1.HOOKS)
        super().init_device()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last step before serving; then the log says what is served."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
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


class EncodedCache(WorkerPart):
    """Encodes the KV cache, or evicts from it."""

    def init_device(self) -> None:
        from vllm_ext.engine.kv_cache import encoded_cache, selection

        encoded_cache.register()
        super().init_device()
        codec = selection.codec_of(self.vllm_config)
        if codec is not None:
            selection.install(self.model_runner, codec)

    def get_kv_cache_spec(self) -> Any:
        """vLLM's: what the layers' caches are like."""
        from vllm_ext.engine.kv_cache import encoded_cache

        return encoded_cache.encoded_specs(self.vllm_config, super().get_kv_cache_spec())  # type: ignore[misc]


class Rules(WorkerPart):
    """Rules may report, learn, read more than logits, or fail."""

    _checkpointers: Sequence[Checkpointer] = ()
    _counts: WorkerCounts | None = None  # without a method of ours, of the first rank
    _reports = False

    def init_device(self) -> None:
        """vLLM's; its runner then knows of what rules read."""
        super().init_device()
        steering_runner.install(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; then rules take over what they had learnt, and what they read is made."""
        result = super().load_model(*args, **kwargs)  # type: ignore[misc]
        settings = rules.of_vllm_config(self.vllm_config)
        assert settings is not None
        if settings.learns:
            self._checkpointers = logits_processor.remember(self.vllm_config, self._counter())
        self._reports = settings.reports
        self.model_runner.read_aux_logits(settings)
        return result

    def _counter(self) -> Callable[[str], None]:
        """What adds one to a counter of what rules keep: beside a method of ours, in its file."""
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, Drafter):
            return drafter.count
        if self.vllm_config.parallel_config.rank == 0:
            self._counts = metrics.worker_counts(self.vllm_config)
        counts = self._counts
        return lambda counter: None if counts is None else counts.add({counter: 1})

    def make_ready(self) -> None:
        """Compile what rules read."""
        super().make_ready()
        self.model_runner.warm_up_aux_logits()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; what rules have noted goes with the tokens."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if output is None:
            return None
        runner = self.model_runner
        processors, names = runner.input_batch.logitsprocs, runner.input_batch.req_ids
        if runner.may_defer:
            step_extras.set_of(output).deferrals = runner.deferrals
        if self._reports:
            step_extras.set_of(output).notes = logits_processor.take_notes(processors, names)
        rule_faults.attach(output, logits_processor.take_faults(processors, names))
        return output

    def shutdown(self) -> None:
        """Save what was learnt, then vLLM's own."""
        try:
            for memory in self._checkpointers:
                memory.close()
            if self._counts is not None:
                self._counts.remove()
        finally:
            super().shutdown()


class Speculation(WorkerPart):
    """Runs a method of ours."""

    def init_device(self) -> None:
        """vLLM's, then our runner."""
        tree_backend.register()
        model_config = self.vllm_config.model_config
        # vLLM refuses them next to speculation, as its rejection sampler applies none; ours applies all.
        processors, model_config.logits_processors = model_config.logits_processors, None
        try:
            with without(MIN_P):
                super().init_device()
        finally:
            model_config.logits_processors = processors
        model_runner.install(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; on a CPU with layers that multiply a tree's rows in the time of one."""
        if not cpu_linear.wanted(self.vllm_config):
            return super().load_model(*args, **kwargs)  # type: ignore[misc]
        with patches.multiply_few_rows_fast():
            return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def make_ready(self) -> None:
        """Measure the model's costs too."""
        super().make_ready()
        self.model_runner.calibrate()

    def started(self) -> Started:
        """With the method."""
        drafter: Drafter = self.model_runner.drafter
        settings = speculative.from_vllm_config(self.vllm_config)
        assert settings is not None
        return (
            super()
            .started()
            ._replace(
                method=settings.method,
                num_nodes=drafter.num_nodes,
                budget=settings.options.budget,
                chain_reason=drafter.chain_reason,
                memory_bytes=drafter.proposer.memory_bytes,
            )
        )

    def shutdown(self) -> None:
        drafter = getattr(getattr(self, "model_runner", None), "drafter", None)
        try:
            if isinstance(drafter, Drafter):
                drafter.close()
        finally:
            super().shutdown()

    def vllm_ext_counters(self) -> dict[str, int]:
        """This rank's totals since start-up, for ``LLM.collective_rpc``; empty on ranks that do not count."""
        drafter: Drafter = self.model_runner.drafter
        return drafter.counters()
