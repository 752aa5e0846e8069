# SPDX-License-Identifier: Apache-2.0
"""The tree of the Token Recycling paper: 80 nodes, at most 6 deep, by depth 8, 21, 25, 15, 8 and 3.

A node is the ranks on its path: ``"03"`` is the fourth successor of the root's best successor. Nodes not
listed are leaves. The authors chose the shape from measured acceptance.
"""

from __future__ import annotations

import numpy as np

from vllm_ext.proposers.tree import Int32

NUM_CHILDREN = (
    {"": 8}
    | {"0": 8, "1": 4, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1}
    | {"00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1}
    | {"10": 2, "11": 1, "20": 1, "30": 1, "40": 1, "50": 1}
    | {"000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1, "100": 1, "200": 1, "300": 1}
    | {"0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1}
    | {"00000": 2, "00010": 1}
)


def positions(width: int) -> Int32:
    """The shape as `grow_trees` takes it.

    Returns:
        int32 ``[81, width]``: for each node, the root first, the position of its child of each rank, or -1.
    """
    names = [""]
    for name in names:  # grows meanwhile
        names += [f"{name}{rank}" for rank in range(NUM_CHILDREN.get(name, 0))]
    table = np.full((len(names), width), -1, dtype=np.int32)
    for position, name in enumerate(names[1:], 1):
        if int(name[-1]) < width:
            table[names.index(name[:-1]), int(name[-1])] = position
    return table
