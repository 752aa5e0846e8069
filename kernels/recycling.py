# SPDX-License-Identifier: Apache-2.0
"""Token Recycling's tables on the device: learning from verified rows, and growing trees, in a few launches a step.

The tables are those of `best_first_tree`, as tensors: rows of successors by token and by pair of tokens, and what
followed a longer context of text. A step takes three launches: `mark` says, for each key that the step's rows would
write, which row may (the accepted one that came last); `learn` finds each row's largest logits and writes; `grow` makes
the next trees. What is written depends on no order of execution, so tensor-parallel ranks draft alike.

A *mark* is a number that grows from call to call: nothing has to be cleared. Contexts are hashed from their last token
back, and then by their length: ``H = (H ^ token) * BASE`` modulo 2**64, from ``H = 0`` on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ext.kernels.backends import Backend, choose
from vllm_ext.kernels.device_trees import EMPTY, RowLayout, SlotTrees

MAX_CONTEXT = 8  # tokens of the longest context of text
PLACE_BITS = 24  # of a mark: which row of its call; above them the call's number
FIRST_CALL = 1 << 16  # marks have more than 32 bits from the first on, so that kernels are compiled once
UNIT = 1 << 20  # of a calibration count: one trial
LASTING = 200  # trials after which an older one counts for a third
# Odd numbers below 2**63, of no pattern.
BASE, SCRAMBLE = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51


class RecyclingTables(NamedTuple):
    """What followed which token, pair and context. Rows ``0 .. vocab - 1`` are tokens', the others pairs'."""

    successors: torch.Tensor  # int32 [vocab + pairs, width] best first, EMPTY behind the last one
    classes: torch.Tensor  # int32 [vocab + pairs, width] of each entry's share of its row; 0: from no logits
    pair_keys: torch.Tensor  # int64 [pairs], a power of two or none; 0: free
    text_keys: torch.Tensor  # int32 [texts], a power of two or none; 0: free
    text_successors: torch.Tensor  # int32 [texts] what followed that context last
    row_marks: torch.Tensor  # int64 [vocab + pairs] the largest mark so far
    text_marks: torch.Tensor  # int64 [texts]

    @classmethod
    def empty(cls, vocab: int, width: int, pairs: int, texts: int, device: torch.device) -> RecyclingTables:
        """Tables that know nothing."""

        def full(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            full(EMPTY, torch.int32, vocab + pairs, width),
            full(0, torch.int32, vocab + pairs, width),
            full(0, torch.int64, pairs),
            full(0, torch.int32, texts),
            full(EMPTY, torch.int32, texts),
            full(EMPTY, torch.int64, vocab + pairs),
            full(EMPTY, torch.int64, texts),
        )

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return len(self.successors) - len(self.pair_keys)


class Calibration(NamedTuple):
    """How often nodes were right, by group: level of the context, class of the entry, depth."""

    trials: torch.Tensor  # int64 [levels, bases, depths] in UNITs, fading
    hits: torch.Tensor  # int64 [levels, bases, depths]
    estimates: torch.Tensor  # float32 [levels, bases, depths] hits / trials
    tried: torch.Tensor  # int32 [levels * bases * depths] of the step that runs
    hit: torch.Tensor  # int32 [levels * bases * depths]

    @classmethod
    def of_prior(cls, prior: torch.Tensor, trials: float) -> Calibration:
        """Chances as they are before anything was counted, which count for so many trials.

        Args:
            prior: float64 ``[levels, bases, depths]``.
            trials: what it is worth.
        """
        counted = torch.full(prior.shape, int(trials * UNIT), dtype=torch.int64, device=prior.device)
        hits = (prior * (trials * UNIT)).to(torch.int64)
        nothing = torch.zeros(prior.numel(), dtype=torch.int32, device=prior.device)
        return cls(counted, hits, hits.float() / counted.float(), nothing, nothing.clone())


class Marks(NamedTuple):
    """What `mark` tells `learn` of each row."""

    rows: torch.Tensor  # int64 [rows] the row's mark; EMPTY: it teaches nothing
    pair_rows: torch.Tensor  # int32 [rows] the pair's place among all rows of the table; EMPTY: there is none
    pair_keys: torch.Tensor  # int64 [rows]
    texts: (
        torch.Tensor
    )  # int32 [rows, MAX_CONTEXT] by length of the context, the place of the text; EMPTY: none
    text_keys: torch.Tensor  # int32 [rows, MAX_CONTEXT]
    text_next: torch.Tensor  # int32 [rows] what followed

    @classmethod
    def of_size(cls, rows: int, device: torch.device) -> Marks:
        """Room for so many."""

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape, EMPTY, dtype=dtype, device=device)

        by_length = rows, MAX_CONTEXT
        return cls(
            empty(torch.int64, rows),
            empty(torch.int32, rows),
            empty(torch.int64, rows),
            empty(torch.int32, *by_length),
            empty(torch.int32, *by_length),
            empty(torch.int32, rows),
        )


class WalkedRows(NamedTuple):
    """The rows of a step and what became of them, as `walk` leaves them."""

    row_start: torch.Tensor  # int32 [requests + 1]
    slots: torch.Tensor  # int64 [requests]
    tokens: torch.Tensor  # int32 [rows] each row's input token
    positions: torch.Tensor  # int64 [rows] its position in the text
    accepted: torch.Tensor  # int32 [rows] 1 if it is part of the output; roots are
    emitted: torch.Tensor  # int64 [requests, most] what was put out
    num_emitted: torch.Tensor  # int32 [requests] 0 as long as a prompt is incomplete


def mark(
    tables: RecyclingTables,
    calibration: Calibration,
    verified: WalkedRows,
    layout: RowLayout | None,
    text: torch.Tensor,
    prefill_len: torch.Tensor,
    teaches: torch.Tensor,
    longest: int,
    call: int,
    marks: Marks,
    backend: Backend = "auto",
) -> None:
    """Find out which rows of a step may write what, and count how often their nodes were right.

    Args:
        tables: ``row_marks`` and ``text_marks`` are written to.
        calibration: ``tried`` and ``hit`` are added to.
        verified: the step.
        layout: of its trees; None: each row is a root.
        text: int32 ``[slots, tokens]`` of each slot, up to the root at least.
        prefill_len: int32 ``[slots]``: rows behind a root that stands before this are padding.
        teaches: int32 ``[slots]`` 0: the logits say what may come, not what would.
        longest: tokens of the longest context, 1 to MAX_CONTEXT; 1: neither pairs nor text.
        call: larger than in all calls before, of `record_prompts` too; at least FIRST_CALL.
        marks: written to.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, text):
        case "numba":
            from vllm_ext.kernels.recycling_numba import mark_numba as form
        case "triton":
            from vllm_ext.kernels.recycling_triton import mark_triton as form
        case _:
            from vllm_ext.kernels.recycling_ref import mark_ref as form
    form(tables, calibration, verified, layout, text, prefill_len, teaches, longest, call, marks)


def learn(
    tables: RecyclingTables,
    calibration: Calibration,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    shares: torch.Tensor,
    marks: Marks,
    backend: Backend = "auto",
) -> None:
    """Write what `mark` has allowed, and the estimates again.

    An entry's class is 1 + the number of ``shares`` below its part of the softmax over the row's ``width`` largest
    logits; in a pair's row ``len(shares) + 1`` more.

    Args:
        tables: written to.
        calibration: written to; ``tried`` and ``hit`` are 0 afterwards.
        logits: float32, bfloat16 or float16 ``[rows, vocab]``, last dimension contiguous.
        tokens: int32 ``[rows]`` each row's input token.
        shares: float32 ``[bounds]``, ascending.
        marks: as `mark` left them.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, logits):
        case "numba":
            from vllm_ext.kernels.recycling_numba import learn_numba as form
        case "triton":
            from vllm_ext.kernels.recycling_triton import learn_triton as form
        case _:
            from vllm_ext.kernels.recycling_ref import learn_ref as form
    form(tables, calibration, logits, tokens, shares, marks)


def record_prompts(
    tables: RecyclingTables,
    text: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    longest: int,
    call: int,
    backend: Backend = "auto",
) -> None:
    """Note the texts of requests that have come, and seed the rows of tokens that have no successor yet.

    Of a token that occurs more than once the last successor stays; of several requests the last one's.

    Args:
        tables: written to.
        text: int32 ``[slots, tokens]``.
        slots: int64 ``[requests]``.
        lengths: int32 ``[slots]`` tokens of each.
        most: no length is larger, as far as the host knows; below ``2**(PLACE_BITS - 3)``.
        longest: see `mark`.
        call: see `mark`; the next call's is larger by ``len(slots)`` at least.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, text):
        case "numba":
            from vllm_ext.kernels.recycling_numba import record_prompts_numba as form
        case "triton":
            from vllm_ext.kernels.recycling_triton import record_prompts_triton as form
        case _:
            from vllm_ext.kernels.recycling_ref import record_prompts_ref as form
    form(tables, text, slots, lengths, most, longest, call)


def grow(
    tables: RecyclingTables,
    estimates: torch.Tensor,
    text: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    chains: torch.Tensor,
    max_depths: torch.Tensor,
    template: torch.Tensor | None,
    longest: int,
    trees: SlotTrees,
    tokens: torch.Tensor,
    backend: Backend = "auto",
) -> None:
    """Grow a tree from the end of each text: open the newest node, then take the most probable unopened child.

    The children of a node are its pair's row, or its token's where the pair is unknown, and what followed the longest
    known context of text; see `best_first_tree.grow_trees` for their groups. Of equally probable children the one
    whose parent came first is taken, then the one of the lower rank; the text's own, where the row lacks it, is the
    last. A tree ends when no child has a chance above 0 that is no deeper than allowed.

    Args:
        tables: as recorded.
        estimates: float32 ``[levels, bases, depths]``: a child's chance by level of the text's context (0: none), class
            and depth, at greater depths the last one. ``levels`` is ``longest``.
        text: int32 ``[slots, tokens]``.
        lengths: int32 ``[slots]`` tokens of each text; the last one is the root.
        slots: int64 ``[requests]`` whose trees are grown, no two alike.
        chains: int32 ``[slots]`` not 0: consider the newest node's children alone.
        max_depths: int32 ``[slots]`` deepest node.
        template: int32 ``[positions, width]``: position 0 is the root, an entry the position of the child of that
            rank, -1 where there is none; None: any shape.
        longest: see `mark`.
        trees: written to at ``slots``.
        tokens: int64 ``[requests, nodes]``, written to: of padding the root's.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, tokens):
        case "numba":
            from vllm_ext.kernels.recycling_numba import grow_numba as form
        case "triton":
            from vllm_ext.kernels.recycling_grow_triton import grow_triton as form
        case _:
            from vllm_ext.kernels.recycling_ref import grow_ref as form
    form(tables, estimates, text, lengths, slots, chains, max_depths, template, longest, trees, tokens)
