# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, with KV slots for what a draft model writes behind the target's tokens.

vLLM reserves them for its own draft models only, by method name; ``scheduler_cls`` is the option that lets others in.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler

from vllm_ext.proposers.sampled import ASKED_PER_NODE


class Scheduler(StockScheduler):  # type: ignore[misc]  # vLLM is untyped to us
    """Reserves a slot for each node that the draft model reads and for the token before them."""

    vllm_config: Any

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots behind the tokens the target computes.

        A step may put out one token more than it had rows for, which is the root of the next tree.
        """
        return 1 + ASKED_PER_NODE * int(self.vllm_config.speculative_config.num_speculative_tokens)

    @num_lookahead_tokens.setter
    def num_lookahead_tokens(self, value: int) -> None:
        """vLLM's constructor sets 0."""
