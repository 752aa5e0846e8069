# SPDX-License-Identifier: Apache-2.0
"""Codec streaming_llm: keys and values as they are, of the first tokens and of a window of the last.

Source: "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.2.
Deviations: whole blocks, so that the window slides a block at a time; positions are those of the text, not of the
cache (so texts end where the model's positions do); keys and values are float16, also of a bfloat16 model's.
"""

from __future__ import annotations

from pydantic import Field

from vllm_ext.codecs.base import CodecOptions
from vllm_ext.codecs.halves import HalvesCodec


class StreamingLLMOptions(CodecOptions):
    window: int = Field(
        default=2048, ge=1, description="how many tokens before its own block a token reads, in whole blocks"
    )


class StreamingLLM(HalvesCodec):
    """The base classes' all: what is forgotten is their window's."""

    name = "streaming_llm"
    summary = "the first tokens and a window of the last, as they are"
    paper = "arXiv 2309.17453"
    Options = StreamingLLMOptions
    EXAMPLES = ({"window": 128},)
    WHY_V1 = ""  # all that is kept is kept as it is: vLLM's own blocks, of which some are read
