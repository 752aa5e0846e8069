# SPDX-License-Identifier: Apache-2.0
"""Keeps KV blocks that a companion model has read apart from those that it has not."""

from __future__ import annotations

from typing import Any

from vllm_ext.engine.scheduler.ruled import Ruled


class CompanionBlocks(Ruled):
    """Gives requests that the companion reads along with a cache salt: others' blocks lack its KV."""

    def add_request(self, request: Any) -> None:
        if self._ruled.reads_companion(request.sampling_params):
            request.cache_salt = f"{request.cache_salt or ''} vllm-ext companion"
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)  # type: ignore[misc]
