# SPDX-License-Identifier: Apache-2.0
"""KV blocks that the scheduler has taken from behind requests' texts (`scheduler.draft_blocks`), in the V1 worker."""

from __future__ import annotations

from typing import Any

from vllm_ext.engine import step_extras


def forget(runner: Any, scheduler_output: Any) -> None:
    """Before a step: its requests no longer have these blocks, in vLLM's state of them and in the batch's tables."""
    extras = step_extras.of(scheduler_output)
    for name, kept in extras.kept_blocks.items():
        row = runner.input_batch.req_id_to_index.get(name)
        for group_id in extras.kept_in:
            del runner.requests[name].block_ids[group_id][kept:]
            if row is not None:
                table = runner.input_batch.block_table[group_id]
                table.block_table.np[row, kept : table.num_blocks_per_row[row]] = 0
                table.num_blocks_per_row[row] = kept
