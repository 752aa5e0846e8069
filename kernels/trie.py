# SPDX-License-Identifier: Apache-2.0
"""A set of token sequences as a trie in three arrays, and what it allows next, for many rows at once.

States are numbered level by level, each level in the order of its sequences, and all but the root have one edge that
leads to them: the edge that leads to state ``s`` is number ``s - 1``. So an edge needs no target, and the children of a
state stand side by side.

`build` makes one, `advance` and `follow` go down it, `fill_masks` writes masks. `trie_numba.py` has their loops,
`trie_ref.py` is their readable form. numba is imported at the first call: vLLM's worker cannot start in a process that
holds it.

Source: STATIC, arXiv 2602.22647: a compressed sparse row matrix of transitions. Left out are its dense tables of the
first two levels, which are for devices that cannot branch; sequences may differ in length here.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]

ROOT, DEAD = 0, -1  # states; nothing is allowed in the second
NO_TOKEN = -1  # behind the end of a sequence


class Trie(NamedTuple):
    """Nine bytes a state."""

    first_edge: Int32  # [num_states + 1] edges of state s are first_edge[s]:first_edge[s + 1]
    tokens: Int32  # [num_states - 1] by edge; those of a state ascending
    final: Bool  # [num_states] a sequence ends here

    @property
    def num_states(self) -> int:
        """The root among them."""
        return len(self.final)

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self)


def build(sequences: Int32) -> Trie:
    """The trie of some sequences.

    Args:
        sequences: int32 ``[num_sequences, longest]``, in any order, also several times; `NO_TOKEN` behind the end of
            those that are shorter. None is empty.

    Raises:
        ValueError: there are none, or a row is no sequence.
    """
    if sequences.size == 0:
        raise ValueError(
            f"sequences has shape {list(sequences.shape)}; at least one sequence of one token is needed"
        )
    real = sequences >= 0
    lengths = real.sum(1)
    wrong = (lengths == 0) | (real[:, 1:] & ~real[:, :-1]).any(1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"sequences[{row}]={sequences[row].tolist()} is empty, or goes on behind its end")
    order = np.lexsort(sequences.T[::-1])
    rows, lengths = sequences[order], lengths[order]
    # Where each row differs from the one before it; a row that is equal makes no state.
    changed = np.ones(rows.shape, dtype=np.bool_)
    changed[1:] = rows[1:] != rows[:-1]
    np.logical_or.accumulate(changed, axis=1, out=changed)
    tokens, degrees = [], []
    num_states = 1
    above = np.zeros(len(rows), dtype=np.int64)  # by row, its state at the level above
    final = [np.zeros(1, dtype=np.bool_)]
    for depth in range(rows.shape[1]):
        here = lengths > depth
        new = changed[:, depth] & here
        state = num_states + np.cumsum(new) - 1  # of rows that get as far
        tokens.append(rows[new, depth])
        degrees.append(np.bincount(above[new], minlength=num_states)[num_states - len(final[-1]) :])
        ends = np.zeros(int(new.sum()), dtype=np.bool_)
        ends[state[here & (lengths == depth + 1)] - num_states] = True
        num_states += len(ends)
        final.append(ends)
        above = state
    degrees.append(np.zeros(len(final[-1]), dtype=np.int64))
    if num_states > np.iinfo(np.int32).max:
        raise ValueError(
            f"the sequences have {num_states} prefixes; at most {np.iinfo(np.int32).max} are possible"
        )
    first_edge = np.zeros(num_states + 1, dtype=np.int32)
    np.cumsum(np.concatenate(degrees), out=first_edge[1:])
    return Trie(first_edge, np.concatenate(tokens), np.concatenate(final))


def advance(trie: Trie, states: Int32, tokens: Int32) -> Int32:
    """int32 ``[num_rows]``: the state behind one more token each; `DEAD` where it is not allowed.

    Args:
        trie: any.
        states: int32 ``[num_rows]``.
        tokens: int32 ``[num_rows]``.
    """
    result = np.empty(len(states), dtype=np.int32)
    _compiled("advance")(trie, states, tokens, result)
    return result


def follow(trie: Trie, tokens: Int32) -> int:
    """The state behind int32 ``[num_tokens]``; `DEAD` where they are not allowed."""
    return int(_compiled("follow")(trie, tokens))


def fill_masks(trie: Trie, states: Int32, end: int, masks: Int32) -> None:
    """A bit for each token that may come next.

    Args:
        trie: any.
        states: int32 ``[num_rows]``.
        end: the token that may come where a sequence ends.
        masks: int32 ``[num_rows, ceil(vocab / 32)]``, overwritten; the lowest bit of a word is its first token's.
    """
    _compiled("fill_masks")(trie, states, end, masks)


@functools.cache
def _compiled(name: str) -> Any:
    from vllm_ext.kernels import trie_numba

    return trie_numba.compiled(name)
