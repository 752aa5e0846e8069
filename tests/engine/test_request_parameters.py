# SPDX-License-Identifier: Apache-2.0
"""Every parameter of a request is known: in the table of what is kept of it, or no business of the sampler's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

# How an answer is shown, kept or sent; and what vLLM derives from others.
BEHIND_THE_SAMPLER = {
    *("flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *(
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
    ),
    *("skip_reading_prefix_cache", "routed_experts_prompt_start"),
}


def test_every_parameter_is_in_the_table() -> None:
    """A new one of vLLM may be kept by row, or of all drafts: read it, then put it in the one or the other."""
    table = (Path(__file__).parents[2] / "docs" / "request-states.md").read_text()
    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    known = {name for name in public if f"`{name}`" in table}
    assert {"temperature", "thinking_token_budget", "extra_args"} <= known
    assert public - known == BEHIND_THE_SAMPLER & public


def processor(model_dir: str, method: str) -> InputProcessor:
    speculation = {"method": method, "num_speculative_tokens": 4}
    args = EngineArgs(model=model_dir, dtype="float32", max_model_len=256, speculative_config=speculation)
    return InputProcessor(args.create_engine_config())


def test_what_vllm_refuses_next_to_speculation_passes_next_to_ours_alone(model_dir: str) -> None:
    """Of several engines in a process, each by its own method; and nothing else passes with it."""
    ours, theirs = processor(model_dir, "token_recycling"), processor(model_dir, "ngram")

    def take(of: InputProcessor, **given: Any) -> Any:
        prompt: Any = {"type": "token", "prompt_token_ids": [1, 2, 3]}
        return of.process_inputs("1", prompt, params=SamplingParams(**given), supported_tasks=("generate",))

    for given in ({"min_p": 0.1}, {"logit_bias": {5: 1.0}}):
        taken = take(ours, **given).sampling_params
        assert [getattr(taken, name) for name in given] == list(given.values())
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            take(theirs, **given)
        with pytest.raises(ValueError, match="trace_decode_token_ids is not supported with speculative"):
            take(ours, trace_decode_token_ids=[1], **given)
    assert ours.speculative_config is not None  # a request's own copy knew of none
    assert take(theirs).sampling_params is not None
