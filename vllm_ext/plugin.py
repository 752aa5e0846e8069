# SPDX-License-Identifier: Apache-2.0
"""The entry point vLLM calls in every process, and the one wrapper it installs.

``register()`` wraps ``EngineArgs.create_engine_config`` and does nothing else. vLLM's ``method`` is a closed Literal
and its registries start behind it, so this is the one place where our method names can enter. `features` turns them,
and what stands in ``additional_config``, into options that vLLM knows.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_ext.engine import startup_log

_wrapper: Any = None


def register() -> None:
    """Make our method names valid in ``speculative_config``, and rules in ``additional_config``. Idempotent, silent."""
    global _wrapper
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    startup_log.admit_our_variables(envs.environment_variables)
    startup_log.trust_our_schedulers()

    original = EngineArgs.create_engine_config
    if original is _wrapper:
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_ext.config import speculative

        speculative.check_spelling(self)
        ours = speculative.is_ours(self.speculative_config)
        if self.speculative_config and not ours:
            speculative.check_known(self.speculative_config)
        if not ours and not speculative.ours(self):
            return original(self, *args, **kwargs)
        from vllm_ext.features import engine_args

        return engine_args.create_engine_config(original, self, *args, **kwargs)

    _wrapper = create_engine_config
    EngineArgs.create_engine_config = create_engine_config
