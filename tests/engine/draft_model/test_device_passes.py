# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a model that drafts on the device lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vllm_ext.engine.attention.tree_backend import TREES
from vllm_ext.engine.draft_model.device.layers import NO_SLOT, LayersOnDevice
from vllm_ext.engine.draft_model.device.passes import Likeliest, Texts

MOST, BLOCK = 64, 16


class Passes(LayersOnDevice):
    """Keeps what a forward pass is given."""

    what_next = ""
    load = read_last = _run = _logits = None  # type: ignore[assignment]

    def _forward(self, tokens: Any, positions: Any, kv_slots: Any, metadata: Any) -> Any:
        self.given = tokens, positions, kv_slots, metadata
        self.sizes = [*getattr(self, "sizes", []), len(tokens)]
        return positions[:, None]

    def _likeliest(self, hidden: torch.Tensor) -> Likeliest:
        return Likeliest(hidden, hidden)


class Tables:
    """vLLM's ``BlockTables``, of three requests: the first has all blocks, the second two, the last one."""

    num_kv_cache_groups, block_sizes = 1, (BLOCK,)
    input_block_tables = (torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]], dtype=torch.int32),)

    def compute_slot_mappings(
        self, slots: torch.Tensor, start: torch.Tensor, places: torch.Tensor, number: int, out: torch.Tensor
    ) -> None:
        whose = torch.repeat_interleave(slots, start.diff().long())
        out[0] = self.input_block_tables[0][whose, places // BLOCK].long() * BLOCK + places % BLOCK


BLOCKS = torch.tensor([4, 2, 1], dtype=torch.int32)  # of each


def passes(limit: int = 99) -> Passes:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MOST, get_vocab_size=lambda: 9),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=limit),
    )
    made = Passes(config, SimpleNamespace(device=torch.device("cpu")), "torch", "a model")
    made._runner = SimpleNamespace(block_tables=Tables())
    made.layers = ["layer"]
    return made


def test_nodes_behind_the_end_have_no_slot_and_blocks_that_can_be_looked_up() -> None:
    """Found: block tables read past their end, by a request that has all the room."""
    texts = Texts(torch.arange(3), torch.tensor([62, 31, 3], dtype=torch.int32), BLOCKS)
    widths = [9, 9]
    room = passes().room(texts, widths)
    assert room.blocks.shape[1] * BLOCK >= MOST + sum(widths)
    assert (room.blocks[:, 4:] == 0).all()  # vLLM's null block
    assert room.slots[0].tolist() == [4 * BLOCK + 14, 4 * BLOCK + 15, *[NO_SLOT] * 16]
    assert room.slots[1].tolist() == [6 * BLOCK + 15, *[NO_SLOT] * 17]
    assert room.slots[2].tolist() == [*(7 * BLOCK + 3 + place for place in range(13)), *[NO_SLOT] * 5]
    assert room.positions[2].tolist() == [3] * 9 + [4] * 9


def test_each_node_goes_where_its_request_is() -> None:
    """Found: a column of one node a request, handed to kernels as a view with gaps."""
    texts = Texts(torch.arange(3), torch.tensor([20, 18, 3], dtype=torch.int32), BLOCKS)
    made = passes()
    room = made.room(texts, [1, 2])
    tokens, parents = (
        torch.tensor([[1], [2], [3]], dtype=torch.int32),
        torch.full((3, 1), -1, dtype=torch.int32),
    )
    made.nodes(texts, room, tokens, parents, 0)
    _, positions, slots, metadata = made.given
    assert slots.is_contiguous()
    assert slots.stride() == positions.stride() == (1,)
    assert slots.tolist() == [2 * BLOCK + 4, 6 * BLOCK + 2, 7 * BLOCK + 3]
    assert positions.tolist() == [20, 18, 3]
    rows = getattr(metadata["layer"], TREES).rows
    assert (rows.num_rows.tolist(), rows.num_past.tolist()) == ([1, 1, 1], [0, 0, 0])
    parents = torch.tensor([[-1, 0, 0], [-1, 0, -1], [-1, 0, 0]], dtype=torch.int32)
    made.nodes(texts, room, torch.ones((3, 2), dtype=torch.int32), parents, 1)
    _, positions, slots, metadata = made.given
    assert slots.tolist() == [37, 38, 99, 100, 116, 117]
    assert positions.tolist() == [21, 21, 19, 19, 4, 4]
    rows = getattr(metadata["layer"], TREES).rows
    assert rows.first_row.tolist() == [0, 2, 4]
    assert rows.row_start.tolist() == [0, 3, 6, 9]


def test_a_pass_has_as_many_rows_as_a_step_may_have() -> None:
    """Found: more than the model is compiled for."""
    texts = Texts(torch.arange(3), torch.tensor([20, 18, 3], dtype=torch.int32), BLOCKS)
    tokens, parents = torch.ones((3, 4), dtype=torch.int32), torch.full((3, 4), -1, dtype=torch.int32)
    whole, some = passes(), passes(9)
    found = [made.nodes(texts, made.room(texts, [4]), tokens, parents, 0) for made in (whole, some)]
    assert (whole.sizes, some.sizes) == ([12], [8, 4])
    assert found[0].ids.tolist() == found[1].ids.tolist()
