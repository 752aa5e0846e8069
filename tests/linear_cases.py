# SPDX-License-Identifier: Apache-2.0
"""What products of few rows must show, whatever their weights are packed as."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Rows around the tiles' heights; pairs that are whole unrolled steps, and not; one block and several.
SIZES = [(1, 64, 32), (4, 6, 32), (5, 576, 96), (8, 2, 64), (12, 62, 160), (13, 1536, 64), (29, 570, 96)]
Product = Callable[[torch.Tensor], torch.Tensor]  # of x, by weights and a bias that it knows


def case(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x`` and ``weight`` of bfloat16, ``bias`` of float32."""
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.bfloat16(), weight.bfloat16(), bias


def assert_rows_are_apart(multiply: Product, x: torch.Tensor) -> None:
    """A row's result does not depend on the others; of 29 rows."""
    alone = torch.cat([multiply(x[n : n + 1]) for n in range(29)])
    for rows in range(1, 30):
        assert torch.equal(multiply(x[:rows]), alone[:rows])


def assert_threads_and_shapes_change_nothing(multiply: Product, x: torch.Tensor) -> None:
    """Of 12 rows of 62, to 160."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = multiply(x)
        torch.set_num_threads(3)  # more than there are blocks for each
        assert torch.equal(multiply(x), one)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(multiply(x.view(3, 4, 62)), one.view(3, 4, 160))
    apart = torch.cat([x, x], 1)[:, :62]
    assert torch.equal(multiply(apart), one)
    assert multiply(x[:0]).shape == (0, 160)
