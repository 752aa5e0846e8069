# SPDX-License-Identifier: Apache-2.0
"""A datastore in memory."""

from __future__ import annotations

import numpy as np

from vllm_ext.kernels import suffix_array_ref as ref
from vllm_ext.proposers.datastore import Datastore, Header, Segment, SegmentInfo

VOCAB = 20
Texts = list[list[int]]


def store_of(*parts: Texts, vocab: int = VOCAB) -> Datastore:
    """A store in memory, one segment for each part."""
    segments = []
    for texts in parts:
        tokens = [vocab, *(token for text in texts for token in (*text, vocab))]
        order = sorted(range(len(tokens)), key=lambda at: ref.sort_key_ref(tokens, vocab, at))
        segments.append(Segment(np.array(tokens, np.uint16), np.array(order, np.int32)))
    info = [
        SegmentInfo(
            name=f"{number:06d}",
            num_tokens=len(one.tokens),
            num_documents=1,
            tokens_blake3="",
            suffixes_blake3="",
        )
        for number, one in enumerate(segments)
    ]
    header = Header(created="", tokenizer="", tokenizer_hash="", vocab_size=vocab, segments=info)
    return Datastore(header, tuple(segments))
