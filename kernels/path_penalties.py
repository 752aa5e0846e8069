# SPDX-License-Identifier: Apache-2.0
"""Penalties and bad words of the rows of a tree, each by the tokens of its own path, for all rows at once.

What engines keep for chains counts the rows before a row; in a tree only its ancestors are before it.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.kernels.backends import Backend, choose


def penalise(
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
    backend: Backend = "auto",
) -> None:
    """Apply the penalties of each row's request.

    The contract, for each row and token, where ``count`` is that of the request's output and of the row's path behind
    the root, and ``seen`` is ``count > 0`` or the token is in the prompt::

        logit = logit * (1 / repetition if logit > 0 else repetition)   # if seen
        logit = logit - frequency * count - presence * (count > 0)

    Args:
        logits: float32 ``[rows, vocab]``, written to; last dimension contiguous.
        slots: int ``[rows]`` whose a row is.
        tokens: int32 ``[rows]`` each row's input token.
        offsets: int32 ``[rows]`` place of a row among its request's, which stand together, the root first.
        ancestor_bits: int32 ``[rows, WORDS]`` bit b of word w: row 32 * w + b of the request is on this row's path.
        repetition: float32 ``[slots]``, above 0; 1: none.
        frequency: float32 ``[slots]``; 0: none.
        presence: float32 ``[slots]``; 0: none.
        in_prompt: int32 ``[slots, vocab / 32]`` a bit for each token.
        counts: int32 ``[slots, vocab]`` of each token in the output, the root included.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, logits):
        case "numba":
            from vllm_ext.kernels.path_penalties_numba import penalise_numba as form
        case "triton":
            from vllm_ext.kernels.path_penalties_triton import penalise_triton as form
        case _:
            from vllm_ext.kernels.path_penalties_ref import penalise_ref as form
    form(logits, slots, tokens, offsets, ancestor_bits, repetition, frequency, presence, in_prompt, counts)


def forbid(
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
    backend: Backend = "auto",
) -> None:
    """Set the last token of each word to -inf where the path ends with all before it. Prompts are no part of a path.

    Args:
        logits: float32 ``[rows, vocab]``, written to; last dimension contiguous.
        slots: int ``[rows]`` whose a row is.
        tokens: int32 ``[rows]`` each row's input token.
        offsets: int32 ``[rows]`` place of a row among its request's, which stand together, the root first.
        parents: int32 ``[rows]`` the parent's offset; below 0: the row is a root, or nobody gets there.
        words: int32 ``[slots, tokens]`` one after the other.
        word_starts: int32 ``[slots, words + 1]``.
        num_words: int32 ``[slots]``.
        text: int32 ``[slots, tokens]``, the root included.
        prompt_len: int32 ``[slots]``.
        total_len: int32 ``[slots]`` tokens of the text, the root included.
        most_words: of a request, as the host knows.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, logits):
        case "numba":
            from vllm_ext.kernels.path_penalties_numba import forbid_numba as form
        case "triton":
            from vllm_ext.kernels.path_penalties_triton import forbid_triton as form
        case _:
            from vllm_ext.kernels.path_penalties_ref import forbid_ref as form
    form(
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
        most_words,
    )
