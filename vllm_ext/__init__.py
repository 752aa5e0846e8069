# SPDX-License-Identifier: Apache-2.0
"""Lossless speculative decoding methods for an unmodified vLLM.

Importing this package imports neither torch nor vllm: vLLM's plugin loader does it in every process.
"""

__version__ = "0.1.0"
