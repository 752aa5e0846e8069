# SPDX-License-Identifier: Apache-2.0
"""Merging a datastore's segments: their positions are sorted already, so they need only be read side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_ext.data import atomic_files as files
from vllm_ext.data.atomic_files import Output, Progress, read_chunks
from vllm_ext.proposers import datastore
from vllm_ext.proposers.datastore import Header, SegmentInfo


def merge(folder: Path, progress: Progress) -> Header:
    """Make one segment of all, or as few as positions of 32 bits allow: look-ups search each of them.

    Raises:
        DatastoreError: there is no such store, it is damaged, or being written to.
    """
    datastore.read_header(folder)  # before anything is written there
    with files.writing(folder):
        header = datastore.verify(folder)  # new checksums must not cover old damage
        groups: list[list[SegmentInfo]] = [[]]
        for segment in header.segments:
            if sum(one.num_tokens for one in groups[-1]) + segment.num_tokens > datastore.MAX_SEGMENT_TOKENS:
                groups.append([])
            groups[-1].append(segment)
        segments = [
            group[0] if len(group) == 1 else _merge_group(folder, header, group, progress) for group in groups
        ]
        header = header.model_copy(update={"created": files.now(), "segments": segments})
        files.commit(folder, header)
    return header


def _merge_group(folder: Path, header: Header, group: list[SegmentInfo], progress: Progress) -> SegmentInfo:
    """Write the segment that holds what the group's hold."""
    from vllm_ext.kernels.suffix_array import merge_sorted

    name = files.next_name(folder)
    with Output(folder / f"{name}.tokens") as tokens_file:
        for segment in group:
            for chunk in read_chunks(folder / f"{segment.name}.tokens", header.dtype):
                tokens_file.write(chunk)
    tokens = datastore.map_array(folder / f"{name}.tokens", header.dtype)
    offsets = np.cumsum([0] + [segment.num_tokens for segment in group])
    # File, what to add to its positions, and how many they are.
    runs = [
        (folder / f"{segment.name}.suffixes", int(offset), segment.num_tokens)
        for segment, offset in zip(group, offsets, strict=False)
    ]
    done, number = 0, 0
    total = len(tokens) * (len(runs) - 1)  # at most: the shortest are merged first
    while len(runs) > 1:
        runs.sort(key=lambda run: run[2])
        (left, left_offset, left_count), (right, right_offset, right_count), *runs = runs
        number += 1
        target = folder / (f"building.{number}" if runs else f"{name}.suffixes")
        with Output(target) as output:
            rests = read_chunks(left, np.dtype("<i4")), read_chunks(right, np.dtype("<i4"))
            none = np.zeros(0, np.int32)
            a, b = none, none
            while True:
                if not len(a):
                    a = next(rests[0], none) + np.int32(left_offset)
                if not len(b):
                    b = next(rests[1], none) + np.int32(right_offset)
                if not len(a) or not len(b):
                    break
                out = np.empty(len(a) + len(b), np.int32)
                taken_a, taken_b = merge_sorted(tokens, header.separator, a, b, out)
                output.write(out[: taken_a + taken_b].astype("<i4", copy=False))
                a, b = a[taken_a:], b[taken_b:]
                done += taken_a + taken_b
                progress("merging", done, total)
            for rest, chunks, offset in ((a, rests[0], left_offset), (b, rests[1], right_offset)):
                output.write(rest)
                for chunk in chunks:
                    output.write(chunk + np.int32(offset))
        runs.append((target, 0, left_count + right_count))
    return SegmentInfo(
        name=name,
        num_tokens=len(tokens),
        num_documents=sum(segment.num_documents for segment in group),
        tokens_blake3=tokens_file.checksum,
        suffixes_blake3=output.checksum,
    )
