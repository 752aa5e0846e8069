# SPDX-License-Identifier: Apache-2.0
"""What the folder of an EAGLE head says before anything is loaded."""

from __future__ import annotations

import json

from vllm_ext.data import model_files

FALCON_BLOCK = "falcon_block"  # of a config.json: rows that say a token each in one pass


def block_of(name: str) -> int:
    """How many tokens each pass of a head says: see `vllm_ext.training.eagle_relatives.falcon`.

    Args:
        name: folder or hub name; of one that cannot be read it is 1, and who loads it says why.
    """
    try:
        config = json.loads((model_files.snapshot(name) / "config.json").read_text())
    except (OSError, ValueError):
        return 1
    return int(config.get(FALCON_BLOCK, 1))
