# SPDX-License-Identifier: Apache-2.0
"""Rows of logits that are hard to rank, and what is right for them: for tests and for `make kernels`."""

from __future__ import annotations

import math

import torch

NAN, INF = math.nan, math.inf


def contract(logits: torch.Tensor, k: int) -> list[list[int]]:
    """The loop in the docstring of top_k_ids."""
    out = []
    for row in logits.tolist():
        order = sorted(
            range(len(row)),
            key=lambda i: (math.isnan(row[i]), 0 if math.isnan(row[i]) else -row[i], i),
        )
        out.append(order[:k])
    return out


def strided(logits: torch.Tensor, stride: int, device: str = "cpu") -> torch.Tensor:
    """The same rows, `stride` apart, between values that would win."""
    rows, vocab = logits.shape
    # Also before the first row and behind the last: an overrun in any direction shows.
    flat = torch.full(((rows + 1) * max(stride, vocab) + 32,), INF, dtype=logits.dtype)
    view = flat.to(device).as_strided((rows, vocab), (stride, 1), 16)
    return view.copy_(logits)


def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)


def tied(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with equal logits in other blocks."""
    random = random_logits(1, vocab, dtype)
    return torch.cat(
        [
            torch.zeros(1, vocab, dtype=dtype),
            torch.full((1, vocab), -INF, dtype=dtype),
            torch.full((1, vocab), NAN, dtype=dtype),
            (random / 4).round(),  # a handful of distinct values
            random.clamp(max=0),  # half the row is tied for first
        ]
    )


def special(dtype: torch.dtype) -> list[tuple[torch.Tensor, int]]:
    """Rows with zeros of both signs, denormals, infinities and NaN, and how many are asked for."""
    tiny = torch.finfo(dtype).smallest_normal / 4  # denormal
    top, low = torch.finfo(dtype).max, torch.finfo(dtype).min
    values = [NAN, -INF, -0.0, 0.0, INF, -tiny, tiny, low, top, -0.0, NAN, 0.0, INF, -INF]
    short = torch.tensor([values, values[::-1]], dtype=dtype)

    far_apart = torch.full((2, 3000), -INF, dtype=dtype)
    far_apart[0, 1500:] = NAN  # whole blocks of NaN must not hide what comes before them
    far_apart[1, :1500] = NAN
    far_apart[:, 700::150][:, : len(values)] = short

    zeros = torch.zeros(1, 2000, dtype=dtype)
    zeros[0, ::3] = -0.0
    return [(short, len(values)), (far_apart, 32), (zeros, 8)]
