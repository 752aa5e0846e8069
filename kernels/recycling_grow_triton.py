# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`recycling.grow` on CUDA: one program, of one warp, for each request."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.device_trees import WORDS, SlotTrees
from vllm_ext.kernels.recycling import RecyclingTables
from vllm_ext.kernels.recycling_places_triton import pair_place, text_place, with_token


def grow_triton(
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
    requests, nodes = tokens.shape
    width = tables.successors.shape[1]
    if requests == 0:
        return
    with torch.cuda.device_of(tokens):
        _grow[(requests,)](
            *tables[:5],
            estimates,
            text,
            text.stride(0),
            lengths,
            slots,
            chains,
            max_depths,
            template,
            *trees,
            tokens,
            nodes,
            width,
            estimates.shape[1],
            estimates.shape[2],
            tables.vocab,
            len(tables.pair_keys),
            len(tables.text_keys),
            LONGEST=longest,
            ROWS=triton.next_power_of_2(1 + nodes),
            RANKS=triton.next_power_of_2(width + 1),  # the last is the text's own
            WORDS=WORDS,
            WORDS_UP=triton.next_power_of_2(WORDS),
            num_warps=1 if nodes < 32 else 4,
        )


@triton.jit
def _grow(
    successors,
    classes,
    pair_keys,
    text_keys,
    text_successors,
    estimates,
    text,
    text_stride,
    lengths,
    slots,
    chains,
    max_depths,
    template,
    parents,
    depths,
    bits,
    groups,
    tokens,
    nodes,
    width,
    num_bases,
    num_depths,
    vocab,
    pairs,
    texts,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_UP: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    chain = tl.load(chains + slot)
    max_depth = tl.load(max_depths + slot)
    last = tl.load(lengths + slot) - 1
    text += slot * text_stride
    root = tl.load(text + last).to(tl.int64)
    child = tl.arange(0, ROWS * RANKS)
    parent_of = child // RANKS  # a child's place is its parent's row times RANKS, plus its rank
    rank_of = child % RANKS
    chance = tl.full([ROWS * RANKS], -1.0, tl.float32)
    token_of = tl.zeros([ROWS * RANKS], tl.int64)
    group_of = tl.zeros([ROWS * RANKS], tl.int32)
    position_of = tl.zeros([ROWS * RANKS], tl.int32)
    row = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS_UP)
    row_depth = tl.where(row == 0, 0, 1)
    row_parent = tl.full([ROWS], -1, tl.int32)
    row_group = tl.full([ROWS], -1, tl.int32)
    row_token = tl.zeros([ROWS], tl.int64) + root
    row_bits = tl.where((row // 32)[:, None] == word[None, :], (1 << (row % 32))[:, None], 0)

    opened = 0
    opened_token = root
    opened_chance = 1.0
    opened_depth = 0
    opened_position = 0
    for node in range(1, nodes + 1):
        if chain != 0:
            chance = tl.full([ROWS * RANKS], -1.0, tl.float32)
        # What is known of this context: its pair's row or its token's, and what followed its longest in text.
        table_row = opened_token
        from_pair = opened_token < 0
        level = 0
        successor = tl.full([], -1, tl.int64)
        above = opened
        into_text = 0
        hashed = with_token(tl.zeros_like(opened_token), opened_token)
        for back in tl.static_range(1, LONGEST):
            into_text = tl.where(above == 0, into_text + 1, 0)
            above = tl.where(above == 0, 0, tl.sum(tl.where(row == above, row_parent, 0), 0))
            there = (into_text == 0) | (into_text <= last)
            of_tree = tl.sum(tl.where(row == above, row_token, 0), 0)
            of_text = tl.load(text + last - into_text, mask=there, other=0).to(tl.int64)
            context = tl.where(into_text == 0, of_tree, of_text)
            hashed = with_token(hashed, context)
            if back == 1:
                place, key = pair_place(context, opened_token, pairs)
                found = there & (context >= 0)
                from_pair = found & (tl.load(pair_keys + place, mask=found, other=0) == key)
                table_row = tl.where(from_pair, vocab + place, opened_token)
            where, tag = text_place(hashed, back + 1, texts)
            seen = there & (tl.load(text_keys + where, mask=there, other=0) == tag)
            successor = tl.where(
                seen, tl.load(text_successors + where, mask=seen, other=-1).to(tl.int64), successor
            )
            level = tl.where(seen, back, level)

        new = (parent_of == tl.where(opened_depth < max_depth, opened, ROWS)) & (rank_of <= width)
        of_row = new & (rank_of < width)
        token = tl.load(successors + table_row * width + rank_of, mask=of_row, other=-1).to(tl.int64)
        entry = tl.load(classes + table_row * width + rank_of, mask=of_row, other=0)
        said = (token == successor) & (token >= 0)
        if LONGEST > 1:
            first_class = tl.sum(tl.where(of_row & (rank_of == 0) & (token >= 0), entry, 0), 0)
            absent = tl.where(first_class > 0, tl.where(from_pair, num_bases - 1, num_bases - 2), 0)
            lacks = (successor >= 0) & (tl.sum(said.to(tl.int32), 0) == 0)
            own = new & (rank_of == width) & lacks
            token = tl.where(own, successor, token)
            entry = tl.where(own, absent, entry)
            entry = tl.where(own | said, entry + level * num_bases, entry)
        group = entry * num_depths + tl.minimum(opened_depth, num_depths - 1)
        new = new & (token >= 0)
        if template is not None:
            position = tl.load(
                template + opened_position * width + rank_of, mask=new & (rank_of < width), other=-1
            )
            position_of = tl.where(new, position, position_of)
            new = new & (position >= 0)
        chance_here = opened_chance * tl.load(estimates + group, mask=new, other=0.0)
        new = new & (chance_here > 0.0)
        chance = tl.where(new, chance_here, chance)
        token_of = tl.where(new, token, token_of)
        group_of = tl.where(new, group, group_of)

        best = tl.max(chance, 0)
        # Once there is none there is none any more: what was opened last is then opened again, in vain.
        there = best > 0.0
        place = tl.min(tl.where(chance == best, child, ROWS * RANKS), 0)
        at = child == place
        taken_token = tl.sum(tl.where(at, token_of, 0), 0)
        taken_group = tl.sum(tl.where(at, group_of, 0), 0)
        parent = place // RANKS
        depth = tl.sum(tl.where(row == parent, row_depth, 0), 0) + 1
        seen_rows = tl.sum(tl.where((row == parent)[:, None], row_bits, 0), 0)
        this = row == tl.where(there, node, ROWS)
        row_parent = tl.where(this, parent, row_parent)
        row_depth = tl.where(this, depth, row_depth)
        row_group = tl.where(this, taken_group, row_group)
        row_token = tl.where(this, taken_token, row_token)
        row_bits = tl.where(this[:, None], row_bits | seen_rows[None, :], row_bits)
        if there:
            chance = tl.where(at, -1.0, chance)
            opened = node
            opened_token = taken_token
            opened_chance = best
            opened_depth = depth
            opened_position = tl.sum(tl.where(at, position_of, 0), 0)

    inside = row < nodes + 1
    at_row = slot * (nodes + 1) + row
    tl.store(parents + at_row, row_parent, mask=inside)
    tl.store(depths + at_row, row_depth, mask=inside)
    tl.store(groups + at_row, row_group, mask=inside)
    tl.store(
        bits + at_row[:, None] * WORDS + word[None, :],
        row_bits,
        mask=inside[:, None] & (word < WORDS)[None, :],
    )
    tl.store(tokens + request * nodes + row - 1, row_token, mask=inside & (row > 0))
