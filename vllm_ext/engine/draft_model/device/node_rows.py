# SPDX-License-Identifier: Apache-2.0
"""What came out at the roots and nodes of growing trees on the device, so that rows below find it."""

from __future__ import annotations

import torch


class NodeRows:
    """Of all requests of a step, by the places of `proposers.sampled_device`.

    Args:
        roots: ``[most requests, size]``, written to by whoever reads texts, and kept: a graph that grows trees begins
            where another has left them.
    """

    def __init__(self, roots: torch.Tensor) -> None:
        self.roots = roots
        self._by_depth: list[torch.Tensor] = []  # [requests, width, size] from the roots' on

    def begin(self, number: int) -> None:
        """Trees of so many requests begin."""
        self._by_depth = [self.roots[:number, None]]

    def above(self, parents: torch.Tensor, past: int) -> torch.Tensor:
        """What came out at nodes' parents: ``[requests * width, size]``; arguments as of `DevicePasses.nodes`."""
        places = (parents[:, past:] + 1).long()[..., None].expand(-1, -1, self.roots.shape[1])
        return torch.cat(self._by_depth, 1).gather(1, places).flatten(0, 1)

    def add(self, rows: torch.Tensor) -> None:
        """What came out at the nodes of the next depth, ``[requests * width, size]``."""
        self._by_depth.append(rows.view(len(self._by_depth[0]), -1, self.roots.shape[1]))
