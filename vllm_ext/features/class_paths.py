# SPDX-License-Identifier: Apache-2.0
"""Our classes by the names that vLLM's options take, and by which it loads them in its own processes.

Schedulers and workers are made of parts: `engine.composed`.
"""

from __future__ import annotations

# What vLLM loads as its custom_class drafter.
DRAFTER = "vllm_ext.engine.v1.drafter.Drafter"
# V2's: names no file; it tells an engine of ours from one with vLLM's n-gram method.
DEVICE_METHOD, DEVICE_DRAFTER = "ngram_gpu", "vllm_ext.engine.v2.speculators.base.TreeSpeculator"
EXECUTOR = "vllm_ext.engine.v1.v1_executor.Executor"
LEAVING_EXECUTOR = "vllm_ext.engine.executor.LeavingExecutor"  # where nothing else of ours is in it
