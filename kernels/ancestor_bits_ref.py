# SPDX-License-Identifier: Apache-2.0
"""`ancestor_bits` as it is defined, row by row: the readable form the others are tested against."""

import itertools

import torch


def ancestor_bits_ref(parents: torch.Tensor, row_start: torch.Tensor, out: torch.Tensor) -> None:
    """See `vllm_ext.kernels.ancestor_bits.ancestor_bits`, which validates."""
    starts, all_parents = row_start.tolist(), parents.tolist()
    for start, end in itertools.pairwise(starts):
        for row in range(end - start):
            words, at = [0] * out.shape[1], row
            while at >= 0:
                words[at // 32] |= 1 << (at % 32)
                at = all_parents[start + at]
            signed = [word - (1 << 32) if word >> 31 else word for word in words]
            out[start + row] = torch.tensor(signed, dtype=torch.int32)
