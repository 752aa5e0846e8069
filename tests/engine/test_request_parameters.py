# SPDX-License-Identifier: Apache-2.0
"""Every parameter of a request is known: in the table of what is kept of it, or no business of the sampler's."""

from __future__ import annotations

from pathlib import Path

from vllm import SamplingParams

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
