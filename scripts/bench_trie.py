# SPDX-License-Identifier: Apache-2.0
"""Masks of a large trie beside dictionaries walked in Python: time and memory.

    .venv/bin/python scripts/bench_trie.py --sequences 1000000 --batch-size 32

Sequences are random: as many first tokens as the square root of their number, and eight tokens in all. Each row is at a
random depth of a random sequence. Medians of turns, in turns; the dictionaries write the same masks, bit by bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from vllm_ext.kernels import trie, trie_ref

VOCAB, END, LENGTH = 49_152, 2, 8


def main() -> None:
    """Read the arguments, build both, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=200)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    sequences = rng.integers(3, VOCAB, (arguments.sequences, LENGTH), dtype=np.int32)
    firsts = rng.integers(3, VOCAB, int(arguments.sequences**0.5), dtype=np.int32)
    sequences[:, 0] = rng.choice(firsts, arguments.sequences)
    started = time.perf_counter()
    made = trie.build(sequences)
    built = time.perf_counter() - started
    started = time.perf_counter()
    root = trie_ref.build(sequences.tolist())
    print(
        f"{arguments.sequences} sequences, {made.num_states} states: built in {built:.1f} s, "
        f"{made.num_bytes / 1e6:.0f} MB; dictionaries in {time.perf_counter() - started:.1f} s"
    )
    prefixes = [
        row[:depth].tolist()
        for row, depth in zip(
            sequences[rng.integers(0, arguments.sequences, arguments.batch_size)],
            rng.integers(0, LENGTH, arguments.batch_size),
            strict=True,
        )
    ]
    states = np.zeros(len(prefixes), dtype=np.int32)
    for row, prefix in enumerate(prefixes):
        for token in prefix:
            states[row : row + 1] = trie.advance(made, states[row : row + 1], np.array([token], np.int32))
    masks = np.zeros((len(prefixes), -(-VOCAB // 32)), dtype=np.int32)
    reference = np.zeros_like(masks)

    def arrays() -> None:
        trie.fill_masks(made, states, END, masks)

    def dictionaries() -> None:
        reference[:] = 0
        words = reference.view(np.uint32)
        for row, prefix in enumerate(prefixes):
            for token in trie_ref.allowed(root, prefix, END):
                words[row, token >> 5] |= np.uint32(1 << (token & 31))

    spent: dict[Callable[[], None], list[float]] = {arrays: [], dictionaries: []}
    for _ in range(arguments.turns):
        for run, times in spent.items():
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    assert (masks == reference).all()
    ours, theirs = (sorted(times)[len(times) // 2] for times in spent.values())
    print(
        f"masks of {len(prefixes)} rows: {1e6 * ours:.1f} us, dictionaries {1e6 * theirs:.1f} us, {theirs / ours:.0f}x"
    )


if __name__ == "__main__":
    main()
