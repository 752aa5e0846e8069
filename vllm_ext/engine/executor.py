# SPDX-License-Identifier: Apache-2.0
"""vLLM's executor of worker processes; when it has shut down, the engine's process ends at once (`process_exit`).

Named in ``distributed_executor_backend``, which takes classes, where that is vLLM's own ``mp``.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_ext.engine import process_exit


class LeavingExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM is untyped to us
    """See the file."""

    def _init_executor(self) -> None:
        """vLLM's, in the engine's process."""
        process_exit.watch()
        super()._init_executor()

    def shutdown(self) -> None:
        """vLLM's; it waits for the workers."""
        super().shutdown()
        process_exit.may_leave()
