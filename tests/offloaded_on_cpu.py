# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU offloading with copies that work where the KV cache is in a CPU's memory too.

Scheduler, manager and connector are vLLM's. Its worker copies with streams of a GPU; this one copies at once.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Of blocks, one a chunk, of one group."""

    def __init__(self, caches: Any, num_chunks: int) -> None:
        (self._refs,) = caches.group_data_refs
        self._here = [caches.tensors[ref.tensor_idx].tensor for ref in self._refs]
        self._there = [torch.zeros((num_chunks, *each.shape[1:]), dtype=each.dtype) for each in self._here]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._here, src_spec, self._there, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._there, src_spec, self._here, dst_spec)

    def _copy(self, job_id: int, source: Any, source_spec: Any, target: Any, target_spec: Any) -> bool:
        assert len(source_spec.block_ids) == len(target_spec.block_ids)
        rows = (torch.from_numpy(spec.block_ids).long() for spec in (source_spec, target_spec))
        from_rows, to_rows = rows
        for each, other in zip(source, target, strict=True):
            other[to_rows] = each[from_rows]
        self._done.append(TransferResult(job_id, True, 1, 1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass


class OffloadedOnCpu(CPUOffloadingSpec):  # type: ignore[misc]
    """To be named in ``kv_connector_extra_config``."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return Copies(kv_caches, self.num_chunks)
