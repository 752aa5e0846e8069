# SPDX-License-Identifier: Apache-2.0
"""What saving and loading learnt state costs: size and milliseconds, for hybrid with a full shared index."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from vllm_ext.engine.state.state_file import Identity, StateFile
from vllm_ext.kernels.suffix_index import SEPARATOR, append
from vllm_ext.proposers.hybrid import Hybrid
from vllm_ext.proposers.suffix_tree import SuffixDecoding
from vllm_ext.proposers.token_recycling import TokenRecycling

VOCAB = 49152
TOKENS_PER_ANSWER = 200


def proposer() -> tuple[Hybrid, SuffixDecoding]:
    """The default drafters."""
    suffix = SuffixDecoding(VOCAB)
    return Hybrid([TokenRecycling(VOCAB), suffix]), suffix


def main() -> None:
    """Five rounds; the first ones also pay for pages and compilation."""
    random = np.random.default_rng(0)
    hybrid, suffix = proposer()
    while suffix.shared.end[0] <= len(suffix.shared.log):
        text = np.append(random.integers(0, VOCAB, TOKENS_PER_ANSWER), SEPARATOR)
        append(suffix.shared, text.astype(np.int32), 7, VOCAB)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        file = StateFile(Path(folder), Identity("model", "", "", VOCAB, "hybrid", "", 0))
        for _ in range(5):
            times = [time.perf_counter()]
            state_dict = hybrid.state_dict()
            times.append(time.perf_counter())
            file.save(state_dict)
            times.append(time.perf_counter())
            loaded = file.load()
            assert loaded is not None
            times.append(time.perf_counter())
            again, _ = proposer()
            made = time.perf_counter() - times[-1]
            again.load_state_dict(loaded)
            times.append(time.perf_counter() - made)
            copy, write, load, restore = 1e3 * np.diff(times)
            size = sum(array.nbytes for array in state_dict.values()) / 1e6
            print(
                f"{size:.1f} MB: copy {copy:.1f} ms, write {write:.0f}, load {load:.0f}, restore {restore:.0f}"
            )


if __name__ == "__main__":
    main()
