# SPDX-License-Identifier: Apache-2.0
"""`recycling` as it is defined, one row at a time: the readable form the others are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
from vllm_ext.kernels.top_k import top_k_ids

WORD = (1 << 64) - 1


def hash_of(tokens: Sequence[int]) -> int:
    """``H`` of a context, oldest first; below 2**64."""
    value = 0
    for token in reversed(tokens):
        value = (value ^ token & WORD) * BASE & WORD
    return value


def scrambled(value: int) -> int:
    """All bits depend on all others' lower ones, and then on the higher ones; below 2**64."""
    value = value * SCRAMBLE & WORD
    return (value ^ value >> 32) * SCRAMBLE & WORD


def text_place(context: Sequence[int], texts: int) -> tuple[int, int]:
    """Where a context's successor stands, and its key there."""
    mixed = scrambled((hash_of(context) ^ len(context)) * BASE & WORD)
    return mixed >> 40 & texts - 1, (mixed >> 8 & 0x3FFFFFFF) + 1


def pair_place(tables: RecyclingTables, previous: int, token: int) -> tuple[int, int]:
    """Where a pair's row stands, and its key there."""
    place = scrambled(hash_of((previous, token))) >> 40 & len(tables.pair_keys) - 1
    return tables.vocab + place, (previous << 32) + token + 1


def mark_ref(
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
    for request, slot in enumerate(verified.slots.tolist()):
        start, end = verified.row_start[request : request + 2].tolist()
        root_at = int(verified.positions[start])
        before = text[slot, :root_at].tolist()
        tokens = verified.tokens[start:end].tolist()
        accepted = verified.accepted[start:end].tolist()
        emitted = verified.emitted[request, : int(verified.num_emitted[request])].tolist()
        has_tree = layout is not None and root_at >= int(prefill_len[slot])
        parents = (
            layout.parents[start:end].tolist() if layout is not None and has_tree else [EMPTY] * (end - start)
        )
        for row, token in enumerate(tokens):
            at = start + row
            for part in marks:
                part[at] = EMPTY
            if row and parents[row] < 0:
                continue
            if teaches[slot]:
                own = (call << PLACE_BITS) + (accepted[row] << 20) + at
                marks.rows[at] = own
                if 0 <= token < tables.vocab:
                    tables.row_marks[token] = max(int(tables.row_marks[token]), own)
                previous = tokens[parents[row]] if row else (before[-1] if before else EMPTY)
                if longest > 1 and previous >= 0:
                    place, key = pair_place(tables, previous, token)
                    marks.pair_rows[at], marks.pair_keys[at] = place, key
                    tables.row_marks[place] = max(int(tables.row_marks[place]), own)
                if row and layout is not None and accepted[parents[row]]:
                    group = int(layout.groups[at])
                    if group >= 0:
                        calibration.tried[group] += 1
                        calibration.hit[group] += accepted[row]
            if accepted[row] and emitted:
                depth = 0
                above = row
                while above:
                    above, depth = parents[above], depth + 1
                if depth < len(emitted):
                    marks.text_next[at] = emitted[depth]
                    whole = [*before, tokens[0], *emitted[:depth]]
                    for length in range(2, min(longest, len(whole)) + 1):
                        place, key = text_place(whole[-length:], len(tables.text_keys))
                        marks.texts[at, length - 1], marks.text_keys[at, length - 1] = place, key
                        own = (call << PLACE_BITS) + at * 8 + length - 1
                        tables.text_marks[place] = max(int(tables.text_marks[place]), own)


def entry_classes(logits: torch.Tensor, top: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """int64 ``[rows, width]`` of each of a row's largest logits: 1 + the number of shares below its part of them."""
    weights = logits.gather(1, top).float()
    weights = torch.exp(weights - weights[:, :1])
    return 1 + ((weights / weights.sum(1, keepdim=True))[..., None] > shares).sum(-1)


def learn_ref(
    tables: RecyclingTables,
    calibration: Calibration,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    shares: torch.Tensor,
    marks: Marks,
) -> None:
    """See `vllm_ext.kernels.recycling.learn`."""
    width = tables.successors.shape[1]
    top = top_k_ids(logits, width, "torch").to(torch.int64)
    classes = entry_classes(logits, top, shares)
    for row, token in enumerate(tokens.tolist()):
        own = int(marks.rows[row])
        if own >= 0:
            if 0 <= token < tables.vocab and tables.row_marks[token] == own:
                tables.successors[token] = top[row].to(torch.int32)
                tables.classes[token] = classes[row].to(torch.int32)
            pair = int(marks.pair_rows[row])
            if pair >= 0 and tables.row_marks[pair] == own:
                tables.successors[pair] = top[row].to(torch.int32)
                tables.classes[pair] = (classes[row] + len(shares) + 1).to(torch.int32)
                tables.pair_keys[pair - tables.vocab] = marks.pair_keys[row]
        for column, place in enumerate(marks.texts[row].tolist()):
            # Which call it was stands in the mark of the place.
            if place >= 0 and int(tables.text_marks[place]) & (1 << PLACE_BITS) - 1 == row * 8 + column:
                tables.text_keys[place] = marks.text_keys[row, column]
                tables.text_successors[place] = marks.text_next[row]
    tried, hit = calibration.tried.to(torch.int64), calibration.hit.to(torch.int64)
    fading = tried.clamp(max=LASTING)
    for total, now in ((calibration.trials, tried), (calibration.hits, hit)):
        flat = total.view(-1)
        flat += now * UNIT - flat * fading // LASTING
    calibration.estimates[:] = calibration.hits.float() / calibration.trials.clamp(min=1).float()
    calibration.tried.zero_()
    calibration.hit.zero_()


def record_prompts_ref(
    tables: RecyclingTables,
    text: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    longest: int,
    call: int,
) -> None:
    """See `vllm_ext.kernels.recycling.record_prompts`."""
    seeded: dict[int, int] = {}
    for number, slot in enumerate(slots.tolist()):
        tokens = text[slot, : int(lengths[slot])].tolist()
        for place in range(1, len(tokens)):
            own = (call + number << PLACE_BITS) + place * 8
            token, successor = tokens[place - 1 : place + 1]
            if not (0 <= token < tables.vocab and 0 <= successor < tables.vocab):
                continue
            if tables.successors[token, 0] == EMPTY or token in seeded:
                seeded[token] = successor
            tables.row_marks[token] = max(int(tables.row_marks[token]), own)
            for length in range(2, min(longest, place) + 1):
                there, key = text_place(tokens[place - length : place], len(tables.text_keys))
                tables.text_marks[there] = max(int(tables.text_marks[there]), own + length - 1)
                tables.text_keys[there], tables.text_successors[there] = key, successor
    for token, successor in seeded.items():
        tables.successors[token, 0] = successor
        tables.classes[token, 0] = 0


def grow_ref(
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
    _, bases, depths = estimates.shape
    padding = SlotTrees.of_size(1, tokens.shape[1], tokens.device)
    width = tables.successors.shape[1]

    def children(context: list[int]) -> list[tuple[int, int, int]]:
        """Rank, token, and base with its level."""
        row, from_pair = context[-1], False
        if longest > 1 and len(context) > 1:
            place, key = pair_place(tables, *context[-2:])
            if tables.pair_keys[place - tables.vocab] == key:
                row, from_pair = place, True
        successor, level = EMPTY, 0
        for length in range(2, min(longest, len(context)) + 1):
            place, key = text_place(context[-length:], len(tables.text_keys))
            if tables.text_keys[place] == key:
                successor, level = int(tables.text_successors[place]), length - 1
        known = [
            (rank, token, int(tables.classes[row, rank]) + (level * bases if token == successor else 0))
            for rank, token in enumerate(tables.successors[row].tolist())
            if token != EMPTY
        ]
        if successor != EMPTY and successor not in (token for _, token, _ in known):
            from_logits = bool(known) and int(tables.classes[row, 0]) > 0
            absent = bases - (1 if from_pair else 2)
            known.append((width, successor, level * bases + (absent if from_logits else 0)))
        return known

    for request, slot in enumerate(slots.tolist()):
        for part, empty in zip(trees, padding, strict=True):
            part[slot] = empty[0]
        before = text[slot, : int(lengths[slot])].tolist()
        tokens[request] = before[-1]
        # Chance, row of the parent, token, group, position in the template; the best one is taken each time.
        unopened: list[tuple[float, int, int, int, int]] = []
        paths: list[list[int]] = [[]]
        chance, row, position = torch.tensor(1.0), 0, 0
        for node in range(1, 1 + tokens.shape[1]):
            if chains[slot]:
                unopened.clear()
            depth = int(trees.depths[slot, row])
            if depth < max_depths[slot]:
                for rank, token, base in children(before + paths[row]):
                    place = 0
                    if template is not None:
                        place = int(template[position, rank]) if rank < width else EMPTY
                    group = base * depths + min(depth, depths - 1)
                    own = float(chance * estimates.view(-1)[group])
                    if place >= 0 and own > 0:
                        unopened.append((own, row, token, group, place))
            if not unopened:
                break
            best = max(unopened, key=lambda child: child[0])  # the first of equals
            unopened.remove(best)
            parent, row, position = best[1], node, best[4]
            chance = torch.tensor(best[0])
            paths.append([*paths[parent], best[2]])
            tokens[request, node - 1] = best[2]
            trees.parents[slot, node] = parent
            trees.depths[slot, node] = trees.depths[slot, parent] + 1
            trees.bits[slot, node] |= trees.bits[slot, parent]
            trees.groups[slot, node] = best[3]
