# SPDX-License-Identifier: Apache-2.0
"""What parts of the scheduler for rules go by."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ext.config import rules


class Ruled:
    """Knows the engine's rules; there are some."""

    vllm_config: Any  # vLLM's

    @functools.cached_property
    def _ruled(self) -> rules.RuleSettings:
        settings = rules.of_vllm_config(self.vllm_config)
        assert settings is not None
        return settings
