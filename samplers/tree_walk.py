# SPDX-License-Identifier: Apache-2.0
"""The sample-then-match walk: verify any draft tree by sampling the target itself.

At the current row draw the next token from the target's distribution ``p`` for that row's path; descend if
the token is a child, else stop with it as the last token. Every emitted token is a fresh draw from ``p`` given
what was emitted before, so the output is the target's whatever the draft was, token for token where the
draw is a function of a seed. No other rule accepts more of a tree that was built without looking at the
draw. The draft's own probabilities are not needed.

Source: REST, arXiv 2311.08252, section 3 (greedy), with one draw per visited row instead of one per path, which
is what keeps the distribution; Token Recycling, arXiv 2408.08696, verifies the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

# Draws one token for each of some requests: (requests, rows, emitted so far) -> tokens. A request is an index
# into row_start, a row an offset inside the request. Called in rounds; a request that leaves does not return.
Draw = Callable[[Sequence[int], Sequence[int], Sequence[Sequence[int]]], Sequence[int]]


def greedy_walk(
    row_start: Int32, tokens: Int32, parents: Int32, choice: Int32
) -> tuple[list[list[int]], list[list[int]]]:
    """The walk where the target's token is known for every row.

    Args:
        row_start: int32 ``[num_requests + 1]``; rows of request i are ``row_start[i]:row_start[i + 1]``, the
            root first, then its draft nodes, parents before children.
        tokens: int32 ``[num_rows]``, each row's input token.
        parents: int32 ``[num_rows]``, offset of the parent row inside the request; -1 for roots. Children of
            one parent have different tokens.
        choice: int32 ``[num_rows]``, the target's next token after each row.

    Returns:
        For each request the offsets of the accepted rows, root left out, and the emitted tokens, always one
        more than the accepted rows.
    """
    num_rows = np.diff(row_start)
    first = np.repeat(row_start[:-1], num_rows)
    # A row can only be accepted if it is what the target chose at its parent (a root's parent is itself).
    matched = np.flatnonzero((tokens == choice[first + np.maximum(parents, 0)]) & (parents >= 0))
    last = row_start[:-1].tolist()  # the deepest accepted row of each request
    paths: list[list[int]] = [[] for _ in last]
    requests = np.searchsorted(row_start, matched, side="right") - 1
    # Parents come before children, so one pass in row order follows each path from the root.
    for row, request, parent in zip(
        matched.tolist(), requests.tolist(), (first + parents)[matched].tolist(), strict=True
    ):
        if parent == last[request]:
            last[request] = row
            paths[request].append(row - int(row_start[request]))
    emitted = [
        [*tokens[start + np.array(path, dtype=np.int64)].tolist(), int(choice[end])]
        for start, path, end in zip(row_start[:-1].tolist(), paths, last, strict=True)
    ]
    return paths, emitted


def walk(
    row_start: Int32, tokens: Int32, parents: Int32, draw: Draw
) -> tuple[list[list[int]], list[list[int]]]:
    """The walk with one draw per visited row; arguments and result as in `greedy_walk`."""
    num_requests = len(row_start) - 1
    paths: list[list[int]] = [[] for _ in range(num_requests)]
    emitted: list[list[int]] = [[] for _ in range(num_requests)]
    active, rows = list(range(num_requests)), [0] * num_requests
    while active:
        drawn = draw(active, rows, [emitted[request] for request in active])
        next_active, next_rows = [], []
        for request, row, token in zip(active, rows, drawn, strict=True):
            emitted[request].append(token)
            start, end = row_start[request], row_start[request + 1]
            # Children stand behind their parent.
            children = (parents[start + row + 1 : end] == row) & (tokens[start + row + 1 : end] == token)
            if children.any():
                child = row + 1 + int(children.argmax())
                paths[request].append(child)
                next_active.append(request)
                next_rows.append(child)
        active, rows = next_active, next_rows
    return paths, emitted
