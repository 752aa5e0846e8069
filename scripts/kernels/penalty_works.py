# SPDX-License-Identifier: Apache-2.0
"""Penalties and bad words by the path of each row, next to the readable form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tree_cases import binary
from work import Work

from vllm_ext.kernels.ancestor_bits import ancestor_bits
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.path_penalties import forbid, penalise

WORD_TOKENS = 3


def works(device: str) -> Iterator[Work]:
    """All of them; ``device`` is Triton's: "cuda", or "cpu" for the interpreter."""
    forms: tuple[tuple[str, Backend], ...] = (device, "triton"), ("cpu", "numba")
    for where, form in forms:
        yield from of_size(where, 3, 6, 50, 4, timed=False, form=form)
        yield from of_size(where, 2, 39, 2100, 1, timed=False, form=form)
    yield from of_size("cpu", 4, 15, 49152, 8, timed=True, form="numba")
    if device == "cuda":
        for requests, nodes in ((1, 15), (32, 15), (64, 3)):
            yield from of_size(device, requests, nodes, 128256, 8, timed=True)


def of_size(
    device: str, requests: int, nodes: int, vocab: int, words: int, timed: bool, form: Backend = "triton"
) -> Iterator[Work]:
    """Both of one size: a tree of so many nodes for each request."""
    generator = torch.Generator(device).manual_seed(nodes)

    def draw(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).to(torch.int32)

    def chances(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    rows, slots = requests * (1 + nodes), requests + 2
    logits = torch.randn(rows, vocab, generator=generator, device=device)
    slot_of = torch.randperm(slots, generator=generator, device=device)[:requests].repeat_interleave(
        1 + nodes
    )
    offsets = torch.arange(1 + nodes, dtype=torch.int32, device=device).repeat(requests)
    parents = torch.tensor(binary(1 + nodes) * requests, dtype=torch.int32, device=device)
    start = torch.arange(0, rows + 1, 1 + nodes, dtype=torch.int32, device=device)
    # Few tokens, so that paths repeat what penalties count, and end as words begin.
    tokens, text = draw(4, rows), draw(4, slots, 40)
    penalties = [
        slot_of,
        tokens,
        offsets,
        ancestor_bits(parents, start, None, "torch"),
        1 + chances(slots),
        chances(slots),
        chances(slots),
        draw(2**31 - 1, slots, -(-vocab // 32), low=-(2**31)),
        draw(3, slots, vocab),
    ]
    starts = torch.arange(0, (words + 1) * WORD_TOKENS, WORD_TOKENS, dtype=torch.int32, device=device)
    lengths = torch.full((slots,), 8, dtype=torch.int32, device=device)
    bad_words = [
        slot_of,
        tokens,
        offsets,
        parents,
        draw(4, slots, words * WORD_TOKENS),
        starts.repeat(slots, 1),
        torch.full((slots,), words, dtype=torch.int32, device=device),
        text,
        lengths,
        lengths + 9,
    ]

    size = f"{requests} trees of {nodes} nodes, {vocab} tokens"
    kinds: list[tuple[str, Callable[..., None], list[Any], int]] = [
        ("penalties", penalise, penalties, 2 * logits.nbytes),
        ("bad words", forbid, [*bad_words, words], 0),
    ]
    for name, op, given, num_bytes in kinds:
        error = functools.partial(_difference, op, logits, given, form)
        call = functools.partial(op, logits, *given, form)
        # The readable form goes row by row: small sizes are checked, and large ones timed.
        checked = (lambda: 0.0) if timed else error
        yield Work(
            "path_penalties", form, f"{name}: {size}", checked, 0.0, call if timed else None, num_bytes
        )


def _difference(op: Callable[..., None], logits: torch.Tensor, given: Sequence[Any], form: Backend) -> float:
    results = []
    for backend in ("torch", form):
        results.append(logits.clone())
        op(results[-1], *given, backend)
    return float(not torch.equal(*results))
