# SPDX-License-Identifier: Apache-2.0
"""vLLM's log in commands: hidden, as they say themselves what matters."""

from __future__ import annotations

import logging
import os


def hide_vllm_log() -> None:
    """Before vLLM is imported: of its log errors alone, here and in its engines, unless the user has set a level."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # of what it says before it reads that
