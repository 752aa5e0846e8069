# SPDX-License-Identifier: Apache-2.0
"""Parts of the worker on the V1 runner: mixins in front of vLLM's for this platform (`engine.composed.worker`)."""

from __future__ import annotations

from typing import Any

from vllm_ext.compat import hooks_v1
from vllm_ext.config import rules, speculative
from vllm_ext.engine import rule_faults
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.draft_model import online
from vllm_ext.engine.models import cpu_linear
from vllm_ext.engine.models.hidden_states import HiddenStates
from vllm_ext.engine.recurrent import registry
from vllm_ext.engine.startup_log import MIN_P, Started, without
from vllm_ext.engine.state.learnt_rules import LearntRules
from vllm_ext.engine.v1 import logits_processor, model_runner, steering_runner
from vllm_ext.engine.v1.drafter import Drafter
from vllm_ext.engine.worker_part import WorkerPart


class Part(WorkerPart):
    """On V1."""

    HOOKS = hooks_v1.HOOKS


class EncodedCache(Part):
    """Encodes the KV cache, or evicts from it."""

    def register(self) -> None:
        from vllm_ext.engine.kv_cache import encoded_cache

        encoded_cache.register()
        super().register()

    def init_device(self) -> None:
        from vllm_ext.engine.kv_cache import selection

        super().init_device()
        codec = selection.codec_of(self.vllm_config)
        if codec is not None:
            selection.install(self.model_runner, codec)

    def get_kv_cache_spec(self) -> Any:
        """vLLM's: what the layers' caches are like."""
        from vllm_ext.engine.kv_cache import block_specs

        return block_specs.codec_specs(self.vllm_config, super().get_kv_cache_spec())  # type: ignore[misc]


class Rules(LearntRules, Part):
    """Rules may report, learn, read more than logits, or fail."""

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
        self.restore_rules()
        self._reports = settings.reports
        self.model_runner.read_aux_logits(settings)
        return result

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
        notes = logits_processor.take_notes(processors, names) if self._reports else {}
        deferrals = runner.deferrals if runner.may_defer else {}
        rule_faults.attach(output, logits_processor.take_faults(processors, names), notes, deferrals)
        return output


class Speculation(Part):
    """Runs a method of ours."""

    def register(self) -> None:
        tree_backend.register()
        registry.register(self.vllm_config.model_config)
        super().register()

    def init_device(self) -> None:
        """vLLM's, then our runner."""
        model_config = self.vllm_config.model_config
        online.cores()
        # vLLM refuses them next to speculation, as its rejection sampler applies none; ours applies all.
        processors, model_config.logits_processors = model_config.logits_processors, None
        try:
            with without(MIN_P):
                super().init_device()
        finally:
            model_config.logits_processors = processors
        model_runner.install(self.model_runner)
        self.counters = self.model_runner.drafter.counters

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; on a CPU with layers that multiply a tree's rows in the time of one."""
        if cpu_linear.wanted(self.vllm_config):
            cpu_linear.register()
        result = super().load_model(*args, **kwargs)  # type: ignore[misc]
        passes = self.model_runner.drafter.passes
        if passes is not None and passes.aux_layers:
            HiddenStates.of_target(self.model_runner, passes.aux_layers)
        return result

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
