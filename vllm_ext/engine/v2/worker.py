# SPDX-License-Identifier: Apache-2.0
"""Parts of the worker on the V2 runner: mixins in front of vLLM's for this platform (`engine.composed.worker`)."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from vllm_ext.compat import hooks, hooks_v2
from vllm_ext.config import rules
from vllm_ext.engine import process_exit, rule_faults
from vllm_ext.engine.attention import v2_backends
from vllm_ext.engine.startup_log import Started
from vllm_ext.engine.v2 import model_runner
from vllm_ext.engine.v2.logits_processor import RuleProcessor
from vllm_ext.engine.v2.speculator import TreeSpeculator

logger = init_logger("vllm.vllm_ext")


class Rules:
    """Rules may fail."""

    model_runner: Any

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; what rules have raised goes with the tokens."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        runner = self.model_runner
        for processor in runner.sampler.logits_processors if runner.sampler is not None else ():
            if isinstance(processor, RuleProcessor):
                rule_faults.attach(output, processor.take_faults(runner.req_states.req_id_to_index))
        return output


class Speculation:
    """Runs a method of ours."""

    vllm_config: Any
    model_runner: Any

    def init_device(self) -> None:
        """Refuse a vLLM that has moved before any model is loaded, then install the runner."""
        process_exit.watch()
        hooks.check_hooks(hooks_v2.V2_HOOKS)
        v2_backends.register()
        super().init_device()  # type: ignore[misc]
        model_runner.install(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last step before serving; what the drafter learnt from made-up requests is forgotten."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        speculator = self.model_runner.speculator
        speculator.serve()
        speculator.counts.reset()
        if self.vllm_config.parallel_config.rank == 0:
            logger.info("%s", self._started())
        return times

    def _started(self) -> Started:
        """What is served, for the log."""
        speculator: TreeSpeculator = self.model_runner.speculator
        ruled, settings = rules.of_vllm_config(self.vllm_config), speculator.settings
        memory_bytes, memory_of = speculator.memory
        return Started(
            method=settings.method,
            runner="V2",
            num_nodes=speculator.num_nodes,
            budget=settings.options.budget,
            chain_reason="its options say so" if speculator.only_chains else speculator.chain_reason,
            memory_bytes=memory_bytes,
            memory_of=memory_of,
            rules=() if ruled is None else list(ruled.options),
        )

    def shutdown(self) -> None:
        """Save what was learnt, then vLLM's own. Also called when start-up has failed, at any point of it."""
        speculator = getattr(getattr(self, "model_runner", None), "speculator", None)
        try:
            if isinstance(speculator, TreeSpeculator):
                speculator.close()
                speculator.counts.close()
        finally:
            super().shutdown()  # type: ignore[misc]
            process_exit.may_leave()

    def vllm_ext_counters(self) -> dict[str, int]:
        """This rank's totals since start-up, for ``LLM.collective_rpc``; empty on ranks that do not count."""
        totals: dict[str, int] = self.model_runner.speculator.counts.totals()
        return totals
