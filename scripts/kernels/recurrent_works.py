# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers' trees and their convolution, Triton's and numba's, beside float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from recurrent_cases import MIXED_LAYERS, Shape, conv, copied, layer, right, right_conv
from tree_cases import binary, chain, move, random_tree
from work import Work, distance

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.recurrent_trees import recurrent_trees
from vllm_ext.kernels.tree_conv import tree_conv

# Heads, groups, values, keys.
MODELS: dict[str, tuple[Shape, bool]] = {
    "Mamba-2, 24 heads of 64": ((24, 1, 64, 128), False),
    "delta net, 32 heads of 128": ((32, 16, 128, 128), True),
}
CONVOLVED = [([], [-1]), ([2, 3], random_tree(9)), ([1], []), ([16], binary(17)), ([], chain(6))]


def works(device: str) -> Iterator[Work]:
    """All of them; ``device`` is Triton's: "cuda", or "cpu" for the interpreter."""
    forms: tuple[tuple[str, Backend], ...] = (device, "triton"), ("cpu", "numba")
    for where, form in forms:
        for delta in (False, True):
            error = functools.partial(_error, where, form, delta)
            kind = "delta nets" if delta else "Mamba-2"
            yield Work("recurrent_trees", form, f"{len(MIXED_LAYERS)} trees, {kind}, float32", error, 1e-5)
        error = functools.partial(_conv_error, where, form)
        yield Work("tree_conv", form, f"{len(CONVOLVED)} trees, float32", error, 1e-6)
        if form == "numba" or where == "cuda":
            for requests, rows in ((1, 1), (1, 16)) if form == "numba" else ((1, 1), (1, 16), (32, 16)):
                yield from _timed(where, form, requests, rows)


def _error(device: str, form: Backend, delta: bool) -> float:
    case = layer(MIXED_LAYERS, delta=delta)
    return max(distance(got, want) for got, want in zip(case.run(form, device), right(case), strict=True))


def _conv_error(device: str, form: Backend) -> float:
    case = conv(CONVOLVED)
    return max(
        distance(got, want) for got, want in zip(case.run(form, device), right_conv(case), strict=True)
    )


def _timed(device: str, form: Backend, requests: int, rows: int) -> Iterator[Work]:
    size = f"{requests} x {rows} rows"
    for name, (shape, delta) in MODELS.items():
        heads, _, values, keys = shape
        case = layer([(0, binary(rows))] * requests, shape, delta, torch.bfloat16)
        there: dict[str, Any] = {
            name: None if tensor is None else move(copied(tensor), device)
            for name, tensor in vars(case).items()
        }
        out = torch.empty_like(case.v, device=device)
        call: Callable[[], object] = functools.partial(
            recurrent_trees, **there, out=out, backend=form, max_rows=rows
        )
        of_state = requests * heads * values * keys
        flops = of_state * (2 * rows * (1 + delta) + 4)
        label = f"{size}, {name}, bfloat16, state float32"
        yield Work("recurrent_trees", form, label, lambda: 0.0, 0.0, call, 8 * of_state, flops)
    convolution = conv([([1, 2], binary(rows))] * requests, 1792, dtype=torch.bfloat16, gap=0)
    fields: dict[str, Any] = {
        name: move(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in vars(convolution).items()
        if name != "total"
    }
    fields["out"] = torch.empty(convolution.total, 1792, dtype=torch.bfloat16, device=device)
    yield Work(
        "tree_conv",
        form,
        f"{size}, 1792 channels, bfloat16",
        lambda: 0.0,
        0.0,
        functools.partial(tree_conv, **fields, backend=form),
        requests * 1792 * 2 * (2 * rows + 2 * (3 + rows)),
    )
