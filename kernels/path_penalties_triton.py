# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`path_penalties` on CUDA: a program for each row and block of tokens, or for each row and word."""

import torch
import triton
import triton.language as tl

BLOCK = 4096


def penalise_triton(
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
    rows, vocab = logits.shape
    if rows == 0:
        return
    with torch.cuda.device_of(logits):
        _penalise[(rows, triton.cdiv(vocab, BLOCK))](
            logits,
            logits.stride(0),
            slots,
            tokens,
            offsets,
            ancestor_bits,
            ancestor_bits.stride(0),
            repetition,
            frequency,
            presence,
            in_prompt,
            in_prompt.stride(0),
            counts,
            counts.stride(0),
            vocab,
            BLOCK=BLOCK,
        )


def forbid_triton(
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
    if len(logits) == 0 or most_words == 0:
        return
    with torch.cuda.device_of(logits):
        _forbid[(len(logits), most_words)](
            logits,
            logits.stride(0),
            slots,
            tokens,
            offsets,
            parents,
            words,
            words.stride(0),
            word_starts,
            word_starts.stride(0),
            num_words,
            text,
            text.stride(0),
            prompt_len,
            total_len,
        )


@triton.jit
def _penalise(
    logits,
    logits_row,
    slots,
    tokens,
    offsets,
    bits,
    bits_row,
    repetition,
    frequency,
    presence,
    in_prompt,
    prompt_row,
    counts,
    counts_row,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    again, often, once = tl.load(repetition + slot), tl.load(frequency + slot), tl.load(presence + slot)
    if (again == 1.0) & (often == 0.0) & (once == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logit = tl.load(logits + row * logits_row + token, mask=inside, other=0.0)
    count = tl.load(counts + slot * counts_row + token, mask=inside, other=0)
    offset = tl.load(offsets + row)
    first = row - offset
    for other in range(1, offset + 1):
        word = tl.load(bits + row * bits_row + other // 32)
        drafted = tl.load(tokens + first + other)
        count += tl.where(token == drafted, (word >> (other % 32)) & 1, 0)
    seen = count > 0
    prompt = tl.load(in_prompt + slot * prompt_row + token // 32, mask=inside, other=0)
    known = seen | (((prompt >> (token % 32)) & 1) != 0)
    scale = tl.where(known, again, 1.0)
    logit *= tl.where(logit > 0, 1.0 / scale, scale)
    logit -= often * count
    logit -= once * seen
    tl.store(logits + row * logits_row + token, logit, mask=inside)


@triton.jit
def _forbid(
    logits,
    logits_row,
    slots,
    tokens,
    offsets,
    parents,
    words,
    words_row,
    word_starts,
    starts_row,
    num_words,
    text,
    text_row,
    prompt_len,
    total_len,
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if word >= tl.load(num_words + slot):
        return
    start = tl.load(word_starts + slot * starts_row + word)
    end = tl.load(word_starts + slot * starts_row + word + 1)
    words += slot * words_row
    offset = tl.load(offsets + row)
    first = row - offset
    at = offset
    place = tl.load(total_len + slot) - 1  # in the text, once the path is in it
    least = tl.load(prompt_len + slot)
    match = 1
    for back in range(1, end - start):
        expected = tl.load(words + end - 1 - back)
        of_tree = tl.load(tokens + first + at, mask=at > 0, other=-1)
        of_text = tl.load(text + slot * text_row + place, mask=(at <= 0) & (place >= least), other=-1)
        match = match & (tl.where(at > 0, of_tree, of_text) == expected)
        place = tl.where(at > 0, place, place - 1)
        at = tl.where(at > 0, tl.load(parents + first + at, mask=at > 0, other=0), at)
    if match != 0:
        tl.store(logits + row * logits_row + tl.load(words + end - 1), float("-inf"))
