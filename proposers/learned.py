# SPDX-License-Identifier: Apache-2.0
"""Tables of n-grams that were learnt in another process; see `kernels/learned_arrays.py`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vllm_ext.kernels.learned_arrays import Learned, check_array
from vllm_ext.kernels.ngram_table import EMPTY, MOST_COUNT, Entries, NgramTable, insert


def check_distinct(name: str, rows: Learned, absent: int) -> None:
    """Raise ValueError if one of ``[rows, width]`` has a token twice: siblings would not be distinct."""
    rows = np.sort(rows, 1)
    if ((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] != absent)).any():
        raise ValueError(f"{name} has a row with one token twice: siblings would not be distinct")


def restore_table(
    arrays: Mapping[str, Learned], table: NgramTable, vocab_size: int, most_weight: float
) -> None:
    """Put the `Entries` in ``arrays``, by their names, in a table. The slots and the clock are made again.

    Args:
        arrays: what was saved.
        table: empty; written to.
        vocab_size: number of token ids.
        most_weight: the largest weight there may be.

    Raises:
        ValueError: naming the array and what is wrong with it.
    """
    entries = Entries(*(arrays[name] for name in Entries._fields))
    width = table.successors.shape[1]
    ranges: dict[str, tuple[float, float]] = {
        "keys": (np.iinfo(np.int64).min, np.iinfo(np.int64).max),  # any number may be one
        "used": (1, 1 << 62),  # the clock goes on from there
        "counts": (0, MOST_COUNT),
        "successors": (EMPTY, vocab_size - 1),
        "weights": (0.0, most_weight),
    }
    for name, array in entries._asdict().items():
        part = getattr(table, name)
        shape = (None,) if name == "keys" else (len(entries.keys), width)[: part.ndim]
        check_array(name, array, shape, part.dtype, *ranges[name])
    successors, weights = entries.successors, entries.weights
    # What is drafted from a row ends at the first weight of 0, what is looked for in it at the first EMPTY.
    if ((successors[:, 1:] != EMPTY) & (successors[:, :-1] == EMPTY)).any():
        raise ValueError("successors has a row with a token behind its end")
    if ((weights > 0) & (successors == EMPTY)).any():
        raise ValueError("weights has one of no successor")
    if (weights[:, 1:] > weights[:, :-1]).any():
        raise ValueError("weights has a row that is not descending")
    check_distinct("successors", successors, EMPTY)
    if (entry := insert(table, entries)) >= 0:
        raise ValueError(
            f"keys[{entry}]={entries.keys[entry]} has no place: it is there twice, or too many like it"
        )
