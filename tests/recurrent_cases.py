# SPDX-License-Identifier: Apache-2.0
"""Trees, states and convolutions of recurrent layers, and what is right for them in float64: for tests and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tree_cases import SENTINEL, chain, ints, move, random_tree

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.recurrent_trees import recurrent_trees
from vllm_ext.kernels.tree_conv import tree_conv

Shape = tuple[int, int, int, int]  # heads, groups, values, keys


@dataclass
class Layer:
    """Arguments of `recurrent_trees`, on the CPU."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    state: torch.Tensor
    blocks: torch.Tensor
    row_start: torch.Tensor
    certain: torch.Tensor
    parents: torch.Tensor

    def run(
        self, backend: Backend, device: str = "cpu", max_rows: int = 64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs, SENTINEL where nothing was written, and the state after the call."""
        state = move(copied(self.state), device)
        out = torch.full_like(self.v, SENTINEL, device=device)
        there: dict[str, Any] = {
            name: None if tensor is None else tensor.to(device)
            for name, tensor in vars(self).items()
            if name != "state"
        }
        recurrent_trees(**there, state=state, out=out, backend=backend, max_rows=max_rows)
        return out.cpu(), state.cpu()

    def requests(self) -> list[tuple[int, int, list[int], int]]:
        """Of each that is not skipped: its first row, how many are certain, its parents and its block."""
        starts = self.row_start.tolist()
        return [
            (starts[i], int(self.certain[i]), self.parents[starts[i] : starts[i + 1]].tolist(), int(block))
            for i, block in enumerate(self.blocks.tolist())
            if block and starts[i] < starts[i + 1]
        ]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def laid_out(num_blocks: int, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random blocks of a shape whose dimensions are stored in an order, with a gap behind each block."""
    size = torch.Size(shape).numel()
    stored = torch.randn(num_blocks, size + 48).to(dtype)[:, :size]
    strides = {
        d: torch.Size([shape[after] for after in order[place + 1 :]]).numel() for place, d in enumerate(order)
    }
    return stored.as_strided((num_blocks, *shape), (size + 48, *(strides[d] for d in range(len(shape)))))


def layer(
    trees: list[
        tuple[int, list[int]]
    ],  # of each request the certain rows before the root, and the tree's parents
    shape: Shape = (4, 2, 32, 48),
    delta: bool = False,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    order: Sequence[int] = (0, 1, 2),  # of H, V and K in the state's memory
    seed: int = 0,
) -> Layer:
    torch.manual_seed(seed)
    heads, groups, values, keys = shape
    parents = [chain(before) + [before + p if p >= 0 else before - 1 for p in tree] for before, tree in trees]
    starts = torch.tensor([0, *map(len, parents)]).cumsum(0).to(torch.int32)
    rows = int(starts[-1])
    unit = torch.nn.functional.normalize(torch.randn(rows, groups, keys), dim=-1)
    return Layer(
        q=torch.randn(rows, groups, keys).to(dtype),
        k=unit.to(dtype),
        v=torch.randn(rows, heads, values).to(dtype),
        decay=-(torch.rand(rows, heads) ** 3) * 3,
        beta=torch.rand(rows, heads) if delta else None,
        state=laid_out(len(trees) + 2, (heads, values, keys), order, state_dtype),
        blocks=ints((torch.randperm(len(trees) + 1) + 1)[: len(trees)].tolist()),
        row_start=starts,
        certain=ints([before + 1 for before, _ in trees]),
        parents=ints([parent for tree in parents for parent in tree]),
    )


def scanned(case: Layer, rows: Sequence[int], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last row's output and the state after a scan over rows, one head and one number at a time, in float64."""
    heads, values, _ = state.shape
    state = state.double().clone()
    out = torch.zeros(heads, values, dtype=torch.float64)
    for row in rows:
        for head in range(heads):
            group = head // (heads // case.q.shape[1])
            key, query = case.k[row, group].double(), case.q[row, group].double()
            now = state[head] * torch.exp(case.decay[row, head].double())
            new = case.v[row, head].double()
            if case.beta is not None:
                new = case.beta[row, head].double() * (new - now.mv(key))
            state[head] = now + torch.outer(new, key)
            out[head] = state[head].mv(query)
    return out, state


def right(case: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Layer.run` is to give: each row by a scan of its own path, from the state before the step."""
    out, state = torch.full(case.v.shape, SENTINEL).double(), case.state.double()
    for start, certain, parents, block in case.requests():
        before = case.state[block].double()
        for row in range(certain - 1, len(parents)):
            path, at = list[int](), row
            while at >= 0:
                path.insert(0, start + at)
                at = parents[at]
            out[start + row], after = scanned(case, path, before)
            if row == certain - 1:
                state[block] = after
    return out, state


@dataclass
class Conv:
    """Arguments of `tree_conv`, on the CPU."""

    x: torch.Tensor
    state: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    blocks: torch.Tensor
    row_start: torch.Tensor
    parents: torch.Tensor
    pending: torch.Tensor
    num_pending: torch.Tensor
    out_start: torch.Tensor
    total: int
    silu: bool = True

    def run(self, backend: Backend, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs, SENTINEL where nothing was written, and the state after the call."""
        state = move(copied(self.state), device)
        out = torch.full((self.total, self.x.shape[1]), SENTINEL, dtype=self.x.dtype, device=device)
        there: dict[str, Any] = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
            if name not in ("state", "total")
        }
        tree_conv(**there, state=state, out=out, backend=backend)
        return out.cpu(), state.cpu()


def conv(
    trees: list[tuple[list[int], list[int]]],  # of each request the pending rows and the tree's parents
    channels: int = 144,
    width: int = 4,
    nodes: int = 16,
    dtype: torch.dtype = torch.float32,
    order: Sequence[int] = (1, 0),  # of channels and columns in the state's memory
    bias: bool = True,
    silu: bool = True,
    gap: int = 2,  # rows of others' in `out`, before, between and behind
    seed: int = 0,
) -> Conv:
    torch.manual_seed(seed)
    starts = torch.tensor([0, *(len(tree) for _, tree in trees)]).cumsum(0).to(torch.int32)
    most = max([1, *(len(pending) for pending, _ in trees)])
    out_start, total = [], gap
    for pending, tree in trees:
        out_start.append(total)
        total += len(pending) + len(tree) + gap
    return Conv(
        x=torch.randn(int(starts[-1]), channels).to(dtype),
        state=laid_out(len(trees) + 2, (channels, width - 1 + nodes), order, dtype),
        weight=torch.randn(channels, width).to(dtype),
        bias=torch.randn(channels).to(dtype) if bias else None,
        blocks=ints((torch.randperm(len(trees) + 1) + 1)[: len(trees)].tolist()),
        row_start=starts,
        parents=ints([parent for _, tree in trees for parent in tree]),
        pending=torch.tensor([p + [-9] * (most - len(p)) for p, _ in trees], dtype=torch.int32).view(
            -1, most
        ),
        num_pending=ints([len(pending) for pending, _ in trees]),
        out_start=ints(out_start),
        total=total,
        silu=silu,
    )


def convolved(inputs: Sequence[torch.Tensor], case: Conv) -> torch.Tensor:
    """The last input's output, in float64."""
    width = case.weight.shape[1]
    total = torch.zeros(len(case.weight), dtype=torch.float64) if case.bias is None else case.bias.double()
    for j in range(width):
        total = total + case.weight[:, width - 1 - j].double() * inputs[len(inputs) - 1 - j].double()
    return total / (1 + torch.exp(-total)) if case.silu else total


def right_conv(case: Conv) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Conv.run` is to give."""
    out = torch.full((case.total, case.x.shape[1]), SENTINEL, dtype=torch.float64)
    state, width = copied(case.state), case.weight.shape[1]
    for i, block in enumerate(case.blocks.tolist()):
        rows = list(range(int(case.row_start[i]), int(case.row_start[i + 1])))
        if not block or not rows:
            continue
        parents = case.parents[rows].tolist()
        accepted = case.pending[i, : case.num_pending[i]].tolist()
        text = [case.state[block, :, j] for j in [*range(width - 1), *(width - 2 + row for row in accepted)]]
        at = int(case.out_start[i])
        for end in range(width, len(text) + 1):
            out[at] = convolved(text[:end], case)
            at += 1
        for row in range(len(rows)):
            path, node = list[torch.Tensor](), row
            while node >= 0:
                path.insert(0, case.x[rows[node]])
                node = parents[node]
            out[at] = convolved(text + path, case)
            at += 1
        for column, values in enumerate(text[len(text) - width + 2 :] + list(case.x[rows])):
            state[block, :, column] = values
    return out, state


MIXED_LAYERS = [
    (0, [-1]),
    (3, random_tree(9)),
    (0, chain(6)),
    (5, [-1]),
    (0, []),
    (1, random_tree(17, 1)),
    (2, [-1, 0, 0, 0]),
]
