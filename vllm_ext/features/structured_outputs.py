# SPDX-License-Identifier: Apache-2.0
"""Structured output that is enforced whole or refused, and whose whitespace is bounded."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from vllm_ext import __version__, patches
from vllm_ext.config import structured_outputs
from vllm_ext.features.base import Asked, Feature

logger = init_logger("vllm.vllm_ext")


class StructuredOutputs(Feature):
    """Strict servers, and those that bound whitespace."""

    def parse(self, args: Any, asked: Asked) -> None:
        asked.structured = structured_outputs.of(args)

    def check(self, vllm_config: Any, asked: Asked) -> None:
        if asked.structured is not None:
            if warning := structured_outputs.check_vllm_config(vllm_config, asked.structured):
                logger.warning("vllm-ext: %s", warning)
            patches.read_requests()
            logger.info("vllm-ext %s: structured output: %s", __version__, asked.structured)
