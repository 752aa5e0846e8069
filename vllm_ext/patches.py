# SPDX-License-Identifier: Apache-2.0
"""All that replaces or re-classes something of vLLM's, as no option, registry or subclass does. Each has its reason.

`REPLACED` and `SUBCLASSED` are the whole list; a test compares it with what it finds in a running engine. Nothing is
replaced in a process whose engines use nothing of ours, but `EngineArgs.create_engine_config`, which then calls vLLM's.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

FALL_ASLEEP_SECONDS = 0.2

# Functions of vLLM's, and what replaces them.
REPLACED = {
    "vllm.engine.arg_utils.EngineArgs.create_engine_config": "rewrite_engine_args",
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs": "read_requests",
    "vllm.v1.engine.llm_engine.LLMEngine.get_metrics": "show_counters",
    "vllm.v1.engine.utils.get_engine_process_shutdown_timeout": "let_engines_end",
}
# Mixins that `subclass_in_place` puts before the class of a finished object of vLLM's.
SUBCLASSED = (
    "vllm_ext.engine.kv_cache.selection.SelectingRunner",
    "vllm_ext.engine.v1.steering_runner.RuledRunner",
    "vllm_ext.engine.v1.model_runner.SpeculativeRunner",
    "vllm_ext.engine.v2.kept_blocks.KeptState",
    "vllm_ext.engine.v2.steering_runner.RuledRunner",
    "vllm_ext.engine.v2.model_runner.SpeculativeRunner",
    "vllm_ext.engine.v2.model_state.TreeState",
    "vllm_ext.engine.steering.paired_steps.PairedSampler",
    "vllm_ext.engine.steering.step_deferrals.DeferringSampler",
    "vllm_ext.engine.v2.penalties.TreeBadWords",
    "vllm_ext.engine.v2.penalties.TreePenalties",
    "vllm_ext.engine.v2.rejection_sampler.LearningSampler",
)

_wrapper: Any = None


def subclass_in_place(thing: Any, mixin: type[Any]) -> None:
    """Put a mixin before the class of a finished object.

    vLLM's CPU worker builds its runner inline, and runners their parts: there is no method to override that returns
    them. Giving the object a subclass is the same on every platform and moves no state.
    """
    base = type(thing)
    thing.__class__ = type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})


def rewrite_engine_args(create: Callable[..., Any]) -> None:
    """Let ``create`` make engines' configurations, given vLLM's own function and its arguments. Idempotent.

    vLLM's ``method`` is a closed Literal, and its registries start behind it: there is no other place where the name of
    a method of ours can enter.
    """
    global _wrapper
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if original is _wrapper:
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return create(original, self, *args, **kwargs)

    _wrapper = create_engine_config
    EngineArgs.create_engine_config = create_engine_config


def let_engines_end(seconds: float) -> None:
    """Wait for engines that shut down, where vLLM kills them at once. Idempotent.

    With ``--shutdown-timeout 0``, the default, `vllm serve` sends its engines SIGTERM and in the same moment SIGKILL.
    No worker can save anything then, and clients whose requests the engine had no time to abort keep their
    connections open: the API server waits for them without end. vLLM has a function for how long engines get, which
    makes room on ROCm only; here it does everywhere. Requests are aborted as before, and an engine that is done earlier
    is not waited for. The one symbol that a supported vLLM may lack: without it, what was learnt since the last save
    can be lost.

    It is called right before SIGTERM, also at the end of a script with ``LLM``, and the place to let the engine fall
    asleep first: Python sets a flag when a signal comes, and a thread that has looked at it and not yet begun to wait
    for a lock then waits on. An engine that is told to end the moment it has answered misses it, on a busy machine
    about once in ten times, and is killed in the end.
    """
    from vllm.v1.engine import utils

    original = getattr(utils, "get_engine_process_shutdown_timeout", None)
    if original is None:
        logging.getLogger("vllm.vllm_ext").warning(
            "vllm-ext: this vLLM may kill its engines before they have ended requests and saved what was learnt; with "
            "--shutdown-timeout %g it does not",
            seconds,
        )
        return
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_engine_process_shutdown_timeout(
        request_timeout: float | None, process_timeout: float | None
    ) -> float | None:
        time.sleep(FALL_ASLEEP_SECONDS)
        timeout: float | None = original(request_timeout, process_timeout)
        return seconds if timeout == 0 and request_timeout == 0 else timeout

    utils.get_engine_process_shutdown_timeout = get_engine_process_shutdown_timeout


def read_requests() -> None:
    """Let requests to our methods use ``min_p`` and ``logit_bias`` and limit their drafts, rules with pairs see a
    request's prompt, servers its schemas, which they may refuse or bound, and engines on V2 its lists. Idempotent.

    That is where they can refuse it with an HTTP 400. vLLM asks logits processors about a request's parameters alone,
    takes none of V1 next to its own speculation nor on its V2 runner, and knows no other place before the engine.
    Servers without any of these, and requests that use none, are as before.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *more: Any, **options: Any
    ) -> Any:
        from vllm_ext.config import request_options, structured_outputs, v2_limits
        from vllm_ext.engine import paired_requests, sampling_params

        request_options.check_request(self.vllm_config, params)
        validating = sampling_params.allowing_all(self, params)
        request = original(validating, request_id, prompt, params, *more, **options)
        structured_outputs.prepare_request(self.vllm_config, request)
        paired_requests.prepare(self, request)
        v2_limits.check_request(self.vllm_config, request)
        return request

    InputProcessor.process_inputs = process_inputs


def show_counters() -> None:
    """Let ``LLM.get_metrics()`` show our counters too. Idempotent.

    It takes what Prometheus knows under names that begin with ``vllm:``, and a script's engine asks no plug-in for a
    stat logger as a server's does. Engines without a method of ours are as before.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    original = LLMEngine.get_metrics
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_metrics(self: Any) -> list[Any]:
        from vllm_ext.engine import metrics

        return [*original(self), *metrics.snapshot(self)]

    LLMEngine.get_metrics = get_metrics
