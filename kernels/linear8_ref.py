# SPDX-License-Identifier: Apache-2.0
"""`linear8`, readable."""

from __future__ import annotations

import torch

MOST_INPUT = 2047


def linear8_ref(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """See `vllm_ext.kernels.linear8.linear8`."""
    blocks, pairs, block, _ = codes.shape
    weight = codes.transpose(1, 2).reshape(blocks * block, 2 * pairs)
    step = x.abs().amax(-1, keepdim=True).float() / MOST_INPUT
    rounded = (x.float() * (1.0 / step)).round()
    sums = rounded.double() @ weight.double().T  # of integers: exact
    sums = torch.where(step > 0.0, sums, 0.0).float()
    return (sums * step * scale + bias).to(x.dtype)
