# SPDX-License-Identifier: Apache-2.0
"""The entry point vLLM calls in every process: it makes our names valid where vLLM reads its options.

`features` turns them into options that vLLM knows. Engines that are asked for nothing of ours are as without us.
"""

from __future__ import annotations

from typing import Any

from vllm_ext import patches
from vllm_ext.engine import backend_overrides, startup_log


def register() -> None:
    """Make our method names valid in ``speculative_config``, and rules in ``additional_config``. Idempotent, silent."""
    from vllm import envs

    startup_log.admit_our_variables(envs.environment_variables)
    startup_log.trust_our_schedulers()
    patches.rewrite_engine_args(_create_engine_config)


def _create_engine_config(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm_ext.config import speculative

    backend_overrides.clear()  # of an engine whose start failed
    speculative.check_spelling(engine_args)
    ours = speculative.is_ours(engine_args.speculative_config)
    if engine_args.speculative_config and not ours:
        speculative.check_known(engine_args.speculative_config)
    if not ours and not speculative.ours(engine_args):
        return original(engine_args, *args, **kwargs)
    from vllm_ext.features import engine_args as features

    return features.create_engine_config(original, engine_args, *args, **kwargs)
