# SPDX-License-Identifier: Apache-2.0
"""What a proposer or a rule learns, over restarts: read at the start, on all ranks the same, and saved by rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_ext.engine.state import state_file
from vllm_ext.kernels.learned_arrays import Learned

logger = init_logger("vllm.vllm_ext")


class Learner(Protocol):
    """What learns; see `vllm_ext.proposers.base.Proposer`."""

    def state_dict(self) -> dict[str, Learned]:
        """What to save."""

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """Take over what was saved; ValueError where it cannot be."""


L = TypeVar("L", bound=Learner)


class Checkpointer:
    """Of one learner; without a ``state_dir`` it does nothing.

    Args:
        vllm_config: the engine's.
        name: of the method or rule.
        options: its own; ``state_dir`` and ``state_interval_minutes`` say where to and how often.
        own: those of them that make what is learnt another.
        count: adds one to a counter.
    """

    def __init__(
        self,
        vllm_config: Any,
        name: str,
        options: Any,
        own: Mapping[str, Any],
        count: Callable[[str], None],
    ) -> None:
        # Held while the learner learns or is read; a save copies what it has learnt in another thread.
        self.lock = threading.Lock()
        self._config, self._name, self._options, self._own = vllm_config, name, options, own
        self._count = count
        self._keeper: state_file.Keeper | None = None  # rank 0's

    def restore(self, learner: L, make_another: Callable[[], L]) -> L:
        """Let it take over what was saved, and keep what it learns from now on.

        Args:
            learner: has learnt nothing yet.
            make_another: makes another, for where it could not take over what was saved.

        Returns:
            The one of these to use.
        """
        state_dir = self._options.state_dir
        if state_dir is None:
            return learner
        file, arrays = None, None
        if self._config.parallel_config.rank == 0:
            file = state_file.StateFile(
                state_file.prepare_folder(state_dir),
                state_file.Identity.of(self._config, self._name, self._own),
            )
            try:
                arrays = file.load()
            except state_file.StateError as error:
                file = self._set_aside(file, str(error))
        if self._config.parallel_config.world_size > 1:
            # Not read by each: another server may replace it meanwhile, and other hosts may not have it.
            arrays = get_tp_group().broadcast_object(arrays, src=0)
        if arrays is not None:
            try:
                learner.load_state_dict(arrays)
            except ValueError as error:  # on all ranks alike
                learner = make_another()
                if file is not None:
                    file = self._set_aside(file, str(error))
            else:
                self._count("state_loads")
                if file is not None:
                    logger.info("vllm-ext: loaded what was learnt from %s", file.path)
        if file is not None:
            self._keeper = state_file.Keeper(
                file,
                learner.state_dict,
                self.lock,
                60.0 * self._options.state_interval_minutes,
                self._count,
            )
        return learner

    def _set_aside(self, file: state_file.StateFile, reason: str) -> state_file.StateFile | None:
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

    def mark_dirty(self) -> None:
        """There is something new to keep. Call with the lock held."""
        if self._keeper is not None:
            self._keeper.mark_dirty()

    def close(self) -> None:
        """Save, the last time."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
