# SPDX-License-Identifier: Apache-2.0
"""The V1 model runner, taught to hand its real state to our drafter.

Four small overrides; everything else is vLLM's own, verification included.
"""

from __future__ import annotations

from typing import Any

from vllm_ext.v1_drafter import Drafter


class SpeculativeRunner:
    """Mixin in front of vLLM's V1 runner class of any platform."""

    drafter: Drafter
    execute_model_state: Any

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Tap the logits first: vLLM writes the grammar's mask and the sampler's work into them."""
        if self.execute_model_state is not None:
            self.drafter.tap(self, self.execute_model_state)
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Draft with the request's real state instead of vLLM's padded token table."""
        return self.drafter.step(self, scheduler_output.num_spec_tokens_to_schedule, sampled_token_ids)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: the drafter clips each request on its own.

        vLLM's answer turns drafting off for the whole batch as soon as one request is within
        num_speculative_tokens of max_model_len.
        """
        return True

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]
        self.drafter.finish(req_id)

    @property
    def vllm_ext_tap_seconds(self) -> float:
        """Seconds spent in the logits tap so far, for `vllm-ext bench`."""
        return self.drafter.tap_seconds


def install(runner: Any) -> None:
    """Put the mixin in front of a constructed runner's class.

    The CPU worker builds its runner inline, so there is no method to override that returns it; giving the
    finished object a subclass is the same for every platform and moves no state.
    """
    base = type(runner)
    runner.__class__ = type(f"Speculative{base.__name__}", (SpeculativeRunner, base), {})
