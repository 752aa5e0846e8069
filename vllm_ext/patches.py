# SPDX-License-Identifier: Apache-2.0
"""The patches of vLLM that no option, registry or subclass replaces. One function each, with its reason."""

from __future__ import annotations

import functools
from typing import Any


def allow_all_sampling_parameters(drafter_class: str) -> None:
    """Let requests use ``min_p`` and ``logit_bias`` next to our methods. Idempotent.

    vLLM refuses them next to any speculation, because its rejection sampler does not apply them to draft
    rows; the check is a method of SamplingParams that asks nobody. Ours verifies with the stock sampler,
    which does. Engines without ``drafter_class`` keep vLLM's check.
    """
    from vllm.sampling_params import SamplingParams

    original = SamplingParams._validate_spec_decode
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config is None or speculative_config.model != drafter_class:
            original(self, speculative_config)

    SamplingParams._validate_spec_decode = _validate_spec_decode
