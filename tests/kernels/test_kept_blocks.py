# SPDX-License-Identifier: Apache-2.0
"""Block tables of what rows read: every form equals the readable one, and that one the codec's own say.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IN_INTERPRETER

from vllm_ext.codecs.streaming_llm import StreamingLLM, StreamingLLMOptions
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import EMPTY, RowLayout
from vllm_ext.kernels.kept_blocks import NEVER, KeptParts, Window, end_with_block, keep_blocks

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
@given(
    sinks=st.integers(0, 40),
    window=st.integers(1, 70),
    ends=st.lists(st.integers(1, 300), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=30)
def test_a_row_that_decodes_reads_what_the_codec_says(
    form: Backend, sinks: int, window: int, ends: list[int]
) -> None:
    codec = StreamingLLM(StreamingLLMOptions(window=window, sinks=sinks), BLOCK, 64)
    assert codec.window_blocks is not None
    of_rows = Window(codec.sink_blocks, codec.window_blocks, BLOCK)
    blocks = -(-max(ends) // BLOCK)
    table = torch.arange(len(ends) * blocks, dtype=torch.int32, device=DEVICE).view(len(ends), -1) + 1
    kept = KeptParts.of_size(len(ends), min(sum(of_rows[:2]) + 1, blocks), DEVICE)
    kept.table.fill_(-7)
    start = torch.arange(len(ends) + 1, dtype=torch.int32, device=DEVICE)
    keep_blocks(table, ints(*ends), start, None, None, of_rows, kept, backend=form)
    for row, end in enumerate(ends):
        own = (end - 1) // BLOCK
        expected = [*codec.format.blocks_read(own), own]
        length = int(kept.seq_lens[row])
        assert kept.table[row, : -(-length // BLOCK)].tolist() == table[row, expected].tolist()
        assert length == (len(expected) - 1) * BLOCK + (end - 1) % BLOCK + 1


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_a_prompt_and_trees(form: Backend) -> None:
    """Two requests of a tree each, one prompt in three parts, and a part without rows, as graphs are padded with."""
    of_rows = Window(1, 2, BLOCK)
    table = torch.randperm(3 * 12, device=DEVICE).to(torch.int32).view(3, 12)
    seq_lens = ints(7 * BLOCK + 3, 2 * BLOCK + 6, 8 * BLOCK + 5)
    part_start, request = ints(0, 6, 9, 17, 33, 38, 38), ints(0, 1, 2, 2, 2, 1)
    behind = ints(0, 0, 21, 5, 0, 0)
    results = []
    backends: list[Backend] = [form, "torch"]
    for backend in backends:
        kept = KeptParts.of_size(6, 6, DEVICE)
        keep_blocks(table, seq_lens, part_start, request, behind, of_rows, kept, backend=backend)
        results.append(kept)
    (kept, expected) = results
    for part, other in zip(kept, expected, strict=True):
        assert torch.equal(part, other)
    # The first tree's root stands in block 6, which reads block 0, 4 and 5; its nodes' slots go on in block 7.
    assert kept.table[0, :5].tolist() == table[0, [0, 4, 5, 6, 7]].tolist()
    assert kept.seq_lens.tolist() == [67, 38, 64, 64, 53, 38]
    assert kept.table[4, :4].tolist() == table[2, [0, 6, 7, 8]].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_length_is_never_more_than_its_table(form: Backend) -> None:
    """Of requests that are made up to warm up: thousands of rows of no context."""
    kept = KeptParts.of_size(1, 3, DEVICE)
    table = torch.arange(20, dtype=torch.int32, device=DEVICE)[None]
    keep_blocks(table, ints(300), ints(0, 300), None, None, Window(1, 1, BLOCK), kept, backend=form)
    assert kept.seq_lens.tolist() == [3 * BLOCK]


@pytest.mark.parametrize("form", FORMS)
def test_rows_read_what_is_not_gone_yet(form: Backend) -> None:
    """Of the second slot a block is gone from position 50 on, and one more from 64 on; of the others none."""
    table = torch.randperm(3 * 9, device=DEVICE).to(torch.int32).view(3, 9)
    gone = torch.full((4, 9), NEVER, dtype=torch.int32, device=DEVICE)
    gone[1, 1], gone[1, 2] = 50, 64
    slots = torch.tensor([1, 3, 1], device=DEVICE)
    kept = KeptParts.of_size(6, 9, DEVICE)
    # Decodes far behind, another request; a prompt's end, what is read again of its answer; and padding.
    part_start, request, behind = (
        ints(0, 1, 2, 12, 26, 29, 29),
        ints(0, 1, 2, 2, 2, 0),
        ints(0, 0, 17, 3, 0, 0),
    )
    seq_lens, window = ints(100, 100, 67), Window(0, 1 << 20, BLOCK)
    keep_blocks(table, seq_lens, part_start, request, behind, window, kept, gone, slots, form)
    assert kept.seq_lens.tolist() == [68, 100, 50, 48, 35, 100]
    assert kept.table[0, :7].tolist() == table[0, [0, 3, 4, 5, 6, 7, 8]].tolist()
    assert kept.table[1].tolist() == table[1].tolist()
    assert kept.table[2].tolist() == table[2].tolist()
    assert kept.table[3, :3].tolist() == table[2, [0, 2, 3]].tolist()
    assert kept.table[4, :3].tolist() == table[2, [0, 3, 4]].tolist()


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), blocks=st.integers(1, 40), width=st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_any_choice_is_laid_out_as_the_readable_form_has_it(
    form: Backend, data: st.DataObject, blocks: int, width: int
) -> None:
    position = st.integers(0, blocks * BLOCK)
    gone = data.draw(st.lists(st.one_of(position, st.just(NEVER)), min_size=blocks, max_size=blocks))
    first = data.draw(st.integers(0, blocks * BLOCK - 1))
    rows = data.draw(st.integers(0, blocks * BLOCK - first))
    table, slots = torch.arange(blocks, dtype=torch.int32, device=DEVICE)[None] + 5, torch.zeros(1).long()
    results = []
    backends: list[Backend] = [form, "torch"]
    for backend in backends:
        kept = KeptParts.of_size(1, width, DEVICE)
        arguments = table, ints(first + rows), ints(0, rows), None, None, Window(0, 1 << 20, BLOCK), kept
        keep_blocks(*arguments, ints(*gone)[None], slots.to(DEVICE), backend)
        results.append((kept.table.tolist(), kept.seq_lens.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("form", FORMS)
def test_no_node_stands_behind_the_root_s_block(form: Backend) -> None:
    of_rows = Window(1, 2, BLOCK)
    layout = RowLayout.of_size(4, 4 * 5, DEVICE)
    layout.row_start.copy_(ints(0, 5, 8, 9, 9))
    layout.num_rows.copy_(ints(5, 3, 1, 0))
    layout.first_row.copy_(ints(2, 7, 10, 0))
    layout.context.copy_(ints(6 * BLOCK + 13, 15, 99, 77))
    layout.parents.copy_(ints(-1, 0, 0, 1, 3, -1, 0, 1, -1, *[3] * 11))
    layout.groups.copy_(ints(-1, 4, 5, 6, 7, -1, 8, 9, -1, *[3] * 11))
    depths = [0, 0, 0, 1, 1, 2, 3, 0, 1, 2, 0]
    roots = [0] * 2 + [6 * BLOCK + 13] * 5 + [15] * 3 + [99]
    positions = torch.tensor([d + r for d, r in zip(depths, roots, strict=True)], device=DEVICE)
    end_with_block(layout, positions, of_rows, form)
    # The root at place 13 of its block has nodes to place 15; the one at place 15 has none.
    assert layout.parents[:9].tolist() == [-1, 0, 0, 1, EMPTY, -1, EMPTY, EMPTY, -1]
    assert layout.groups[:9].tolist() == [-1, 4, 5, 6, EMPTY, -1, EMPTY, EMPTY, -1]
    assert layout.parents[9:].tolist() == [3] * 11
    assert layout.context[:3].tolist() == [3 * BLOCK + 13, 15, 99 - 3 * BLOCK]
