# SPDX-License-Identifier: Apache-2.0
"""What a proposer learns, over restarts: read at the start, on all ranks the same, and saved by rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_ext import state
from vllm_ext.config import Settings
from vllm_ext.proposers.base import Proposer

logger = init_logger("vllm.vllm_ext")


class Memory:
    """Of one proposer; without a ``state_dir`` it does nothing.

    Args:
        vllm_config: the engine's.
        settings: the method's.
        count: adds one to a counter.
    """

    def __init__(self, vllm_config: Any, settings: Settings, count: Callable[[str], None]) -> None:
        # Held while the proposer learns or is read; a save copies what it has learnt in another thread.
        self.lock = threading.Lock()
        self._config, self._settings, self._count = vllm_config, settings, count
        self._keeper: state.Keeper | None = None  # rank 0's

    def restore(self, proposer: Proposer) -> Proposer:
        """Let it take over what was saved, and keep what it learns from now on. Another one where it could not."""
        state_dir = self._settings.options.state_dir
        if state_dir is None:
            return proposer
        file, arrays = None, None
        if self._config.parallel_config.rank == 0:
            file = state.StateFile(
                state.prepare_folder(state_dir), state.Identity.of(self._config, self._settings)
            )
            try:
                arrays = file.load()
            except state.StateError as error:
                file = self._set_aside(file, str(error))
        if self._config.parallel_config.world_size > 1:
            # Not read by each: another server may replace it meanwhile, and other hosts may not have it.
            arrays = get_tp_group().broadcast_object(arrays, src=0)
        if arrays is not None:
            try:
                proposer.restore(arrays)
            except ValueError as error:  # on all ranks alike
                proposer = self._settings.proposer_class.from_options(
                    self._settings.options, self._config.model_config.get_vocab_size()
                )
                if file is not None:
                    file = self._set_aside(file, str(error))
            else:
                self._count("state_loads")
                if file is not None:
                    logger.info("vllm-ext: loaded what was learnt from %s", file.path)
        if file is not None:
            self._keeper = state.Keeper(
                file,
                proposer.learned,
                self.lock,
                60.0 * self._settings.options.state_interval_minutes,
                self._count,
            )
        return proposer

    def _set_aside(self, file: state.StateFile, reason: str) -> state.StateFile | None:
        """The file to save to; None where the unusable one cannot be moved out of the way."""
        self._count("state_set_aside")
        try:
            file.set_aside(reason)
        except OSError as error:
            logger.warning(
                "vllm-ext: the saved state %s cannot be used: %s. Nor can it be renamed (%s): nothing "
                "will be saved.",
                file.path,
                reason,
                error,
            )
            return None
        return file

    @property
    def keeps(self) -> bool:
        """Whether anything is saved, and by this rank."""
        return self._keeper is not None

    def touch(self) -> None:
        """There is something new to keep. Call with the lock held."""
        if self._keeper is not None:
            self._keeper.touch()

    def close(self) -> None:
        """Save, the last time."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
