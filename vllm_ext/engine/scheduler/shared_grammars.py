# SPDX-License-Identifier: Apache-2.0
"""Hands on the grammars of structured requests to rules that read them (`Rule.shares_grammars`), on the V2 runner."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ext.config.asked import asked_of
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.samplers import shared_grammars


class SharedGrammars:
    """A request's grammar is there when the request is scheduled: vLLM waits for it."""

    # vLLM's.
    requests: dict[str, Any]
    vllm_config: Any

    @functools.cached_property
    def _vocabulary(self) -> ModelVocabulary:
        return ModelVocabulary.of(self.vllm_config.model_config)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            if request.use_structured_output:
                found = asked_of(request.sampling_params).grammar
                compiled = getattr(request.structured_output_request.grammar, "ctx", None)
                if found is not None and compiled is not None:
                    shared_grammars.share(self._vocabulary, *found, compiled)
        return output
