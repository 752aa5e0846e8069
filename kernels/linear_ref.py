# SPDX-License-Identifier: Apache-2.0
"""`linear`, readable."""

from __future__ import annotations

import torch


def linear_ref(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `vllm_ext.kernels.linear.linear`."""
    blocks, pairs, block, _ = packed.shape
    weight = packed.transpose(1, 2).reshape(blocks * block, 2 * pairs)
    return (x.float() @ weight.float().T + bias).to(x.dtype)
