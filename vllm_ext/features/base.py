# SPDX-License-Identifier: Apache-2.0
"""What a feature is, and what features must know of each other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ext.config.runners import RunnerChoice
from vllm_ext.data import model_files

if TYPE_CHECKING:
    from vllm_ext.config.kv_cache import KVSettings
    from vllm_ext.config.rules import RuleSettings
    from vllm_ext.config.speculative import Settings
    from vllm_ext.config.structured_outputs import StructuredOptions


@dataclass
class Asked:
    """All that one server is asked for; None or False: it is not."""

    runner: RunnerChoice  # where no method of ours chooses, vLLM's own
    method: Settings | None = None
    rules: RuleSettings | None = None
    kv: KVSettings | None = None
    structured: StructuredOptions | None = None
    # Logits processors of the user's own, for V2; None: as they were given.
    processors: list[Any] | None = None

    @property
    def on_v2(self) -> bool:
        """Whether vLLM's V2 model runner will run."""
        return self.runner.runner == "V2"


class Feature:
    """One of them. Its methods are called in this order, each of all features before the next; `features.engine_args`.

    Each raises ValueError, naming the option, its value and the way out, for what does not go together.
    """

    def parse(self, args: Any, asked: Asked) -> None:
        """Read the engine's ``EngineArgs``, make the folders that are named, and note it in ``asked``."""

    def refuse(self, args: Any, asked: Asked) -> None:
        """Before vLLM looks at the model."""

    def options(self, args: Any, asked: Asked) -> dict[str, Any]:
        """Fields of ``EngineArgs`` that are to differ. Where two features name one, the later feature's counts."""
        return {}

    def worker_parts(self, asked: Asked) -> Sequence[str]:
        """Of `engine.composed.worker`; where the user has named a worker of their own, it stays."""
        return ()

    def scheduler_parts(self, vllm_config: Any, asked: Asked) -> Sequence[str]:
        """Of `engine.composed.scheduler`; where the user has named a scheduler of their own, it stays."""
        return ()

    def settings(self, asked: Asked) -> dict[str, Any]:
        """Under ``additional_config["vllm_ext"]``, which the engine's processes read."""
        return {}

    def check(self, vllm_config: Any, asked: Asked) -> None:
        """What only the finished configuration tells; then patches, classes and log lines."""


def vocabulary(vllm_config: Any) -> tuple[int, Callable[[], str]]:
    """The target's number of token ids, and what hashes its tokenizer."""
    model = vllm_config.model_config
    return (
        model.get_vocab_size(),
        functools.partial(model_files.hash_of, model.tokenizer, model.tokenizer_revision),
    )
