# SPDX-License-Identifier: Apache-2.0
"""Frees blocks of running requests that a KV method reads no more (`engine.kv_cache.selection`)."""

from __future__ import annotations

from typing import Any

from vllm_ext.engine import step_extras


class EvictedBlocks:
    """Lets the KV cache's managers know what the worker has evicted."""

    # vLLM's.
    requests: dict[str, Any]
    kv_cache_manager: Any

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        for name, evicted in step_extras.of(model_runner_output).evicted.items():
            if name in self.requests:
                for manager in self.kv_cache_manager.coordinator.single_type_managers:
                    manager.evict(name, evicted)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; called when a request ends, in whatever way."""
        freed = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager.drop(request.request_id)
        return freed
