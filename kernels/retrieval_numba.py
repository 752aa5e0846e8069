# SPDX-License-Identifier: Apache-2.0
"""Which blocks a row reads, by its block's last queries; `vllm_ext.codecs.actqkv`, the readable form, says how."""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.numba_vectors import LANES, load_vector, store_vector

TINY = np.float32(1e-6)
MILLION = np.float32(1_000_000)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def retrieve(
    order: Any,
    queries: Any,
    num: int,
    halves: Any,
    starts: Any,
    block: int,
    sink_blocks: int,
    head_size: int,
    block_size: int,
    scale: float,
    numbers: Any,
) -> int:
    """``order`` begins with the blocks that are read; returns how many.

    ``queries`` are ``num`` rows; ``starts`` has where each of the blocks before ``block`` begins, in bytes. Scores have
    base 2.
    """
    budget, recent_blocks, coverage = numbers[1], numbers[2], np.float32(numbers[3]) / MILLION
    recent = max(block - recent_blocks, min(sink_blocks, block))
    sinks = min(sink_blocks, recent)
    left = max(budget - sinks - (block - recent), 0)
    candidates = recent - sinks
    for i in range(sinks):
        order[i] = i
    n: Any = sinks
    if candidates > 0 and left > 0:
        probe = np.empty(head_size, np.float32)
        _probe(queries, num, head_size, probe)
        scores = np.empty(candidates, np.float32)
        best = np.float32(-np.inf)
        half = np.empty(head_size, np.float32)
        for i in range(candidates):
            at = starts[sinks + i] // 2 + 2 * head_size * block_size
            for d in range(0, head_size, LANES):
                store_vector(half, d, load_vector(halves, at + d))
            score = np.float32(0.0)
            for d in range(head_size):
                score += half[d] * probe[d]
            scores[i] = score * np.float32(scale)
            best = max(best, scores[i])
        total = np.float32(0.0)
        for i in range(candidates):
            scores[i] = np.exp2(scores[i] - best)
            total += scores[i]
        ranks = np.argsort(-scores, kind="mergesort")
        taken, covered = np.zeros(candidates, np.bool_), np.float32(0.0)
        for place in range(min(left, candidates)):
            if covered >= coverage and numbers[3] < MILLION:
                break
            taken[ranks[place]] = True
            covered += scores[ranks[place]] / total
        for i in range(candidates):
            if taken[i]:
                order[n] = sinks + i
                n += 1
    for i in range(recent, block):
        order[n] = i
        n += 1
    return int(n)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _probe(queries: Any, num: int, head_size: int, probe: Any) -> None:
    weights = np.zeros(num, np.float32)
    for d in range(head_size):
        mean = np.float32(0.0)
        for i in range(num):
            mean += queries[i * head_size + d]
        mean /= np.float32(num)
        variance = np.float32(0.0)
        for i in range(num):
            variance += (queries[i * head_size + d] - mean) ** 2
        variance = variance / np.float32(num) + TINY
        for i in range(num):
            weights[i] += (queries[i * head_size + d] - mean) ** 2 / variance
    total = np.float32(0.0)
    for i in range(num):
        weights[i] += TINY
        total += weights[i]
    probe[:] = np.float32(0.0)
    for i in range(num):
        for d in range(head_size):
            probe[d] += weights[i] / total * queries[i * head_size + d]
