# SPDX-License-Identifier: Apache-2.0
"""Makes layers of ours known to vLLM, for models that have some."""

from __future__ import annotations

from typing import Any

from vllm_ext.compat import hooks
from vllm_ext.compat.hooks_recurrent import RECURRENT_HOOKS


def register(model_config: Any) -> None:
    """Have vLLM make our recurrent layers instead of its own; of a model without such, nothing.

    Raises:
        RuntimeError: what we know of vLLM's is not there.
    """
    if not (model_config.is_hybrid or model_config.is_attention_free):
        return
    hooks.check_hooks(RECURRENT_HOOKS)
    from vllm_ext.engine.recurrent import gated_delta_net, mamba2

    mamba2.register()
    gated_delta_net.register()
