# SPDX-License-Identifier: Apache-2.0
"""Our classes by the names that vLLM's options take, and by which it loads them in its own processes."""

from __future__ import annotations

# What vLLM loads as its custom_class drafter, and what drives it.
DRAFTER = "vllm_ext.engine.v1.drafter.Drafter"
WORKER = "vllm_ext.engine.v1.worker.Worker"
# V2's: names no file; it tells an engine of ours from one with vLLM's n-gram method.
DEVICE_METHOD, DEVICE_DRAFTER = "ngram_gpu", "vllm_ext.engine.v2.speculator.TreeSpeculator"
V2_WORKER = "vllm_ext.engine.v2.worker.Worker"
# Of the goodput budget; vLLM's class for steps that are scheduled ahead is another.
V2_SCHEDULER = "vllm_ext.engine.v2.scheduler.BudgetScheduler"
V2_ASYNC_SCHEDULER = "vllm_ext.engine.v2.scheduler.AsyncBudgetScheduler"
EXECUTOR = "vllm_ext.engine.v1.v1_executor.Executor"
LEAVING_EXECUTOR = "vllm_ext.engine.executor.LeavingExecutor"  # where nothing else of ours is in it
SCHEDULER = "vllm_ext.engine.v1.scheduler.Scheduler"  # of methods that draft with a model
# Of rules, where no method of ours runs.
RULES_WORKER = "vllm_ext.engine.v1.worker.RulesWorker"
V2_RULES_WORKER = "vllm_ext.engine.v2.worker.RulesWorker"
RULES_SCHEDULER = "vllm_ext.engine.v1.scheduler.RulesScheduler"
# Of rules, where no scheduler of ours does more; it ends requests whose rule fails.
ENDING_SCHEDULER = "vllm_ext.engine.ended_requests.Scheduler"
ENDING_ASYNC_SCHEDULER = "vllm_ext.engine.ended_requests.AsyncScheduler"
KV_WORKER = "vllm_ext.engine.v1.worker.KVWorker"  # of encoded caches, where neither is
