# SPDX-License-Identifier: Apache-2.0
"""The loops of `kv_move.py`, which documents them, for numba."""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends
from vllm_ext.kernels.numba_vectors import pointer_to


def compiled() -> Any:
    """The function below, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(_move)


def _move(table: Any, num_heads: int, block_size: int, source: Any, target: Any, dtype: Any) -> None:
    for view in range(len(table)):
        place = table[view]
        group, parts, elements = place[3], place[6], place[8]
        # Read and written at offsets that the table gives: the length is nominal.
        cache = numba.carray(pointer_to(place[0], dtype), 1)
        kept = np.empty((len(source), num_heads, parts * elements), dtype)
        for write in (False, True):
            for i in range(len(source)):
                slot = target[i] if write else source[i]
                offset = slot % block_size
                token = slot // block_size * place[1] + offset // group * place[4] + offset % group * place[5]
                for head in range(num_heads):
                    for part in range(parts):
                        at = token + head * place[2] + part * place[7]
                        for element in range(elements):
                            n = part * elements + element
                            if write:
                                cache[at + element * place[9]] = kept[i, head, n]
                            else:
                                kept[i, head, n] = cache[at + element * place[9]]
