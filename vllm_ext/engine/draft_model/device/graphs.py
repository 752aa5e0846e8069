# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a model that drafts on the device: reading, and all passes and growth of a step, one launch each.

Captured where vLLM captures its own, by its manager. A batch has the graph of the next larger size; what has none is
launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_ext.engine.draft_model.device.step import DraftStep, Kind

MOST_REQUESTS = 32  # of larger batches a step takes longer than the launches


@dataclass(frozen=True)
class DraftDescriptor(BatchExecutionDescriptor):  # type: ignore[misc]
    """A graph of ours."""

    level: int = 0  # most nodes of a tree; 0: the graph reads
    kind: Kind = Kind.GREEDY


class DraftGraphs(CudaGraphManager):  # type: ignore[misc]
    """The graphs of one engine.

    Args:
        vllm_config: vLLM's, of the target.
        device: the GPU.
        step: what is captured.
        levels: sizes of a tree that steps will have.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, step: DraftStep, levels: Sequence[int]
    ) -> None:
        self._step = step
        super().__init__(vllm_config, device, CUDAGraphMode.FULL, decode_query_len=1)
        kinds = list(Kind) if step.draws else [Kind.GREEDY, Kind.CHOSEN]
        variants = [(0, Kind.GREEDY), *((level, kind) for level in levels if level for kind in kinds)]
        self._capture_descs[CUDAGraphMode.FULL] = [
            _descriptor(size, level, kind)
            for size in sorted(sizes(self.max_num_reqs), reverse=True)
            for level, kind in variants
        ]

    def _init_candidates(self) -> None:
        """vLLM's looks for batches by their tokens; see `covering`."""

    def capture_all(self) -> None:
        """Capture, as part of vLLM's own capturing."""
        self.capture(self._prepared, "Capturing drafts' CUDA graphs")

    def _prepared(self, desc: DraftDescriptor, warmup: bool) -> Callable[[Any], None]:
        self._step.give_nobody(desc.num_reqs)

        def run(mode: Any) -> None:
            if desc.level:
                self._step.grow(desc.num_reqs, desc.level, desc.kind)
            else:
                self._step.read(desc.num_reqs)

        return run

    def covering(self, number: int) -> int:
        """The size of the graphs that a batch of so many requests has; its own where it has none."""
        return next((size for size in sizes(self.max_num_reqs) if size >= number), number)

    def run(self, size: int, level: int = 0, kind: Kind = Kind.GREEDY) -> bool:
        """Replay a graph: see `DraftStep.read`, and `DraftStep.grow` if ``level`` is not 0.

        Returns:
            Whether there is one.
        """
        desc = _descriptor(size, level, kind)
        if desc not in self.graphs:
            return False
        self.run_fullgraph(desc)
        return True


def _descriptor(size: int, level: int, kind: Kind) -> DraftDescriptor:
    return DraftDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=size, level=level, kind=kind)


def sizes(max_num_reqs: int) -> list[int]:
    """Of batches that have a graph: powers of two, and the largest there is."""
    most = min(max_num_reqs, MOST_REQUESTS)
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})
