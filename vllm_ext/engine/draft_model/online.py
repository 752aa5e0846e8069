# SPDX-License-Identifier: Apache-2.0
"""Live distillation in the worker: the trainer's process, and versions of weights on their way into the draft.

A thread looks for new versions and for the trainer's end, reads and packs; what is left for the step is a copy, between
verification and the next drafts: what was drawn from a tree's ``q`` is verified with that ``q``. Rows of the draft's KV
cache that older weights have written stay: they make drafts a little worse until their requests end, and output no
other.

Source: "Online Speculative Decoding", arXiv 2310.07177. Training: `vllm_ext.training.online`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_ext.data import model_files, weight_versions
from vllm_ext.data.weight_versions import ANSWERS, LOG, VERSIONS
from vllm_ext.engine.draft_model.answer_export import MAX_LENGTH, online_folder
from vllm_ext.engine.models.draft_weights import DraftWeights, Prepared, apply
from vllm_ext.proposers.draft_model import DraftModelOptions
from vllm_ext.proposers.online import OnlineOptions

logger = init_logger("vllm.vllm_ext")

TRAINER = "vllm_ext.training.online"
LOOK_SECONDS = 0.5  # between looks for versions and for the trainer's end
END_SECONDS = 5.0  # that the trainer has for ending when it is asked to


@functools.cache
def cores() -> list[int]:
    """That this process may run on; first called before vLLM binds it to fewer."""
    return sorted(os.sched_getaffinity(0))


def check(vllm_config: Any, options: DraftModelOptions, draft_config: Any) -> None:
    """Refuse at start-up what cannot learn while it is served.

    Args:
        vllm_config: the engine's.
        options: the method's.
        draft_config: vLLM's ModelConfig of the draft.

    Raises:
        ValueError: naming it, and the way out.
    """
    if options.online is None:
        return
    field = "speculative_config.online"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks > 1:
        raise ValueError(
            f"{field} does not work with tensor_parallel_size={ranks}; allowed: 1. Each rank holds a part of each of "
            "the draft's weights, and all would have to take over a version in the same step. Remove it, and train "
            "with `vllm-ext train draft --answers` on what export_dir keeps."
        )
    if draft_config.quantization is not None:
        raise ValueError(
            f"{field} does not work with model={options.model!r}, whose weights are quantised "
            f"({draft_config.quantization}): it trains weights of 16 or 32 bits. Choose such a draft, or remove it."
        )
    if not list(model_files.snapshot(options.model).glob("*.safetensors")):
        raise ValueError(
            f"{field} does not work with model={options.model!r}, which has no safetensors files; save it with "
            "transformers' save_pretrained, or remove it."
        )


class Online:
    """A trainer, and what it has learnt.

    Args:
        folder: the engine's own.
        options: how it learns.
        checkpoint: the draft's folder.
        weights: of the draft that is served.
    """

    def __init__(self, folder: Path, options: OnlineOptions, checkpoint: Path, weights: DraftWeights) -> None:
        self.version = 0  # that the draft has; 0: its checkpoint's
        self.copy_seconds = 0.0  # that steps have waited for it, of all versions
        self._weights, self._draft = weights, model_files.fingerprint(checkpoint)
        self._versions = folder / VERSIONS
        for part in (ANSWERS, VERSIONS):
            (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._seen = 0  # newest version that was looked at
        self._ready: deque[tuple[int, Prepared]] = deque(maxlen=1)
        self._trainer: subprocess.Popen[bytes] | None = _start(folder, options, checkpoint)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm-ext-online", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, vllm_config: Any, options: DraftModelOptions, model: Any, what: str) -> Online | None:
        """Of a draft that is loaded; None where it is not to learn.

        Args:
            vllm_config: the target's.
            options: the method's.
            model: vLLM's, the draft.
            what: how errors name it.
        """
        if options.online is None:
            return None
        checkpoint = model_files.snapshot(options.model)
        weights = DraftWeights(model, checkpoint, vllm_config.model_config.dtype, what)
        return cls(
            online_folder(vllm_config.parallel_config, options.online), options.online, checkpoint, weights
        )

    def swap(self) -> bool:
        """Between two rounds: take over the newest version; whether there was one."""
        if not self._ready:
            return False
        began = time.perf_counter()
        self.version, prepared = self._ready.pop()
        apply(prepared)
        seconds = time.perf_counter() - began
        self.copy_seconds += seconds
        logger.info(
            "vllm-ext: the draft has version %d of its weights; a step waited %.1f ms for it",
            self.version,
            1e3 * seconds,
        )
        return True

    def close(self) -> None:
        """End the trainer and the thread. May be called again."""
        self._closing.set()
        self._thread.join(END_SECONDS)
        trainer, self._trainer = self._trainer, None
        if trainer is not None and trainer.poll() is None:
            trainer.terminate()
            try:
                trainer.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                trainer.kill()
                trainer.wait()

    def _watch(self) -> None:
        try:
            while not self._closing.wait(LOOK_SECONDS):
                self._look()
        except Exception as error:
            logger.warning(
                "vllm-ext: looking for versions of the draft's weights in %s failed: %s. Requests go on with those "
                "that it has; it is not tried again.",
                self._versions,
                error,
            )

    def _look(self) -> None:
        if (newest := max(weight_versions.numbers(self._versions), default=0)) > self._seen:
            self._seen = newest
            file = weight_versions.path(self._versions, newest)
            try:
                self._ready.append((newest, self._weights.prepare(weight_versions.read(file, self._draft))))
            except ValueError as error:
                logger.warning(
                    "vllm-ext: version %s of the draft's weights is left out: %s. The next one is tried.",
                    file,
                    error,
                )
        trainer = self._trainer
        if trainer is not None and (status := trainer.poll()) is not None:
            self._trainer = None
            logger.warning(
                "vllm-ext: the process that trains the draft has ended (status %d; %s has its last words). Requests go "
                "on with the weights that the draft has; it learns again after the next start of the server.",
                status,
                self._versions.parent / LOG,
            )


def _start(folder: Path, options: OnlineOptions, checkpoint: Path) -> subprocess.Popen[bytes]:
    """The trainer's process, with few threads of its own; it sets its priority itself."""
    given = {
        "folder": str(folder),
        "draft": str(checkpoint),
        "parent": os.getpid(),
        "cores": cores(),
        "max_length": MAX_LENGTH,
        "options": options.model_dump(),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KMP_")}
    environment |= {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", TRAINER, json.dumps(given)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
