# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Eight logits of each row overwritten from recordings, so that a model of random weights answers real text.

The forward pass, the KV cache, attention, the output head and the sampler do all of their work; what comes out is what
SmolLM2 answered. So each drafter is right as often as beside a real model of that text, and whatever goes wrong between
drafting and the committed token shows: an answer must equal its recording. What cannot show is a fault of attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from traces import KINDS, TOP, Traces

# Of the largest logit of a row: in bfloat16 about as coarse as a real one. Random weights give logits near 0.
LARGEST = 24.0


class Planter:
    """The recordings on the device.

    Args:
        path: what `Traces.save` has written.
        device: of the engine.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        traces = Traces.load(path)
        self.vocabulary = traces.vocabulary
        self.keys = torch.from_numpy(traces.keys).to(device)
        self.kinds = torch.from_numpy(traces.kinds.astype(np.int32)).to(device)
        self.ids = torch.from_numpy(traces.top_ids.astype(np.int32)).to(device)
        logits = LARGEST + torch.from_numpy(traces.below.astype(np.float32))
        self.logits = _descending(logits.to(torch.bfloat16)).float().to(device)
        self.counts = torch.zeros(
            len(KINDS) + 1, dtype=torch.int32, device=device
        )  # the last: no row is known

    def plant(self, logits: torch.Tensor, batch: Any, all_token_ids: torch.Tensor) -> None:
        """Overwrite a step's logits.

        Args:
            logits: ``[rows, vocab]``, written to.
            batch: vLLM's ``InputBatch``; positions of draft nodes are those of the tree.
            all_token_ids: int32 ``[slots, tokens]``.
        """
        if not len(logits):
            return
        _plant[(len(logits),)](
            logits,
            logits.stride(0),
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.input_ids,
            batch.positions,
            all_token_ids,
            all_token_ids.stride(0),
            self.keys,
            self.kinds,
            self.ids,
            self.logits,
            self.counts,
            len(self.keys),
            self.vocabulary,
            SEARCH=len(self.keys).bit_length(),
            KINDS=len(KINDS),
            TOP=TOP,
            num_warps=1,
        )


def _descending(logits: torch.Tensor) -> torch.Tensor:
    """Each less than the one before it: a row has one largest logit, whatever the recording's rounding."""
    bits = logits.view(torch.int16).clone()  # of positive numbers: in their order
    for column in range(1, bits.shape[1]):
        bits[:, column] = torch.minimum(bits[:, column], bits[:, column - 1] - 1)
    return bits.view(torch.bfloat16)


@triton.jit
def _plant(
    logits,
    logits_row,
    rows,
    slots,
    input_ids,
    positions,
    all_tokens,
    all_row,
    keys,
    kinds,
    ids,
    values,
    counts,
    num_keys,
    vocabulary,
    SEARCH: tl.constexpr,
    KINDS: tl.constexpr,
    TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(rows + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(input_ids + at).to(tl.int64)
    position = tl.load(positions + at).to(tl.int64)
    trace = tl.load(all_tokens + slot * all_row).to(tl.int64) - vocabulary
    if trace < 0:  # a request of another kind
        return
    exact = ((trace + 1) << 40) + ((position + 1) << 20) + token
    found = _search(keys, exact, num_keys, SEARCH)
    if tl.load(keys + found) != exact:
        found = _search(keys, token, num_keys, SEARCH)
        if tl.load(keys + found) != token:
            tl.atomic_add(counts + KINDS, 1)
            return
    tl.atomic_add(counts + tl.load(kinds + found), 1)
    column = tl.arange(0, TOP)
    where = tl.load(ids + found * TOP + column).to(tl.int64)
    what = tl.load(values + found * TOP + column)
    tl.store(logits + row * logits_row + where, what.to(logits.dtype.element_ty))


@triton.jit
def _search(keys, key, num_keys, SEARCH: tl.constexpr):
    low = tl.zeros([], tl.int64)
    high = low + num_keys - 1
    for _ in range(SEARCH):
        middle = (low + high) // 2
        less = tl.load(keys + middle) < key
        low = tl.where(less & (low < high), middle + 1, low)
        high = tl.where(less, high, middle)
    return low
