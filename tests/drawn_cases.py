# SPDX-License-Identifier: Apache-2.0
"""Drawn trees with the logits of their rows, for tests of `drawn_rows`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.drawn_rows import RECURSIVE, DrawnTrees, choose_drawn
from vllm_ext.kernels.sparse import Float64

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, SLOTS, NODES, SUPPORT = 50, 6, 9, 7
# Of `many_draws`: the target's law; the draft's, over few tokens.
P = np.array([0.32, 0.02, 0.2, 0.11, 0.05, 0.18, 0.09, 0.03])
IDS = np.array([2, 5, 0, 1, 4], dtype=np.int32)
Q = np.array([0.38, 0.07, 0.15, 0.25, 0.15])


class Batch(NamedTuple):
    """The arguments of `choose_drawn`."""

    logits: torch.Tensor
    row_start: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    prefill_len: torch.Tensor
    drawn: DrawnTrees
    seeds: torch.Tensor

    def to(self, device: str) -> Batch:
        """The same there."""
        moved = {name: part.to(device) for name, part in self._asdict().items() if name != "drawn"}
        return Batch(**moved, drawn=DrawnTrees(*(part.to(device) for part in self.drawn)))

    def chosen(self, backend: Backend) -> tuple[list[int], torch.Tensor]:
        """What is accepted, and the logits after it."""
        logits = self.logits.clone()
        accepted = choose_drawn(logits, *self[1:], backend=backend)
        assert accepted.dtype == torch.int64
        return accepted.tolist(), logits


def law(logits: torch.Tensor) -> Float64:
    found: Float64 = torch.softmax(logits.double(), -1).cpu().numpy()
    return found


def fill(drawn: DrawnTrees, slot: int, tokens: torch.Tensor, rng: np.random.Generator) -> None:
    """Draw a tree, and its tokens: each row has a distribution, some have children."""
    tokens[0] = 0
    for row in range(1 + NODES):
        size = int(rng.integers(1, SUPPORT + 1))
        drawn.q_row[slot, row] = NODES - row if rng.random() < 0.9 else -1
        drawn.ids[slot, NODES - row, :size] = torch.from_numpy(rng.choice(VOCAB, size, replace=False))
        drawn.q[slot, NODES - row, :size] = torch.from_numpy(
            rng.dirichlet(np.full(size, rng.choice([0.3, 1, 9])))
        )
    for row in range(1, 1 + NODES):
        parent = int(rng.integers(-1, min(row, 3)))  # few, so that they have many
        drawn.child_of[slot, row] = parent
        if parent < 0:
            continue
        q = drawn.q[slot, NODES - parent].double().cpu().numpy()
        ids = drawn.ids[slot, NODES - parent].cpu().numpy()
        if drawn.kind[slot] == RECURSIVE:
            before = [int(tokens[other]) for other in range(1, row) if drawn.child_of[slot, other] == parent]
            q[np.isin(ids, before)] = 0.0
        if q.sum() > 0:
            tokens[row] = int(rng.choice(ids, p=q / q.sum()))
        else:  # all were drawn
            drawn.child_of[slot, row] = -1


def random_logits(ids: torch.Tensor, q: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    logits = torch.from_numpy(rng.normal(size=VOCAB)).float()
    at = ids[ids >= 0].long().cpu()
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, at, False)
    match rng.integers(6):
        case 0:
            logits *= 6
        case 1:  # a mask, also of some of ids
            logits[torch.from_numpy(rng.random(VOCAB) < 0.5)] = float("-inf")
            logits[int(rng.integers(VOCAB))] = 0.0
        case 2:  # a top-k that leaves the draft's tokens
            logits[others] = float("-inf")
        case 3:  # near the draft
            logits[at] = (q[ids >= 0].cpu() + 0.02).log() + 5
        case 4:  # the others have nothing that float32 could tell, but are not masked
            logits[at] += 300
    return logits


def random_batch(rng: np.random.Generator) -> Batch:
    drawn = DrawnTrees.of_size(SLOTS, NODES, 1 + NODES, SUPPORT, DEVICE)
    slots = rng.permutation(SLOTS)[:5]
    row_start, tokens, logits = [0], [], []
    for slot in slots:
        drawn.kind[slot] = int(rng.integers(3)) if rng.random() < 0.3 else int(rng.integers(1, 3))
        of_tree = torch.zeros(1 + NODES, dtype=torch.int32)
        fill(drawn, int(slot), of_tree, rng)
        rows = 1 + NODES if rng.random() < 0.6 else int(rng.integers(0, 1 + NODES))
        row_start.append(row_start[-1] + rows)
        tokens.append(of_tree[:rows])
        for row in range(rows):
            which = NODES - row
            logits.append(random_logits(drawn.ids[slot, which], drawn.q[slot, which], rng))
    rows = row_start[-1]
    prefill_len = torch.full((SLOTS,), 100, dtype=torch.int32)
    prefill_len[torch.from_numpy(rng.random(SLOTS) < 0.15)] = 1000
    return Batch(
        torch.stack([*logits, torch.zeros(VOCAB)]).to(DEVICE),  # a row behind the last request's
        torch.tensor(row_start, dtype=torch.int32, device=DEVICE),
        torch.from_numpy(slots).to(DEVICE),
        torch.cat([*tokens, torch.zeros(1, dtype=torch.int32)]).to(DEVICE),
        torch.from_numpy(rng.integers(100, 999, size=rows + 1)).to(DEVICE),
        prefill_len.to(DEVICE),
        drawn,
        torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, size=SLOTS)).to(DEVICE),
    )


def one_row(kind: int, p: list[float], ids: list[int], q: list[float], children: list[int]) -> Batch:
    """A root with children, in the only slot."""
    drawn = DrawnTrees.of_size(1, len(children), 1, len(ids), DEVICE)
    drawn.kind[0] = kind
    drawn.child_of[0, 1:] = 0
    drawn.q_row[0, 0] = 0
    drawn.ids[0, 0] = torch.tensor(ids)
    drawn.q[0, 0] = torch.tensor(q)
    rows = 1 + len(children)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def longs(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    logits = torch.tensor([p] * rows, device=DEVICE).log()
    return Batch(
        logits, ints(0, rows), longs(0), ints(0, *children), longs(*[7] * rows), ints(7), drawn, longs(5)
    )


def many_draws(kind: int, draws: int, fault: str, rng: np.random.Generator) -> Batch:
    """Roots with the same two distributions, each with its own draws from the draft."""
    count = 3 if kind == RECURSIVE else 4
    gumbel = rng.gumbel(size=(draws, len(IDS)))
    without = np.argsort(-(np.log(Q) + gumbel), axis=1)[:, :count]  # one after the other, none twice
    places = without if kind == RECURSIVE else rng.choice(len(IDS), (draws, count), p=Q)
    if fault == "order":
        places = np.take_along_axis(places, np.argsort(-Q[places], axis=1), axis=1)
    elif fault == "distinct":
        places = without
    rows = draws * (1 + count)
    drawn = DrawnTrees.of_size(draws, count, 1, len(IDS), DEVICE)
    drawn.kind.fill_(kind)
    drawn.child_of[:, 1:] = 0
    drawn.q_row[:, 0] = 0
    drawn.ids[:] = torch.from_numpy(IDS)
    drawn.q[:] = torch.from_numpy(Q)
    tokens = np.concatenate([np.zeros((draws, 1), np.int32), IDS[places]], axis=1)
    return Batch(
        torch.from_numpy(np.log(P)).float().expand(rows, -1).contiguous().to(DEVICE),
        torch.arange(0, rows + 1, 1 + count, dtype=torch.int32, device=DEVICE),
        torch.arange(draws, device=DEVICE),
        torch.from_numpy(tokens.ravel()).to(DEVICE),
        torch.full((rows,), 9, device=DEVICE),
        torch.zeros(draws, dtype=torch.int32, device=DEVICE),
        drawn,
        torch.from_numpy(rng.integers(0, 2**62, draws)).to(DEVICE),
    )
