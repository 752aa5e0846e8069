# SPDX-License-Identifier: Apache-2.0
"""The symbols of vLLM that trees under a grammar take: those of either runner, and those of V2 besides."""

from __future__ import annotations

from vllm_ext.compat.hooks import Hook

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_WORKER = "vllm.v1.worker.gpu.structured_outputs"

STRUCTURED_HOOKS = (
    Hook(
        _SCHEDULER,
        "Scheduler.get_grammar_bitmask",
        ("self", "scheduler_output"),
        "leaves the masks of trees to the worker",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
        "takes trees under a grammar as they are",
    ),
    Hook(
        "vllm.v1.structured_output",
        "StructuredOutputManager.grammar_init",
        ("self", "request"),
        "compiles grammars in the worker",
    ),
    Hook(
        "vllm.v1.structured_output.request",
        "StructuredOutputRequest.from_sampling_params",
        ("sampling_params",),
        "tells which requests are structured",
    ),
)
V2_STRUCTURED_HOOKS = (
    *STRUCTURED_HOOKS,
    Hook(
        _SCHEDULER,
        "Scheduler.add_request",
        ("self", "request"),
        "tells workers which grammar backend the engine has",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids_in_output",
        ("self", "draft_token_ids", "scheduler_output"),
        "takes trees under a grammar as they are",
    ),
    Hook(
        "vllm.v1.structured_output",
        "StructuredOutputManager.grammar_bitmask",
        ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
        "masks roots, and nothing behind a draft that is unknown",
    ),
    *(
        Hook("vllm.v1.core.sched.output", f"GrammarOutput.{field}", None, "a step's masks")
        for field in ("structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts")
    ),
    Hook(
        _WORKER,
        "StructuredOutputsWorker.apply_grammar_bitmask",
        ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
        "masks the rows of trees",
    ),
    Hook(
        _WORKER,
        "grammar_invalid_drafts",
        ("input_batch", "grammar_req_ids", "num_acceptable_drafts"),
        "marks drafts that are not to be accepted",
    ),
)
