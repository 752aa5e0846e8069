# SPDX-License-Identifier: Apache-2.0
"""Masks of tries behind the rows of trees, next to the readable form."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tree_cases import binary
from work import Work

from vllm_ext.kernels import trie
from vllm_ext.kernels.ancestor_bits import ancestor_bits
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.trie_rows import SlotTries, catch_up, join, mask_trie_rows

OUTPUT = 2  # tokens that a request has put out
LENGTH = 4  # of an answer
CODES = 2048  # tokens that answers are made of, as in generative retrieval


def works(device: str) -> Iterator[Work]:
    """All of them; ``device`` is Triton's: "cuda", or "cpu" for the interpreter."""
    forms: tuple[tuple[str, Backend], ...] = (device, "triton"), ("cpu", "numba")
    for where, form in forms:
        yield of_size(where, 3, 6, 50, 2000, timed=False, form=form)
    yield of_size("cpu", 4, 15, 49152, 100_000, timed=True, form="numba")
    if device == "cuda":
        for requests in (1, 32):
            yield of_size(device, requests, 15, 128256, 1_000_000, timed=True)


def of_size(
    device: str, requests: int, nodes: int, vocab: int, answers: int, timed: bool, form: Backend = "triton"
) -> Work:
    """The step of a batch of one tree for each request, half of whose nodes are allowed."""
    draw = np.random.default_rng(nodes)
    high = min(CODES, vocab)
    sequences = draw.integers(0, high, (answers, LENGTH)).astype(np.int32)
    tries = join([trie.build(sequences)], torch.device(device))
    rows, slots = requests * (1 + nodes), requests + 1
    picked = sequences[draw.integers(0, answers, requests)]
    text = torch.from_numpy(np.pad(picked, ((0, 1), (0, 0)))).to(device)
    tokens = draw.integers(0, high, (requests, 1 + nodes))
    tokens[:, 1:] = np.where(draw.random((requests, nodes)) < 0.5, picked[:, OUTPUT, None], tokens[:, 1:])
    of_slots = SlotTries.of_size(slots, torch.device(device))
    of_slots.which[:requests] = 0

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    start = ints(range(0, rows + 1, 1 + nodes))
    bits = ancestor_bits(ints(binary(1 + nodes) * requests), start, None, "torch")
    batch = torch.arange(requests, device=device)
    behind = batch, text, ints([0] * slots), ints([OUTPUT] * slots)
    of_rows = (
        batch.repeat_interleave(1 + nodes),
        ints(tokens.ravel()),
        ints([*range(1 + nodes)] * requests),
        bits,
    )
    generator = torch.Generator(device).manual_seed(nodes)
    logits = torch.randn(rows, vocab, generator=generator, device=device)

    def step(into: torch.Tensor, backend: Backend) -> None:
        catch_up(tries, of_slots, *behind, backend)
        mask_trie_rows(into, tries, of_slots, *of_rows, backend)

    def error() -> float:
        results = logits.clone(), logits.clone()
        for result, backend in zip(results, ("torch", form), strict=True):
            of_slots.num_read.zero_()
            step(result, backend)
        return float(not torch.equal(*results))

    size = f"{requests} trees of {nodes} nodes, {vocab} tokens, {answers} answers"
    call = functools.partial(step, logits, form) if timed else None
    return Work("trie_rows", form, size, (lambda: 0.0) if timed else error, 0.0, call, logits.nbytes)
