# SPDX-License-Identifier: Apache-2.0
"""The goodput budget of the V2 runner: how many nodes a step verifies.

The scheduler sees what it needs without asking the device: when steps end, and how many tokens each request got.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_ext.config import request_options, speculative
from vllm_ext.engine import step_extras
from vllm_ext.engine.v2 import shares
from vllm_ext.proposers.level_budget import LevelBudget, levels_of

SHOW_SECONDS = 0.5  # between two looks at the budget's figures


class Budget:
    """Chooses each step's level."""

    # vLLM's.
    running: list[Any]
    num_spec_tokens: int
    max_num_running_reqs: int
    dynamic_sd_lookup: list[int] | None
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = LevelBudget(levels_of(self.num_spec_tokens), _most_rows(self.vllm_config))
        # What vLLM looks up by batch size: for each level a schedule with nothing else.
        self._schedules = {level: [level] * (self.max_num_running_reqs + 1) for level in self.budget.levels}
        self._scheduled: dict[int, float] = {}  # by the output's identity, when it was made
        settings = speculative.from_vllm_config(self.vllm_config)
        self._shares = settings is not None and shares.are_shared(self.vllm_config, settings)
        self._coming: int | None = None  # level of the drafts that the last step makes, if they are more
        self._updated = 0.0
        self._shown = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; the drafts that this step makes are as many as the budget says."""
        level = min(self.budget.choose(max(len(self.running), 1)), self._most_asked())
        # Masks of grammars have a row for each draft that was scheduled.
        shared = self._shares and level > 0 and not any(each.use_structured_output for each in self.running)
        self.dynamic_sd_lookup = self._schedules[self.budget.levels[-1] if shared else level]
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._coming is not None:
            step_extras.set_of(output).level = self._coming
        if output.total_num_scheduled_tokens:
            self._coming = level if shared else None
        now = self._scheduled[id(output)] = time.perf_counter()
        if self.running and now - self._shown > SHOW_SECONDS:
            state = self.budget.state(len(self.running))
            if "gain" in state:  # else the level is on trial
                self._shown = now
                step_extras.set_of(output).budget = state
        return output

    def _most_asked(self) -> int:
        """The smallest level that has all nodes that any running request may have."""
        levels = self.budget.levels
        asked = [request_options.most_nodes(each.sampling_params) for each in self.running]
        most = max((levels[-1] if nodes is None else nodes for nodes in asked), default=levels[-1])
        return next((level for level in levels if level >= most), levels[-1])

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; then the budget learns from the step."""
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        now = time.perf_counter()
        # Steps may overlap: one takes what lies between two ends, or less where the engine had nothing to do.
        seconds = now - max(self._updated, self._scheduled.pop(id(scheduler_output), 0.0))
        self._updated = now
        drafts = scheduler_output.scheduled_spec_decode_tokens
        lengths = scheduler_output.num_scheduled_tokens
        nodes = {len(drafts.get(name, ())) for name in lengths}
        level = step_extras.of(scheduler_output).level
        if len(nodes) == 1 and all(count == 1 + len(drafts.get(name, ())) for name, count in lengths.items()):
            emitted = sum(map(len, model_runner_output.sampled_token_ids or ()))
            count = nodes.pop()
            count = count if level is None else min(count, level)
            self.budget.observe(count, len(lengths), emitted, seconds)
        else:
            self.budget.interrupt()
        return result


def _most_rows(vllm_config: Any) -> int:
    """Of the largest step of decoding that has a captured graph; 0 where none has one."""
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_capture_sizes or not compilation.cudagraph_mode.decode_mode():
        return 0
    return int(compilation.max_cudagraph_capture_size)
