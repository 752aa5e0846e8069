# SPDX-License-Identifier: Apache-2.0
"""`trie_rows` as it is defined, row by row: the readable form the others are tested against."""

from __future__ import annotations

import torch

from vllm_ext.kernels.trie import DEAD
from vllm_ext.kernels.trie_rows import NO_TRIE, DeviceTries, SlotTries


def catch_up(
    tries: DeviceTries,
    of_slots: SlotTries,
    slots: torch.Tensor,
    text: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
) -> None:
    """See `vllm_ext.kernels.trie_rows.catch_up`."""
    for slot in slots.tolist():
        which = int(of_slots.which[slot])
        if which == NO_TRIE:
            continue
        read = int(of_slots.num_read[slot])
        state = int(of_slots.state[slot]) if read else int(tries.roots[which])
        for token in text[slot, int(prompt_len[slot]) + read : int(total_len[slot])].tolist():
            state = behind(tries, which, state, token)
        of_slots.state[slot] = state
        of_slots.num_read[slot] = total_len[slot] - prompt_len[slot]


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
    for row, (slot, offset) in enumerate(zip(slots.tolist(), offsets.tolist(), strict=True)):
        which, state = int(of_slots.which[slot]), int(of_slots.state[slot])
        if which == NO_TRIE:
            continue
        for other in range(1, offset + 1):
            if ancestor_bits is None or int(ancestor_bits[row, other // 32]) >> other % 32 & 1:
                state = behind(tries, which, state, int(tokens[row - offset + other]))
        allowed: list[int] = []
        if state != DEAD:
            first, last = tries.first_edge[state : state + 2].tolist()
            allowed = tries.tokens[first:last].tolist()
        if state == DEAD or tries.final[state]:
            allowed.append(int(of_slots.end[slot]))
        kept = logits[row, allowed].clone()
        logits[row] = -torch.inf
        logits[row, allowed] = kept


def behind(tries: DeviceTries, which: int, state: int, token: int) -> int:
    """The state behind one token more; DEAD where it is not allowed."""
    if state == DEAD:
        return DEAD
    first, last = tries.first_edge[state : state + 2].tolist()
    place = first + int(torch.searchsorted(tries.tokens[first:last], token))
    return place + 1 + which if place < last and int(tries.tokens[place]) == token else DEAD
