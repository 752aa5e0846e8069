# SPDX-License-Identifier: Apache-2.0
"""What passes put out for the roots and nodes of growing trees, so that passes below find it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class NodeStates:
    """Rows of several passes, by request and node."""

    def __init__(self) -> None:
        self._passes: list[torch.Tensor] = []
        self._num_rows = 0
        # By request, the rows of its root and of each node asked for, in this order.
        self._where: dict[str, list[int]] = {}

    def clear(self) -> None:
        """Forget all requests."""
        self._passes.clear()
        self._where.clear()
        self._num_rows = 0

    def keep(self, request_ids: Sequence[str], states: torch.Tensor) -> None:
        """What a pass put out.

        Args:
            request_ids: ``[num_rows]`` whose; a request's first row is its root's.
            states: ``[num_rows, width]``.
        """
        for row, name in enumerate(request_ids, self.add(states)):
            self._where.setdefault(name, []).append(row)

    def add(self, states: torch.Tensor) -> int:
        """Rows of whatever: ``[num_rows, width]``; gives the number of the first one."""
        first = self._num_rows
        self._passes.append(states)
        self._num_rows += len(states)
        return first

    def at(self, request_ids: Sequence[str], nodes: Sequence[int]) -> torch.Tensor:
        """``[num_rows, width]``.

        Args:
            request_ids: ``[num_rows]`` whose.
            nodes: ``[num_rows]`` places among the nodes asked for; ROOT, which is -1, for the root.
        """
        return self.rows([self._where[name][node + 1] for name, node in zip(request_ids, nodes, strict=True)])

    def rows(self, rows: Sequence[int]) -> torch.Tensor:
        """``[num_rows, width]`` by the numbers of `add`."""
        states = torch.cat(self._passes)
        return states[torch.tensor(rows, dtype=torch.int64).to(states.device)]
