# SPDX-License-Identifier: Apache-2.0
"""Blocks that the scheduler has taken back, in the V1 worker's state of requests and its block tables."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.v1.worker.block_table import BlockTable

from vllm_ext.engine import step_extras
from vllm_ext.engine.kv_cache import returned_blocks


def test_what_lay_behind_is_forgotten_and_new_blocks_follow_what_is_left() -> None:
    tables = [BlockTable(16, 4, 8, 64, False, torch.device("cpu"), 1) for _ in range(2)]
    held = {"a": [3, 4, 5], "b": [6, 7], "away": [8, 9]}
    for table in tables:
        table.add_row(held["a"], 0)
        table.add_row(held["b"], 1)
    runner = SimpleNamespace(
        requests={name: SimpleNamespace(block_ids=(list(ids), list(ids))) for name, ids in held.items()},
        input_batch=SimpleNamespace(req_id_to_index={"a": 0, "b": 1}, block_table=tables),
    )
    output = SimpleNamespace()
    returned_blocks.forget(runner, output)
    assert runner.requests["a"].block_ids == ([3, 4, 5], [3, 4, 5])
    extras = step_extras.set_of(output)
    extras.kept_blocks, extras.kept_in = {"a": 1, "away": 1}, [1]
    returned_blocks.forget(runner, output)
    # Of the group that is named, of requests in the batch and of others.
    assert runner.requests["a"].block_ids == ([3, 4, 5], [3])
    assert runner.requests["b"].block_ids == ([6, 7], [6, 7])
    assert runner.requests["away"].block_ids == ([8, 9], [8])
    assert tables[0].block_table.np[0].tolist() == [3, 4, 5, 0, 0, 0, 0, 0]
    assert tables[1].block_table.np[0].tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    tables[1].append_row([9], 0)
    assert tables[1].block_table.np[0].tolist() == [3, 9, 0, 0, 0, 0, 0, 0]
    assert tables[1].block_table.np[1].tolist() == [6, 7, 0, 0, 0, 0, 0, 0]
