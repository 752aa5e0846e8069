# SPDX-License-Identifier: Apache-2.0
"""`trie_rows` on the CPU: the loops of `trie_rows_ref`, for numba."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.trie import DEAD
from vllm_ext.kernels.trie_numba import behind as behind_edge
from vllm_ext.kernels.trie_rows import NO_TRIE, DeviceTries, SlotTries


def catch_up(tries: DeviceTries, of_slots: SlotTries, *tensors: torch.Tensor) -> None:
    """See `vllm_ext.kernels.trie_rows.catch_up`."""
    _compiled("_catch_up")(_arrays(tries), _arrays(of_slots), *(tensor.numpy() for tensor in tensors))


def mask_trie_rows(
    logits: torch.Tensor,
    tries: DeviceTries,
    of_slots: SlotTries,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    ancestor_bits: torch.Tensor | None,
) -> None:
    """See `vllm_ext.kernels.trie_rows.mask_trie_rows`."""
    if ancestor_bits is None:
        ancestor_bits = torch.full((1, 1), -1, dtype=torch.int32).expand(len(logits), 1 + len(logits) // 32)
    tensors = slots, tokens, offsets, ancestor_bits
    _compiled("_mask_rows")(
        logits.numpy(), _arrays(tries), _arrays(of_slots), *(tensor.numpy() for tensor in tensors)
    )


_arrays = backends.as_arrays


@functools.cache
def _compiled(name: str) -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


def _catch_up(tries: Any, of_slots: Any, slots: Any, text: Any, prompt_len: Any, total_len: Any) -> None:
    for slot in slots:
        which = of_slots.which[slot]
        if which == NO_TRIE:
            continue
        read = of_slots.num_read[slot]
        state = of_slots.state[slot] if read else tries.roots[which]
        for place in range(prompt_len[slot] + read, total_len[slot]):
            state = _behind_of(tries, which, state, text[slot, place])
        of_slots.state[slot] = state
        of_slots.num_read[slot] = total_len[slot] - prompt_len[slot]


def _mask_rows(
    logits: Any, tries: Any, of_slots: Any, slots: Any, tokens: Any, offsets: Any, bits: Any
) -> None:
    for row in range(len(slots)):
        slot, offset = slots[row], offsets[row]
        which, state = of_slots.which[slot], of_slots.state[slot]
        if which == NO_TRIE:
            continue
        for other in range(1, offset + 1):
            if (bits[row, other // 32] >> np.int32(other % 32)) & 1:
                state = _behind_of(tries, which, state, tokens[row - offset + other])
        first = last = 0
        if state != DEAD:
            first, last = tries.first_edge[state], tries.first_edge[state + 1]
        end = of_slots.end[slot]
        of_end = logits[row, end]
        kept = np.empty(last - first, dtype=logits.dtype)
        for edge in range(first, last):
            kept[edge - first] = logits[row, tries.tokens[edge]]
        logits[row, :] = -np.inf
        for edge in range(first, last):
            logits[row, tries.tokens[edge]] = kept[edge - first]
        if state == DEAD or tries.final[state]:
            logits[row, end] = of_end


@numba.njit  # type: ignore[untyped-decorator]
def _behind_of(tries: Any, which: int, state: int, token: int) -> int:
    """Of one trie among several, whose states have numbers that are `which` larger than its edges'."""
    behind = behind_edge(tries, state, token)
    return DEAD if behind == DEAD else int(behind + which)
