# SPDX-License-Identifier: Apache-2.0
"""Codec streaming_llm: what is kept is as it was; which blocks a row reads; what is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from vllm_ext.codecs.kivi import Kivi, KiviOptions
from vllm_ext.codecs.streaming_llm import StreamingLLM, StreamingLLMOptions


def test_what_comes_out_is_what_went_in() -> None:
    """As float16; bfloat16 within its range is in it exactly but for the smallest numbers."""
    codec = StreamingLLM(StreamingLLMOptions(), 64, 32)
    keys, values = (torch.randn(3, 2, 64, 32, generator=torch.Generator().manual_seed(i)) for i in range(2))
    keys, values = keys.bfloat16().float(), values.half().float()
    encoded = codec.encode(keys, values)
    assert encoded.shape == (3, 2, 64 * codec.bytes_per_token)
    found = codec.decode(encoded)
    torch.testing.assert_close(found[0], keys, rtol=0, atol=2**-24)
    assert torch.equal(found[1], values)
    large = torch.full((64, 32), 1e9)
    assert bool(codec.decode(codec.encode(large, -large))[1].isfinite().all())


def test_which_blocks_are_read() -> None:
    def reads(block: int, **options: int) -> list[int]:
        return StreamingLLM(StreamingLLMOptions(**options), 64, 32).format.blocks_read(block)

    assert reads(9, window=128) == [0, 7, 8]
    assert reads(9, window=129) == [0, 6, 7, 8]  # whole blocks
    assert reads(9, window=64, sinks=0) == [8]
    assert reads(9, window=64, sinks=65) == [0, 1, 8]
    assert reads(2, window=128, sinks=128) == [0, 1]
    assert reads(0, window=128) == []
    assert reads(3, window=128) == [0, 1, 2]
    assert Kivi(KiviOptions(), 64, 64).format.blocks_read(4) == [0, 1, 2, 3]
    assert Kivi(KiviOptions(window=64), 64, 64).format.blocks_read(4) == [0, 3]


@pytest.mark.parametrize("options", [{"window": 0}, {"window": None}, {"sinks": -1}, {"bits": 4}])
def test_options_that_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StreamingLLMOptions.model_validate(options)
