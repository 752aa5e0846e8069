# SPDX-License-Identifier: Apache-2.0
"""`path_penalties` on the CPU: the loops of `path_penalties_ref`, for numba."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends


def penalise_numba(*tensors: torch.Tensor) -> None:
    """See `vllm_ext.kernels.path_penalties.penalise`."""
    _compiled("_penalise")(*(tensor.numpy() for tensor in tensors))


def forbid_numba(
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
    given = (
        logits,
        slots,
        tokens,
        offsets,
        parents,
        words,
        word_starts,
        num_words,
        text,
        prompt_len,
        total_len,
    )
    _compiled("_forbid")(*(tensor.numpy() for tensor in given))


@functools.cache
def _compiled(name: str) -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


def _penalise(
    logits: Any,
    slots: Any,
    tokens: Any,
    offsets: Any,
    ancestor_bits: Any,
    repetition: Any,
    frequency: Any,
    presence: Any,
    in_prompt: Any,
    counts: Any,
) -> None:
    rows, vocab = logits.shape
    count = np.empty(vocab, np.int32)
    counted = -1  # the slot whose tokens `count` has
    one, nothing = np.float32(1.0), np.float32(0.0)
    for row in range(rows):
        slot, offset = slots[row], offsets[row]
        again, often, once = repetition[slot], frequency[slot], presence[slot]
        if again == 1.0 and often == 0.0 and once == 0.0:
            continue
        inverse = one / again
        if slot != counted:
            count[:] = counts[slot, :vocab]
            counted = slot
        _add_path(count, tokens[row - offset : row + 1], ancestor_bits[row], 1)
        for word in range((vocab + 31) // 32):
            prompt = in_prompt[slot, word]
            first, end = word * 32, min(word * 32 + 32, vocab)
            any_seen = np.int32(0)
            for token in range(first, end):
                any_seen |= count[token]
            if any_seen == 0 and prompt == 0:
                continue
            own, seen = logits[row, first:end], count[first:end]
            for bit in range(end - first):
                times = seen[bit]
                logit = own[bit]
                scale = inverse if logit > 0 else again
                known = times > 0 or (prompt >> np.int32(bit) & np.int32(1)) != 0
                logit *= scale if known else one
                logit -= often * np.float32(times)
                own[bit] = logit - (once if times > 0 else nothing)
        _add_path(count, tokens[row - offset : row + 1], ancestor_bits[row], -1)


@numba.njit  # type: ignore[untyped-decorator]
def _add_path(count: Any, tokens: Any, bits: Any, times: int) -> None:
    """Count the tokens of a row's path behind the root; ``tokens`` are the request's up to the row's own."""
    for other in range(1, len(tokens)):
        if bits[other // 32] >> (other % 32) & 1 and 0 <= tokens[other] < len(count):
            count[tokens[other]] += times


def _forbid(
    logits: Any,
    slots: Any,
    tokens: Any,
    offsets: Any,
    parents: Any,
    words: Any,
    word_starts: Any,
    num_words: Any,
    text: Any,
    prompt_len: Any,
    total_len: Any,
) -> None:
    for row in range(len(logits)):
        slot, root = slots[row], row - offsets[row]
        for word in range(num_words[slot]):
            start, last = word_starts[slot, word], word_starts[slot, word + 1] - 1
            at = np.int64(offsets[row])
            place = np.int64(total_len[slot]) - 1  # in the text, once the path is in it
            expected = last - 1
            while expected >= start:
                if at > 0:
                    token = tokens[root + at]
                    at = np.int64(parents[root + at])
                elif place >= prompt_len[slot]:
                    token = text[slot, place]
                    place -= 1
                else:
                    break
                if token != words[slot, expected]:
                    break
                expected -= 1
            if expected < start:
                logits[row, words[slot, last]] = -np.inf
