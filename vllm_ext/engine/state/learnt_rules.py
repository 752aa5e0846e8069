# SPDX-License-Identifier: Apache-2.0
"""A worker whose rules learn, on either runner: they take over what was saved, and it is saved from then on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_ext.config import rules
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine.counters import Counters
from vllm_ext.engine.state.keeper import Checkpointer
from vllm_ext.samplers.base import LearningRule


class LearntRules:
    """Part of a worker; there are rules."""

    # vLLM's.
    vllm_config: Any

    _checkpointers: Sequence[Checkpointer] = ()
    counters: Counters | None  # those of a method of ours, if there is one; see `worker_part.Counts`

    def restore_rules(self) -> None:
        """Let rules that learn take over what was saved; before any request."""
        settings = rules.of_vllm_config(self.vllm_config)
        assert settings is not None
        if not settings.learns:
            return
        if self.counters is None:
            self.counters = Counters(self.vllm_config)
        checkpointers = []
        loaded = rules.load(settings.as_json, ModelVocabulary.of(self.vllm_config.model_config))
        for name, rule in loaded.items():
            if isinstance(rule, LearningRule):
                memory = Checkpointer(self.vllm_config, name, settings.options[name], {}, self.counters.count)
                memory.restore(rule, lambda rule=rule: rule)  # type: ignore[misc]
                rule.lock, rule.mark_dirty = memory.lock, memory.mark_dirty
                checkpointers.append(memory)
        self._checkpointers = checkpointers

    def shutdown(self) -> None:
        """Save what was learnt, then vLLM's own."""
        try:
            for checkpointer in self._checkpointers:
                checkpointer.close()
        finally:
            super().shutdown()  # type: ignore[misc]
