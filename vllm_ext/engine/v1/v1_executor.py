# SPDX-License-Identifier: Apache-2.0
"""vLLM's executor of worker processes, less one round trip a step: drafts come with the tokens they follow.

vLLM asks the worker for them after each step, and waits for the answer. Named in ``distributed_executor_backend``,
which takes classes, where that is vLLM's own ``mp``; with ``uni`` there is no process to ask.
"""

from __future__ import annotations

from typing import Any

from vllm_ext.engine import step_extras
from vllm_ext.engine.executor import LeavingExecutor


class Executor(LeavingExecutor):
    """Keeps the drafts that came with the last step's tokens."""

    _drafts: Any = None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """vLLM's; never called without waiting, as async scheduling is off."""
        output = super().sample_tokens(grammar_output, non_block)
        self._drafts = step_extras.of(output).drafts
        return output

    def take_draft_token_ids(self) -> Any:
        """Those that are there; else vLLM's question."""
        drafts, self._drafts = self._drafts, None
        return super().take_draft_token_ids() if drafts is None else drafts
