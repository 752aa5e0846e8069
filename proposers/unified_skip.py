# SPDX-License-Identifier: Apache-2.0
"""Unified Layer Skipping as a drafter: the model without some of its middle layers, spread evenly.

Which layers stay depends on the wanted speed-up alone, not on the input: all tokens of a request have keys and values
in the same ones. As a decoder it would be lossy; here the whole model verifies, and computes what was skipped.

Source: "Unified Layer Skipping", arXiv 2404.06954 (balanced skipping for a target speed-up); drafting with it as in
"Draft & Verify", arXiv 2309.08168. Deviation: the rounding of the spacing is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.self_draft import SelfDraftProposer, ShapeOptions


class UnifiedSkipOptions(ShapeOptions):
    """Options of `unified_skip`."""

    speedup: float = Field(
        default=2.0, ge=1.0, le=16.0, description="of a draft pass: with 2 every second layer is kept"
    )
    layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="which layers stay, ascending, as `vllm-ext train draft --search-layers` finds them; none: those "
        "that speedup says",
    )

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and (layers != sorted(set(layers)) or layers[0] < 0):
            raise ValueError("layers are counted from 0, and named in ascending order, each once")
        return layers


class UnifiedSkip(SelfDraftProposer):
    """A chain or small tree by a balanced choice of the layers."""

    summary: ClassVar[str] = "the model drafts without some of its middle layers"
    paper: ClassVar[str] = "arXiv 2404.06954"
    on_v2 = "device"
    Options: ClassVar[type[MethodOptions]] = UnifiedSkipOptions
    tested_with: ClassVar[Mapping[str, Any]] = {**SelfDraftProposer.tested_with, "speedup": 1.15}


def kept_layers(options: UnifiedSkipOptions, num_layers: int) -> list[int]:
    """The layers that stay, by the options: ascending.

    Raises:
        ValueError: the model does not have one of them.
    """
    if options.layers is None:
        return balanced(num_layers, options.speedup)
    if options.layers[-1] >= num_layers:
        raise ValueError(
            f"speculative_config.layers={options.layers} is not allowed; allowed: 0 to {num_layers - 1}, the model's "
            "layers. Remove the others."
        )
    return list(options.layers)


def balanced(num_layers: int, speedup: float) -> list[int]:
    """The layers that stay: ascending, spread evenly, the first and the last among them.

    Args:
        num_layers: of the model, at least 1.
        speedup: how many times fewer are wanted, at least 1.
    """
    count = min(max(round(num_layers / speedup), 2), num_layers)
    if count == 1:
        return [0]
    return [round(index * (num_layers - 1) / (count - 1)) for index in range(count)]
