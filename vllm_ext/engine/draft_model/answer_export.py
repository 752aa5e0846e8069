# SPDX-License-Identifier: Apache-2.0
"""What the target says while it serves, kept for its draft model to learn from: `vllm-ext train draft --answers`.

The newest answers, up to so many bytes, as shards in a folder; a shard is written by another thread once it is full.

Source: "Online Speculative Decoding", arXiv 2310.07177 (a buffer of contexts with the target's distributions, from
which the draft is distilled again). Deviation: every answer is kept, not only where the draft was wrong. The draft is
trained outside the server, or beside it (`online`).
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_ext.data import answers as draft_data
from vllm_ext.data.weight_versions import ANSWERS
from vllm_ext.proposers.base import VerifiedRows
from vllm_ext.proposers.online import OnlineOptions
from vllm_ext.proposers.tree import Float32, Int32

logger = init_logger("vllm.vllm_ext")

TOP_K = 16  # alternatives kept of each token
MAX_LENGTH = 1024  # tokens kept of a prompt with its answer, the last ones
LEAST = 8  # tokens: shorter answers are not kept


def _size(file: Path) -> int:
    """In bytes; 0 where the trainer has deleted it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def online_folder(parallel_config: Any, options: OnlineOptions) -> Path:
    """An engine's own, under that of ``online``."""
    return Path(options.dir) / str(parallel_config.data_parallel_index)


@dataclass(slots=True)
class _Open:
    """A request that runs."""

    prompt: Int32 | None = None
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_LENGTH))
    tops: deque[tuple[Int32, Float32]] = field(default_factory=lambda: deque(maxlen=MAX_LENGTH))


class Export:
    """The buffer.

    Args:
        folder: of the shards, this engine's alone; those that are there count.
        megabytes: most of all shards together; the oldest are deleted for newer ones.
        in_shard: answers of a shard; None: `draft_data.SHARD`.
    """

    def __init__(self, folder: Path, megabytes: float, in_shard: int | None = None) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._most = folder, int(1e6 * megabytes)
        self._in_shard = in_shard or draft_data.SHARD
        self._open: dict[str, _Open] = {}
        self._full: list[draft_data.Answer] = []
        self._writer = ThreadPoolExecutor(1, "vllm-ext-export")
        self._causes: set[str] = set()

    @classmethod
    def of(cls, parallel_config: Any, options: Any) -> Export | None:
        """A method's that has an ``export_dir`` or is ``online``; rank 0's alone, in a folder of its engine's."""
        if parallel_config.rank != 0:
            return None
        if (online := options.online) is not None:
            folder = online_folder(parallel_config, online) / ANSWERS
            return cls(folder, online.buffer_mb, online.update_interval)
        return cls(Path(options.export_dir) / str(parallel_config.data_parallel_index), options.export_mb)

    def observe(self, rows: VerifiedRows, log_total: Float32) -> None:
        """Keep the target's likeliest tokens at the place of each token that was put out.

        Args:
            rows: of the step, with `TOP_K` alternatives.
            log_total: float32 ``[num_rows]``, the log of the sum of the exponentials of each row's logits.
        """
        for index, (name, emitted) in enumerate(zip(rows.request_ids, rows.emitted, strict=True)):
            if not emitted:
                continue
            request = self._open.setdefault(name, _Open())
            own = np.arange(rows.row_start[index], rows.row_start[index + 1])
            path = own[rows.accepted[own]][: len(emitted)]  # parents stand before their children
            request.tokens.extend(emitted)
            request.tops.extend((rows.top_ids[row], rows.top_logits[row] - log_total[row]) for row in path)

    def start(self, request_id: str, prompt: Int32) -> None:
        """A request's prompt, once."""
        self._open.setdefault(request_id, _Open()).prompt = prompt[-MAX_LENGTH:].copy()

    def finish(self, request_id: str) -> None:
        """A request is gone: its answer is an example."""
        request = self._open.pop(request_id, None)
        if request is None or request.prompt is None or len(request.tops) < LEAST:
            return
        outputs = np.array(request.tokens, np.int32)
        prompt = request.prompt[len(request.prompt) - min(len(request.prompt), MAX_LENGTH - len(outputs)) :]
        ids, logp = zip(*request.tops, strict=True)
        self._full.append(
            draft_data.Answer(np.concatenate([prompt, outputs]), len(prompt), np.stack(ids), np.stack(logp))
        )
        if len(self._full) >= self._in_shard:
            self._flush()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        for request_id in list(self._open):
            self.finish(request_id)
        self._flush()
        self._writer.shutdown()

    def _flush(self) -> None:
        full, self._full = self._full, []
        if full:
            self._writer.submit(self._write, full)

    def _write(self, answers: list[draft_data.Answer]) -> None:
        try:
            shards = sorted(self._folder.glob("*.npz"))
            number = int(shards[-1].stem) + self._in_shard if shards else 0
            file = draft_data.shard_file(self._folder, number)
            draft_data.write(file, answers)
            sizes = {shard: _size(shard) for shard in (*shards, file)}
            for shard in shards:
                if sum(sizes.values()) <= self._most:
                    break
                shard.unlink(missing_ok=True)
                del sizes[shard]
        except Exception as error:
            if (cause := repr(error)) not in self._causes:
                self._causes.add(cause)
                logger.warning(
                    "vllm-ext: %d answers could not be written to %s: %s. They are lost for training; requests go on, "
                    "and the same fault is not logged again.",
                    len(answers),
                    self._folder,
                    error,
                )
