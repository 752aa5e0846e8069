# SPDX-License-Identifier: Apache-2.0
"""Trees of a draft model that grow on the device: all of a batch at once, depth by depth, in arrays of fixed shapes.

What `sampled` is on the host. A *growth* is given the draft's distributions after the nodes of one depth, adds the
nodes of the next, and says below which of these it wants to know more. How many these are depends on the options alone:
nothing is asked of the device, and each forward pass has the rows that it had before. What a request has no node for
is computed, and not used. A node that may be asked for has a *place*, numbered from 0 by depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

ROOT = -1
NONE = -1
SUPPORT = 32  # tokens of a distribution: `vllm_ext.kernels.top_k.MAX_K`
MASK = 0xFFFFFFFF
DRAFT = 0x5EED  # of the draft's noise: apart from verification's


class Rows(NamedTuple):
    """Distributions after the nodes of one depth, the likeliest tokens only."""

    ids: torch.Tensor  # int32 [requests, width, SUPPORT], likeliest first
    q: torch.Tensor  # float32 [requests, width, SUPPORT] adding up to 1; 0 for what must not be drawn


class Asked(NamedTuple):
    """The nodes of one depth below which more is to be known; their places follow those of the depth before."""

    tokens: torch.Tensor  # int32 [requests, width]
    parents: torch.Tensor  # int32 [requests, width] the parent's place, or ROOT


class Grown(NamedTuple):
    """The finished trees. Row 0 is the root, row ``j`` node ``j - 1``; what is no node has no parent."""

    tokens: torch.Tensor  # int32 [requests, nodes]
    parents: torch.Tensor  # int32 [requests, nodes] the parent's row; NONE: no walk gets there
    depths: torch.Tensor  # int32 [requests, nodes]
    # int32 [requests, nodes] the row whose child it is for verification; differs where drafts share a node.
    child_of: torch.Tensor
    places: torch.Tensor  # int32 [requests, nodes] of the node itself; NONE: it was not asked for


class Limits(NamedTuple):
    """What trees of each request must keep to."""

    depth: torch.Tensor  # int32 [requests] deepest node
    chain: torch.Tensor  # bool [requests] no branches


# Uniform numbers in (0, 1), float64 ``[requests, count, SUPPORT]``, of ``count`` rows from the one of a number on. Each
# row of a step has its own.
Noise = Callable[[int, int], torch.Tensor]


class Growth(ABC):
    """Trees of a batch while they grow.

    Args:
        num_nodes: most nodes of a tree.
        max_depth: deepest nodes.
    """

    drawn = True  # its verifier needs the distributions
    independent = False  # its drafts were drawn independently of each other

    def __init__(self, num_nodes: int, max_depth: int) -> None:
        self.num_nodes, self.max_depth = num_nodes, min(max_depth, num_nodes)

    @property
    @abstractmethod
    def widths(self) -> Sequence[int]:
        """How many nodes are asked for at each depth from 1 on."""

    @abstractmethod
    def give(self, depth: int, rows: Rows, limits: Limits, noise: Noise) -> Asked | None:
        """Grow by one depth.

        Args:
            depth: of the nodes that the rows follow, from 0 on.
            rows: after the root, or after those that were asked for last.
            limits: the same in all calls.
            noise: of the step.

        Returns:
            As many nodes as `widths` says, or None where the trees are finished.
        """

    @abstractmethod
    def grown(self) -> Grown:
        """The trees."""

    def groups(self) -> torch.Tensor | None:
        """int32 ``[requests, nodes]`` of `grown`: which estimates they were chosen by; -1: none. None: of all."""
        return None


def shaped(ids: torch.Tensor, log_q: torch.Tensor, sampling: Sequence[torch.Tensor] | None) -> Rows:
    """`draft_model.shaped` of all requests: what their drafts are drawn from.

    Args:
        ids: int32 ``[requests, width, SUPPORT]``.
        log_q: float32, the same shape, descending, at temperature 1.
        sampling: float or int ``[requests]`` each: temperature, top_p, top_k, min_p; of top_k at least 1. None: all
            requests are greedy.
    """
    if sampling is None:
        return Rows(ids, log_q.softmax(2))
    temperature, top_p, top_k, min_p = (values[:, None, None] for values in sampling)
    random = temperature > 0.0
    q = (log_q / torch.where(random, temperature, 1.0)).softmax(2)
    rank = torch.arange(q.shape[2], device=q.device)
    q = torch.where(random & ((rank >= top_k) | (q < min_p * q[..., :1])), 0.0, q)
    before = q.cumsum(2) - q
    q = torch.where(random & (top_p < 1.0) & (before >= top_p * q.sum(2, keepdim=True)), 0.0, q)
    return Rows(ids, q / q.sum(2, keepdim=True))


def uniform(seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Noise that depends on these three alone: the same on every rank, another for each.

    Args:
        seeds: int64 ``[requests]``.
        positions: int ``[requests]``.
        numbers: int64 ``[count]``.

    Returns:
        float64 ``[requests, count]`` in (0, 1).
    """
    state = torch.full_like(seeds, DRAFT)
    for key in (seeds & MASK, (seeds >> 32) & MASK, positions.to(torch.int64) & MASK):
        state = _mixed(state, key)
    state = _mixed(state[:, None], numbers[None])
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & MASK
    return ((state ^ (state >> 16)).to(torch.float64) + 0.5) / (MASK + 1.0)


def _mixed(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A round of MurmurHash3 (public domain), in integers of 64 bits of which 32 are kept."""
    key = (key * 0xCC9E2D51) & MASK
    key = (((key << 15) | (key >> 17)) * 0x1B873593) & MASK
    state = state ^ key
    return (((state << 13) & MASK | (state >> 19)) * 5 + 0xE6546B64) & MASK


def gumbel(uniforms: torch.Tensor) -> torch.Tensor:
    """Gumbel variables of uniform ones: to the largest sum with log-probabilities go as many as these say."""
    return -torch.log(-torch.log(uniforms))


def at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``values[request, index[request, i]]``."""
    return values.gather(1, index.to(torch.int64))


def rows_of_places(places: torch.Tensor, number: int) -> torch.Tensor:
    """The rows of a tree's nodes by place.

    Args:
        places: int32 ``[requests, nodes]``, or NONE.
        number: of places.

    Returns:
        int32 ``[requests, number + 1]``; of places without a node NONE, and so is the last.
    """
    found = places.new_full((len(places), number + 1), NONE)
    row = torch.arange(1, places.shape[1] + 1, dtype=places.dtype, device=places.device).expand_as(places)
    found.scatter_(1, torch.where(places >= 0, places, number).to(torch.int64), row)
    found[:, number] = NONE
    return found
