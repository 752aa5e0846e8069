# SPDX-License-Identifier: Apache-2.0
"""Where the ``vllm-ext`` script begins: an old Python, or a package that is missing, is said in a line.

Nothing here is newer than Python 3.7, and no other file of ours is imported before the version is known.
"""

from __future__ import annotations

import platform
import signal
import sys

from vllm_ext.compat.python_version import MIN_PYTHON, PYTHON_WAY_OUT


def main() -> None:
    """Run the command line, or exit 1 with what it lacks and the way out."""
    if sys.version_info < MIN_PYTHON:
        sys.exit(f"vllm-ext cannot run here: Python {platform.python_version()}\n-> {PYTHON_WAY_OUT}")
    try:
        from vllm_ext.cli.main import app
    except ModuleNotFoundError as error:
        sys.exit(
            f"vllm-ext cannot run here: {error.name} is not installed in {sys.prefix}\n"
            "-> pip install 'vllm-ext[cuda]', or 'vllm-ext[cpu]' without a GPU"
        )
    # As on an error: what `kill` ends at once leaves its engines behind, with their memory.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()
