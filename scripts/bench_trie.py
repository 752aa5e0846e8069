# SPDX-License-Identifier: Apache-2.0
"""Masks of a large trie beside dictionaries walked in Python: time and memory.

    .venv/bin/python scripts/bench_trie.py --sequences 1000000 --batch-size 32 [--step]

Sequences are random: as many first tokens as the square root of their number, and eight tokens in all. Each row is at a
random depth of a random sequence. Medians of turns, in turns; the dictionaries write the same masks, bit by bit. The
rule's time is all that it does with rows of logits: their states, from their tokens, the masks, and the logits. With
``--step`` it stands beside a decode step of plain vLLM, SmolLM2-135M-Instruct in bfloat16, at the same batch size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from vllm_ext.kernels import trie, trie_ref
from vllm_ext.samplers.base import Asked, Row
from vllm_ext.samplers.trie import TrieParams, TrieRule

VOCAB, END, LENGTH = 49_152, 2, 8


def main() -> None:
    """Read the arguments, build both, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--step", action="store_true", help="also time decode steps of plain vLLM")
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

    rule = TrieRule({"set": made}, VOCAB)
    rows = [Row([], prefix, END, TrieParams(trie="set"), Asked()) for prefix in prefixes]
    logits = torch.randn(len(rows), VOCAB)

    def whole_rule() -> None:
        rule.apply(logits, rows)

    spent: dict[Callable[[], None], list[float]] = {arrays: [], whole_rule: [], dictionaries: []}
    for _ in range(arguments.turns):
        for run, times in spent.items():
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    assert (masks == reference).all()
    ours, ruled, theirs = (sorted(times)[len(times) // 2] for times in spent.values())
    print(
        f"masks of {len(prefixes)} rows: {1e6 * ours:.1f} us, dictionaries {1e6 * theirs:.1f} us, "
        f"{theirs / ours:.0f}x; the rule on rows of logits: {1e6 * ruled:.0f} us"
    )
    if arguments.step:
        step = decode_step(len(rows))
        print(
            f"a decode step of {len(rows)} requests: {1e3 * step:.1f} ms, of which that is {100 * ruled / step:.1f} %"
        )


def decode_step(batch_size: int) -> float:
    """Seconds of a step of plain vLLM: the median of what 64 tokens take longer than 16, a step less."""
    from vllm import LLM, SamplingParams

    from vllm_ext.demo import embedded_model

    llm = LLM(
        str(embedded_model.ensure_model()),
        max_model_len=256,
        max_num_seqs=batch_size,
        kv_cache_memory_bytes=1 << 29,
    )
    prompts = [f"Write about the number {number}." for number in range(batch_size)]
    differences = []
    for _ in range(5):
        seconds = []
        for count in (16, 64):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        differences.append((seconds[1] - seconds[0]) / 48)
    return sorted(differences)[2]


if __name__ == "__main__":
    main()
