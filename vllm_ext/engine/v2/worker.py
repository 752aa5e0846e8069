# SPDX-License-Identifier: Apache-2.0
"""Parts of the worker on the V2 runner: mixins in front of vLLM's for this platform (`engine.composed.worker`)."""

from __future__ import annotations

from typing import Any

from vllm_ext.compat import hooks_v2
from vllm_ext.engine import rule_faults, step_extras
from vllm_ext.engine.attention import v2_backends
from vllm_ext.engine.recurrent import registry
from vllm_ext.engine.startup_log import Started
from vllm_ext.engine.state.learnt_rules import LearntRules
from vllm_ext.engine.v2 import model_runner, steering_runner
from vllm_ext.engine.v2.logits_processor import RuleProcessor
from vllm_ext.engine.v2.speculators.base import TreeSpeculator
from vllm_ext.engine.worker_part import WorkerPart


class Rules(LearntRules):
    """Rules may report, learn, read more than logits, or fail."""

    # vLLM's.
    model_runner: Any

    def init_device(self) -> None:
        """vLLM's; its runner then knows of what rules read."""
        super().init_device()  # type: ignore[misc]
        steering_runner.install(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; then rules take over what they had learnt, and see logits before penalties, as they do on V1."""
        result = super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.restore_rules()
        if (sampler := self.model_runner.sampler) is not None:
            steering_runner.before_penalties(sampler.logits_processors)
        return result

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's; then what rules read is compiled."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.model_runner.warm_up_aux_logits()
        return times

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; what rules have raised, noted and put off goes with the tokens."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        processor: RuleProcessor | None = self.model_runner.processor
        if processor is not None:
            slots = self.model_runner.req_states.req_id_to_index
            deferrals = processor.deferrals.of_requests(slots)
            rule_faults.attach(output, processor.take_faults(slots), processor.take_notes(slots), deferrals)
        return output


class KeptBlocks(WorkerPart):
    """Reads some blocks of the KV cache alone."""

    HOOKS = hooks_v2.V2_HOOKS

    def register(self) -> None:
        v2_backends.register()
        super().register()

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, and our trees'; then the model state learns what is read."""
        from vllm_ext.engine.v2 import kept_blocks

        result = super().load_model(*args, **kwargs)  # type: ignore[misc]
        kept_blocks.install(self.model_runner)
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; what requests that are over have chosen is forgotten."""
        choices = self.model_runner.model_state.choices
        if choices is not None:
            choices.finish(scheduler_output.finished_req_ids)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; what is chosen not to be read goes with the tokens."""
        choices = self.model_runner.model_state.choices
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if choices is None:
            return output
        choices.collect(getattr(self.model_runner.rejection_sampler, "walked", None))
        if output is not None and (evicted := choices.take_evicted()):
            step_extras.set_of(output).evicted = evicted
        return output

    def get_kv_cache_spec(self) -> Any:
        """vLLM's: what the layers' caches are like."""
        from vllm_ext.engine.kv_cache import block_specs

        return block_specs.codec_specs(self.vllm_config, super().get_kv_cache_spec())  # type: ignore[misc]

    def started(self) -> Started:
        """On which runner."""
        return super().started()._replace(runner="V2")


class Speculation(WorkerPart):
    """Runs a method of ours."""

    HOOKS = hooks_v2.V2_HOOKS

    def register(self) -> None:
        v2_backends.register()
        registry.register(self.vllm_config.model_config)
        super().register()

    def init_device(self) -> None:
        """vLLM's, then our runner."""
        super().init_device()
        model_runner.install(self.model_runner)
        self.counters = self.model_runner.speculator.counts

    def make_ready(self) -> None:
        """Forget what the drafter learnt from made-up requests."""
        super().make_ready()
        speculator = self.model_runner.speculator
        speculator.serve()
        for processors in self.model_runner.v1_processors:
            processors.serve()
        speculator.counts.reset()

    def started(self) -> Started:
        """With the method."""
        speculator: TreeSpeculator = self.model_runner.speculator
        settings = speculator.settings
        memory_bytes, memory_of = speculator.memory
        return (
            super()
            .started()
            ._replace(
                method=settings.method,
                runner="V2",
                num_nodes=speculator.num_nodes,
                budget=settings.options.budget,
                chain_reason="its options say so" if speculator.only_chains else speculator.chain_reason,
                memory_bytes=memory_bytes,
                memory_of=memory_of,
            )
        )

    def shutdown(self) -> None:
        """Save what was learnt, then vLLM's own."""
        speculator = getattr(getattr(self, "model_runner", None), "speculator", None)
        try:
            if isinstance(speculator, TreeSpeculator):
                speculator.close()
        finally:
            super().shutdown()
