# SPDX-License-Identifier: Apache-2.0
"""`recycling` on the CPU: the loops of `recycling_ref`, for numba. Hashes are int64, which wrap as they should."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import as_arrays
from vllm_ext.kernels.device_trees import EMPTY, RowLayout, SlotTrees
from vllm_ext.kernels.recycling import (
    BASE,
    LASTING,
    PLACE_BITS,
    SCRAMBLE,
    UNIT,
    Calibration,
    Marks,
    RecyclingTables,
    WalkedRows,
)
from vllm_ext.kernels.recycling_ref import entry_classes
from vllm_ext.kernels.top_k import top_k_ids

PLACES = (1 << PLACE_BITS) - 1


def mark_numba(
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
) -> None:
    """See `vllm_ext.kernels.recycling.mark`."""
    _compiled("_mark")(
        as_arrays(tables),
        calibration.tried.numpy(),
        calibration.hit.numpy(),
        as_arrays(verified),
        None if layout is None else as_arrays(layout),
        text.numpy(),
        prefill_len.numpy(),
        teaches.numpy(),
        longest,
        call << PLACE_BITS,
        as_arrays(marks),
    )


def learn_numba(
    tables: RecyclingTables,
    calibration: Calibration,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    shares: torch.Tensor,
    marks: Marks,
) -> None:
    """See `vllm_ext.kernels.recycling.learn`."""
    top = top_k_ids(logits, tables.successors.shape[1], "numba")
    classes = entry_classes(logits, top.to(torch.int64), shares)
    _compiled("_learn")(
        as_arrays(tables), tokens.numpy(), top.numpy(), classes.numpy(), len(shares) + 1, as_arrays(marks)
    )
    _compiled("_count")(*(part.view(-1).numpy() for part in calibration))


def record_prompts_numba(
    tables: RecyclingTables,
    text: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    longest: int,
    call: int,
) -> None:
    """See `vllm_ext.kernels.recycling.record_prompts`."""
    _compiled("_record_prompts")(
        as_arrays(tables), text.numpy(), slots.numpy(), lengths.numpy(), longest, call << PLACE_BITS
    )


def grow_numba(
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
) -> None:
    """See `vllm_ext.kernels.recycling.grow`."""
    _compiled("_grow")(
        as_arrays(tables),
        estimates.numpy(),
        text.numpy(),
        lengths.numpy(),
        slots.numpy(),
        chains.numpy(),
        max_depths.numpy(),
        None if template is None else template.numpy(),
        longest,
        as_arrays(trees),
        tokens.numpy(),
    )


@functools.cache
def _compiled(name: str) -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


@numba.njit  # type: ignore[untyped-decorator]
def _with_token(hashed: int, token: int) -> int:
    """The hash of a context that is longer by this token."""
    return (hashed ^ token) * BASE


@numba.njit  # type: ignore[untyped-decorator]
def _scrambled(value: int) -> int:
    value = value * SCRAMBLE
    return (value ^ (value >> 32 & 0xFFFFFFFF)) * SCRAMBLE


@numba.njit  # type: ignore[untyped-decorator]
def _text_place(hashed: int, length: int, texts: int) -> tuple[int, int]:
    """Where the successor of a context stands, and its key there."""
    mixed = _scrambled(_with_token(hashed, length))
    return mixed >> 40 & texts - 1, (mixed >> 8 & 0x3FFFFFFF) + 1


@numba.njit  # type: ignore[untyped-decorator]
def _pair_place(previous: int, token: int, pairs: int) -> tuple[int, int]:
    """Where the row of a pair stands behind the tokens' rows, and its key there."""
    mixed = _scrambled(_with_token(_with_token(0, token), previous))
    return mixed >> 40 & pairs - 1, (previous << 32) + token + 1


def _mark(
    tables: Any,
    tried: Any,
    hit: Any,
    verified: Any,
    layout: Any,
    text: Any,
    prefill_len: Any,
    teaches: Any,
    longest: int,
    number: int,
    marks: Any,
) -> None:
    vocab = len(tables.successors) - len(tables.pair_keys)
    row_marks, text_marks = tables.row_marks, tables.text_marks
    tokens, accepted = verified.tokens, verified.accepted
    for request in range(len(verified.slots)):
        slot = verified.slots[request]
        start, end = verified.row_start[request], verified.row_start[request + 1]
        if start == end:
            continue
        root_at = verified.positions[start]
        has_tree = layout is not None and root_at >= prefill_len[slot]
        for at in range(start, end):
            marks.rows[at] = marks.pair_rows[at] = marks.pair_keys[at] = marks.text_next[at] = EMPTY
            marks.texts[at] = marks.text_keys[at] = EMPTY
            parent = np.int64(EMPTY)
            if layout is not None and has_tree and at > start:
                parent = np.int64(layout.parents[at])
            if at > start and parent < 0:
                continue
            token = tokens[at]
            if teaches[slot]:
                own = number + (np.int64(accepted[at]) << 20) + at
                marks.rows[at] = own
                if 0 <= token < vocab:
                    row_marks[token] = max(row_marks[token], own)
                previous = np.int64(EMPTY)
                if at > start:
                    previous = np.int64(tokens[start + parent])
                elif root_at > 0:
                    previous = np.int64(text[slot, root_at - 1])
                if longest > 1 and previous >= 0:
                    place, key = _pair_place(previous, token, len(tables.pair_keys))
                    place += vocab
                    marks.pair_rows[at], marks.pair_keys[at] = place, key
                    row_marks[place] = max(row_marks[place], own)
                if layout is not None and at > start and accepted[start + parent]:
                    group = layout.groups[at]
                    if group >= 0:
                        tried[group] += 1
                        hit[group] += accepted[at]
            if not accepted[at]:
                continue
            depth = 0
            if layout is not None:
                above = at - start
                while above > 0:
                    above = np.int64(layout.parents[start + above])
                    depth += 1
            if depth >= verified.num_emitted[request]:
                continue
            marks.text_next[at] = verified.emitted[request, depth]
            hashed = 0
            for back in range(min(longest, root_at + depth + 1)):
                there = root_at + depth - back
                context = np.int64(tokens[start])
                if there > root_at:
                    context = verified.emitted[request, there - root_at - 1]
                elif there < root_at:
                    context = np.int64(text[slot, there])
                hashed = _with_token(hashed, context)
                if back > 0:
                    place, key = _text_place(hashed, back + 1, len(tables.text_keys))
                    marks.texts[at, back], marks.text_keys[at, back] = place, key
                    text_marks[place] = max(text_marks[place], number + np.int64(at) * 8 + back)


def _learn(tables: Any, tokens: Any, top: Any, classes: Any, levels: int, marks: Any) -> None:
    vocab, width = len(tables.successors) - len(tables.pair_keys), top.shape[1]
    for row in range(len(tokens)):
        own, token, pair = marks.rows[row], tokens[row], marks.pair_rows[row]
        if own >= 0 and 0 <= token < vocab and tables.row_marks[token] == own:
            for rank in range(width):
                tables.successors[token, rank] = top[row, rank]
                tables.classes[token, rank] = classes[row, rank]
        if own >= 0 and pair >= 0 and tables.row_marks[pair] == own:
            tables.pair_keys[pair - vocab] = marks.pair_keys[row]
            for rank in range(width):
                tables.successors[pair, rank] = top[row, rank]
                tables.classes[pair, rank] = classes[row, rank] + levels
        for column in range(marks.texts.shape[1]):
            place = marks.texts[row, column]
            # Which call it was stands in the mark of the place.
            if place >= 0 and tables.text_marks[place] & PLACES == row * 8 + column:
                tables.text_keys[place] = marks.text_keys[row, column]
                tables.text_successors[place] = marks.text_next[row]


def _count(trials: Any, hits: Any, estimates: Any, tried: Any, hit: Any) -> None:
    for group in range(len(trials)):
        now = np.int64(tried[group])
        fading = min(now, LASTING)
        trials[group] += now * UNIT - trials[group] * fading // LASTING
        hits[group] += np.int64(hit[group]) * UNIT - hits[group] * fading // LASTING
        estimates[group] = np.float32(hits[group]) / np.float32(max(trials[group], 1))
        tried[group] = hit[group] = 0


def _record_prompts(tables: Any, text: Any, slots: Any, lengths: Any, longest: int, number: int) -> None:
    vocab = len(tables.successors) - len(tables.pair_keys)
    # From the last on: of what is written to one place the first stays.
    for request in range(len(slots) - 1, -1, -1):
        tokens = text[slots[request]]
        for place in range(lengths[slots[request]] - 1, 0, -1):
            token, successor = tokens[place - 1], tokens[place]
            if not (0 <= token < vocab and 0 <= successor < vocab):
                continue
            own = number + (request << PLACE_BITS) + place * 8
            tables.row_marks[token] = max(tables.row_marks[token], own)
            if tables.successors[token, 0] == EMPTY:
                tables.successors[token, 0] = successor
                tables.classes[token, 0] = 0
            hashed = _with_token(0, token)
            for back in range(1, min(longest, place)):
                hashed = _with_token(hashed, tokens[place - 1 - back])
                there, key = _text_place(hashed, back + 1, len(tables.text_keys))
                if tables.text_marks[there] < own + back:
                    tables.text_marks[there] = own + back
                    tables.text_keys[there], tables.text_successors[there] = key, successor


def _grow(
    tables: Any,
    estimates: Any,
    text: Any,
    lengths: Any,
    slots: Any,
    chains: Any,
    max_depths: Any,
    template: Any,
    longest: int,
    trees: Any,
    tokens: Any,
) -> None:
    vocab, width = len(tables.successors) - len(tables.pair_keys), tables.successors.shape[1]
    bases, depths = estimates.shape[1:]
    nodes = tokens.shape[1]
    # Children that may be taken, in the order of their parents. A taken one stays, with no chance.
    child_chance = np.empty(nodes * (width + 1), np.float32)
    child_parent = np.empty(nodes * (width + 1), np.int32)
    child_token = np.empty(nodes * (width + 1), np.int32)
    child_group = np.empty(nodes * (width + 1), np.int32)
    child_place = np.empty(nodes * (width + 1), np.int32)
    for request in range(len(slots)):
        slot = slots[request]
        parents, levels = trees.parents[slot], trees.depths[slot]
        bits, groups = trees.bits[slot], trees.groups[slot]
        parents[:] = groups[:] = EMPTY
        levels[:] = 1
        levels[0] = 0
        bits[:] = 0
        for row in range(1 + nodes):
            bits[row, row // 32] = np.int32(1) << np.int32(row % 32)
        last = lengths[slot] - 1
        tokens[request] = text[slot, last]
        size = 0
        row, position, chance = 0, 0, np.float32(1.0)
        for node in range(1, 1 + nodes):
            if chains[slot]:
                size = 0
            depth = levels[row]
            if depth < max_depths[slot]:
                # What is known of this context: its pair's row or its token's, and what followed its longest in text.
                opened = tokens[request, row - 1] if row else np.int64(text[slot, last])
                table_row, from_pair = opened, False
                successor, level = EMPTY, 0
                above, hashed = row, _with_token(0, opened)
                for back in range(1, min(longest, last + 1 + depth)):
                    if back > depth:
                        context = np.int64(text[slot, last + depth - back])
                    else:
                        above = parents[above]
                        context = tokens[request, above - 1] if above else np.int64(text[slot, last])
                    hashed = _with_token(hashed, context)
                    if back == 1:
                        place, key = _pair_place(context, opened, len(tables.pair_keys))
                        if tables.pair_keys[place] == key:
                            table_row, from_pair = vocab + place, True
                    place, key = _text_place(hashed, back + 1, len(tables.text_keys))
                    if tables.text_keys[place] == key:
                        successor, level = tables.text_successors[place], back
                known, lacks = False, successor != EMPTY
                for rank in range(width + 1):
                    if rank < width:
                        token = tables.successors[table_row, rank]
                        if token == EMPTY:
                            continue
                        base = tables.classes[table_row, rank]
                        known = True
                    elif lacks:  # the text's own
                        token = successor
                        base = 0
                        if known and tables.classes[table_row, 0] > 0:
                            base = bases - (1 if from_pair else 2)
                    else:
                        continue
                    if token == successor:
                        base += level * bases
                        lacks = False
                    place = 0
                    if template is not None:
                        place = template[position, rank] if rank < width else EMPTY
                    group = base * depths + min(depth, depths - 1)
                    own = chance * estimates.flat[group]
                    if place >= 0 and own > 0:
                        child_chance[size], child_parent[size] = own, row
                        child_token[size], child_group[size], child_place[size] = token, group, place
                        size += 1
            best, chance = -1, np.float32(0.0)
            for child in range(size):
                if child_chance[child] > chance:  # of equals the first
                    best, chance = child, child_chance[child]
            if best < 0:
                break
            child_chance[best] = 0.0
            parent = child_parent[best]
            row, position = node, child_place[best]
            tokens[request, node - 1] = child_token[best]
            parents[node] = parent
            levels[node] = levels[parent] + 1
            groups[node] = child_group[best]
            for word in range(bits.shape[1]):
                bits[node, word] |= bits[parent, word]
