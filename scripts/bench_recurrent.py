# SPDX-License-Identifier: Apache-2.0
"""Time `recurrent_trees` on this CPU, one core, beside vLLM's own update once a row, which is what a chain takes.

    python scripts/bench_recurrent.py [--rounds 31]

One request whose root alone is certain, a binary tree, bfloat16 with a float32 state as vLLM's CPU operators lay it
out. Prints a markdown table of medians in microseconds a call; the forms take turns, the reference is timed afterwards.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from bench_kernels import machine
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
from vllm.platforms import current_platform

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.recurrent_trees import recurrent_trees

# Heads, groups, values, keys.
MODELS = {"Mamba-2": (24, 1, 64, 128), "gated delta net": (32, 16, 128, 128)}
ROWS = (1, 8, 16)
INDEX = torch.tensor([1], dtype=torch.int32)


class Rows(NamedTuple):
    """A step's rows, and the gates that both make of ``a``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    state: torch.Tensor


def made(shape: tuple[int, int, int, int], delta: bool, rows: int) -> Rows:
    """Random rows and two blocks of state."""
    heads, groups, values, keys = shape
    q, k = torch.nn.functional.normalize(torch.randn(2, rows, groups, keys), dim=-1).bfloat16()
    v, a = torch.randn(rows, heads, values).bfloat16(), torch.randn(rows, heads).bfloat16()
    state = (
        torch.randn(2, heads, keys, values).transpose(2, 3) if delta else torch.randn(2, heads, values, keys)
    )
    decay = -torch.nn.functional.softplus(a.float())
    return Rows(q, k, v, a, decay, torch.sigmoid(a.float()) if delta else None, state)


def verify(rows: Rows, starts: torch.Tensor, parents: torch.Tensor, out: torch.Tensor, form: Backend) -> None:
    """A tree, by a form of ours."""
    q, k, v, _, decay, beta, state = rows
    recurrent_trees(q, k, v, decay, beta, state, INDEX, starts, INDEX, parents, out, form)


def scan_mamba(rows: Rows, rate: torch.Tensor) -> None:
    """A chain, by vLLM's update of Mamba-2."""
    q, k, v, a, _, _, state = rows
    for row in range(len(q)):
        selective_state_update(
            state,
            v[row][None],
            a[row][None, :, None].expand(1, *v.shape[1:]),
            rate,
            k[row][None],
            q[row][None],
            dt_softplus=True,
            state_batch_indices=INDEX,
        )


def scan_delta(rows: Rows, zeros: torch.Tensor, starts: torch.Tensor) -> None:
    """A chain, by vLLM's update of the gated delta net."""
    q, k, v, a, _, _, state = rows
    for row in range(len(q)):
        ops.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=zeros,
            dt_bias=zeros.bfloat16(),
            q=q[None, row : row + 1],
            k=k[None, row : row + 1],
            v=v[None, row : row + 1],
            a=a[row : row + 1],
            b=a[row : row + 1],
            initial_state_source=state.transpose(2, 3),
            initial_state_indices=INDEX,
            cu_seqlens=starts,
            use_qk_l2norm_in_kernel=True,
        )


def us(call: Callable[[], object]) -> float:
    """Microseconds of a call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time trees in recurrent layers on one CPU core.")
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    current_platform.import_kernels()
    print(f"{machine()}; median of {rounds} rounds, us per call\n")
    print("| layer | rows | vLLM, a chain | numba, a tree | reference, a tree |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, shape in MODELS.items():
        delta, heads = name != "Mamba-2", shape[0]
        for count in ROWS:
            rows = made(shape, delta, count)
            starts, one = (torch.tensor([0, n], dtype=torch.int32) for n in (count, 1))
            parents = (torch.arange(count, dtype=torch.int32) + 1) // 2 - 1
            ours, reference = torch.zeros_like(rows.v), torch.zeros_like(rows.v)
            copies = [rows._replace(state=rows.state.clone()) for _ in range(3)]
            verify(copies[0], starts, parents, ours, "numba")
            verify(copies[1], starts, parents, reference, "torch")
            torch.testing.assert_close(ours, reference, atol=1e-2, rtol=2**-7)
            scan: Callable[[], object]
            if delta:
                scan = functools.partial(scan_delta, copies[2], torch.zeros(heads), one)
            else:
                rate = -torch.ones(1).expand(heads, *shape[2:])
                scan = functools.partial(scan_mamba, copies[2], rate)
            tree = functools.partial(verify, copies[0], starts, parents, ours, "numba")
            times: list[tuple[float, float]] = [(us(scan), us(tree)) for _ in range(rounds)]
            a, b = (statistics.median(column) for column in zip(*times, strict=True))
            slow = us(functools.partial(verify, copies[1], starts, parents, reference, "torch"))
            print(f"| {name} | {count} | {a:.0f} | {b:.0f} | {slow:.0f} |", flush=True)


if __name__ == "__main__":
    main()
