# SPDX-License-Identifier: Apache-2.0
"""`path_penalties` as it is defined, row by row: the readable form the others are tested against."""

from __future__ import annotations

import torch


def penalise_ref(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    ancestor_bits: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See `vllm_ext.kernels.path_penalties.penalise`."""
    vocab = logits.shape[1]
    token = torch.arange(vocab)
    for row, (slot, offset) in enumerate(zip(slots.tolist(), offsets.tolist(), strict=True)):
        count = counts[slot].clone()
        for other in range(1, offset + 1):
            if int(ancestor_bits[row, other // 32]) >> other % 32 & 1:
                count[tokens[row - offset + other]] += 1
        prompt = (in_prompt[slot][token // 32] >> token % 32 & 1).bool()
        scale = torch.where(prompt | (count > 0), repetition[slot], 1.0)
        logits[row] *= torch.where(logits[row] > 0, 1.0 / scale, scale)
        logits[row] -= frequency[slot] * count
        logits[row] -= presence[slot] * (count > 0)


def forbid_ref(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    parents: torch.Tensor,
    words: torch.Tensor,
    word_starts: torch.Tensor,
    num_words: torch.Tensor,
    text: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    most_words: int,
) -> None:
    """See `vllm_ext.kernels.path_penalties.forbid`."""
    for row, (slot, offset) in enumerate(zip(slots.tolist(), offsets.tolist(), strict=True)):
        path: list[int] = []
        at = offset
        while at > 0:
            path.insert(0, int(tokens[row - offset + at]))
            at = int(parents[row - offset + at])
        output = text[slot, int(prompt_len[slot]) : int(total_len[slot])].tolist() + path
        for word in range(int(num_words[slot])):
            start, end = word_starts[slot, word : word + 2].tolist()
            *before, last = words[slot, start:end].tolist()
            if output[len(output) - len(before) :] == before and len(before) <= len(output):
                logits[row, last] = float("-inf")
