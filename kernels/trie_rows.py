# SPDX-License-Identifier: Apache-2.0
"""What tries allow behind rows of trees, where the text is on the device: nothing is read by the host.

Each request keeps the state behind its output from step to step; a row goes on from there along its path. Several tries
lie behind each other in the arrays of one (`join`).

Source: STATIC, arXiv 2602.22647; see `trie.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_ext.kernels.backends import Backend, choose
from vllm_ext.kernels.trie import ROOT, Trie

NO_TRIE = -1


class DeviceTries(NamedTuple):
    """Of `join`: trie ``i`` begins with state ``roots[i]``, and the edge ``e`` leads to state ``e + 1 + i``."""

    first_edge: torch.Tensor  # int32 [states + 1]
    tokens: torch.Tensor  # int32 [edges]
    final: torch.Tensor  # bool [states]
    roots: torch.Tensor  # int32 [tries]


class SlotTries(NamedTuple):
    """By slot, which trie its request is under."""

    which: torch.Tensor  # int32 [slots]; NO_TRIE: none
    end: torch.Tensor  # int32 [slots] the token that ends the request
    state: (
        torch.Tensor
    )  # int32 [slots] behind so much of the output; DEAD: behind the end, or behind no prefix
    num_read: torch.Tensor  # int32 [slots] of it

    @classmethod
    def of_size(cls, slots: int, device: torch.device) -> SlotTries:
        """None is under any."""
        none = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(3))
        return cls(torch.full((slots,), NO_TRIE, dtype=torch.int32, device=device), *none)


def join(tries: Sequence[Trie], device: torch.device) -> DeviceTries:
    """All of them, on a device.

    Raises:
        ValueError: they have more than 2**31 - 1 states together.
    """
    states = np.cumsum([0, *(trie.num_states for trie in tries)], dtype=np.int64)
    if states[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"the tries have {states[-1]} states together; at most {np.iinfo(np.int32).max} are possible"
        )
    edges = np.cumsum([0, *(len(trie.tokens) for trie in tries)], dtype=np.int64)
    first_edge = [trie.first_edge[:-1] + np.int32(start) for trie, start in zip(tries, edges, strict=False)]
    parts = (
        np.concatenate([*first_edge, edges[-1:]]).astype(np.int32),
        np.concatenate([trie.tokens for trie in tries]),
        np.concatenate([trie.final for trie in tries]),
        (states[:-1] + ROOT).astype(np.int32),
    )
    return DeviceTries(*(torch.from_numpy(part).to(device) for part in parts))


def catch_up(
    tries: DeviceTries,
    of_slots: SlotTries,
    slots: torch.Tensor,
    text: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    backend: Backend = "auto",
) -> None:
    """Bring the states of some slots behind all of their output.

    Args:
        tries: any.
        of_slots: ``state`` and ``num_read`` are written.
        slots: int ``[requests]``.
        text: int32 ``[slots, tokens]``.
        prompt_len: int32 ``[slots]``.
        total_len: int32 ``[slots]`` tokens of the text.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    _form("catch_up", backend, text)(tries, of_slots, slots, text, prompt_len, total_len)


def mask_trie_rows(
    logits: torch.Tensor,
    tries: DeviceTries,
    of_slots: SlotTries,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    ancestor_bits: torch.Tensor | None,
    backend: Backend = "auto",
) -> None:
    """Set to -inf what may not come behind each row's path; behind an end, or no prefix, the end token alone may.

    Args:
        logits: float32 ``[rows, vocab]``, written to; last dimension contiguous.
        tries: any.
        of_slots: as `catch_up` has left it.
        slots: int ``[rows]`` whose a row is.
        tokens: int ``[rows]`` each row's input token; below 0: behind the end of a path.
        offsets: int32 ``[rows]`` place of a row among its request's, which stand together, the root first.
        ancestor_bits: int32 ``[rows, WORDS]`` bit b of word w: row 32 * w + b of the request is on this row's path;
            None: all rows before it are.
        backend: as in `catch_up`.
    """
    _form("mask_trie_rows", backend, logits)(logits, tries, of_slots, slots, tokens, offsets, ancestor_bits)


def _form(name: str, backend: Backend, tensor: torch.Tensor) -> Any:
    form = {"torch": "ref"}.get(chosen := choose(backend, tensor), chosen)
    return getattr(importlib.import_module(f"vllm_ext.kernels.trie_rows_{form}"), name)
