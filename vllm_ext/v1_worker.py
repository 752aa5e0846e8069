# SPDX-License-Identifier: Apache-2.0
"""The worker that installs our runner: vLLM's own worker of this platform, one override."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from vllm_ext import compat, v1_attention, v1_runner
from vllm_ext.v1_drafter import Drafter

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class Worker(PlatformWorker):  # type: ignore[misc]  # vLLM is untyped to us
    """Named in ``worker_cls`` by the plugin."""

    def init_device(self) -> None:
        """Refuse a vLLM that has moved before any model is loaded, then install the runner."""
        compat.check_hooks()
        v1_attention.register()
        model_config = self.vllm_config.model_config
        # vLLM refuses them next to speculation, as its rejection sampler applies none; ours applies all.
        processors, model_config.logits_processors = model_config.logits_processors, None
        try:
            super().init_device()
        finally:
            model_config.logits_processors = processors
        v1_runner.install(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last step before serving; then the model's costs are measured."""
        times = super().compile_or_warm_up_model()
        self.model_runner.calibrate()
        return times

    def shutdown(self) -> None:
        """Save what was learnt, then vLLM's own. Also called when start-up has failed, at any point of it."""
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
