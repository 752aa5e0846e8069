# SPDX-License-Identifier: Apache-2.0
"""`device_trees` as it is defined, one request at a time: the readable form the others are tested against."""

from __future__ import annotations

import torch

from vllm_ext.kernels.device_trees import EMPTY, RecycledTable, RowLayout, SlotTrees


def grow_ref(
    table: RecycledTable,
    estimates: torch.Tensor,
    roots: torch.Tensor,
    slots: torch.Tensor,
    chains: torch.Tensor,
    max_depths: torch.Tensor,
    template: torch.Tensor | None,
    trees: SlotTrees,
    tokens: torch.Tensor,
) -> None:
    """See `vllm_ext.kernels.device_trees.grow`."""
    padding = SlotTrees.of_size(1, tokens.shape[1], tokens.device)
    for request, slot in enumerate(slots.tolist()):
        for part, empty in zip(trees, padding, strict=True):
            part[slot] = empty[0]
        root = int(roots[slot])
        tokens[request] = root
        # Chance, row of the parent, token, group, position in the template; the best one is taken each time.
        unopened: list[tuple[float, int, int, int, int]] = []
        chance, row, token, position = torch.tensor(1.0), 0, root, 0
        for node in range(1, 1 + tokens.shape[1]):
            if chains[slot]:
                unopened.clear()
            depth = int(trees.depths[slot, row])
            if depth < max_depths[slot]:
                for rank, successor in enumerate(table.successors[token].tolist()):
                    place = 0 if template is None else int(template[position, rank])
                    own = int(table.classes[token, rank]), min(depth, estimates.shape[1] - 1)
                    if successor != EMPTY and place >= 0 and float(chance * estimates[own]) > 0:
                        group = own[0] * estimates.shape[1] + own[1]
                        unopened.append((float(chance * estimates[own]), row, successor, group, place))
            if not unopened:
                break
            best = max(unopened, key=lambda child: child[0])  # the first of equals
            unopened.remove(best)
            parent, row, token, position = best[1], node, best[2], best[4]
            chance = torch.tensor(best[0])
            tokens[request, node - 1] = token
            trees.parents[slot, node] = parent
            trees.depths[slot, node] = trees.depths[slot, parent] + 1
            trees.bits[slot, node] |= trees.bits[slot, parent]
            trees.groups[slot, node] = best[3]


def lay_out_ref(
    trees: SlotTrees,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    row_start: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    layout: RowLayout,
) -> None:
    """See `vllm_ext.kernels.device_trees.lay_out`."""
    layout.num_rows.zero_()
    layout.row_start[:] = row_start[-1]
    layout.row_start[: len(row_start)] = row_start
    for request, slot in enumerate(slots.tolist()):
        start, end = row_start[request : request + 2].tolist()
        rows = end - start
        first = int(query_start[request + 1]) - rows
        layout.first_row[request] = first
        layout.num_rows[request] = rows
        layout.context[request] = seq_lens[request] - rows
        layout.parents[start:end] = trees.parents[slot, :rows]
        layout.bits[start:end] = trees.bits[slot, :rows]
        layout.groups[start:end] = trees.groups[slot, :rows]
        positions[first : first + rows] = seq_lens[request] - rows + trees.depths[slot, :rows]


def walk_ref(
    row_start: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """See `vllm_ext.kernels.device_trees.walk`."""
    emitted.zero_()
    accepted.zero_()
    path[:] = torch.arange(path.shape[1])
    for request in range(len(row_start) - 1):
        start, end = row_start[request : request + 2].tolist()
        row, count = 0, 0
        while row >= 0:
            token = int(sampled[start + row])
            emitted[request, count] = token
            path[request, count] = row
            accepted[start + row] = 1
            count += 1
            children = [
                child
                for child in range(end - start)
                if parents[start + child] == row and tokens[start + child] == token
            ]
            row = children[0] if children else -1
        num_emitted[request] = count
