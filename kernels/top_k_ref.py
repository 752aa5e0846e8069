# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `top_k_ids`: two stable sorts."""

import torch


def top_k_ids_ref(logits: torch.Tensor, k: int) -> torch.Tensor:
    """See `vllm_ext.kernels.top_k.top_k_ids`, which validates."""
    nan = logits.isnan()
    # float32 holds all three dtypes exactly. Adding 0.0 turns -0.0 into 0.0, which a comparison
    # sort would not tell apart anyway, but a radix sort does.
    values = logits.float().masked_fill(nan, 0.0) + 0.0
    # Stable, so equal values stay in the order of their ids; then all NaN behind all numbers.
    by_value = values.sort(dim=1, descending=True, stable=True).indices
    nan_last = nan.gather(1, by_value).int().sort(dim=1, stable=True).indices
    return by_value.gather(1, nan_last)[:, :k].to(torch.int32)
