# SPDX-License-Identifier: Apache-2.0
"""A second model in vLLM's V2 worker, which reads what the target reads, in the same step.

Of a request that decodes it reads the last tokens that may be new, whether they are or not: what was read before is
read again into the same slots of the KV cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.device.passes import Texts
from vllm_ext.engine.draft_model.device.reading import ReadingPasses
from vllm_ext.engine.models import cpu_linear, second_model
from vllm_ext.kernels.backends import Backend
from vllm_ext.proposers.draft_model import DraftModelOptions

PREFIX = "companion"  # of the layers' names


class SeparateOnDevice(ReadingPasses):
    """See `ReadingPasses`.

    Args:
        vllm_config: the target's.
        options: which model.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
    """

    what_next = "Choose another draft model, or a method without one: `vllm-ext methods`."

    def __init__(
        self, vllm_config: Any, options: DraftModelOptions, req_states: Any, backend: Backend
    ) -> None:
        super().__init__(vllm_config, req_states, backend, f"speculative_config.model={options.model!r}")
        self._options = options
        self.model: Any = None

    def load(self, target: Any) -> None:
        """Build it and load its weights; its layers then take part in vLLM's sizing of the caches."""
        with cpu_linear.drafts(self._target_config):
            loaded = second_model.load(self._target_config, self._options, target, PREFIX)
        self.config, self.model, self.layers = loaded
        self.own_layers = self.layers
        self.vocab_size = min(self.vocab_size, self.config.model_config.get_vocab_size())
        second_model.log_draft(self._options, self.model, self.layers)

    def _last_places(self, texts: Texts) -> tuple[torch.Tensor, torch.Tensor]:
        return (texts.lengths - self.most_new).clamp(min=0), texts.lengths

    def _rows_of(self, input_batch: Any, behind: Any) -> np.ndarray[Any, Any]:
        scheduled = np.asarray(input_batch.num_scheduled_tokens)
        complete = input_batch.num_computed_tokens_np + scheduled >= input_batch.prefill_len_np
        rows: np.ndarray[Any, Any] = behind + np.where(
            input_batch.is_prefilling_np, scheduled + complete, np.minimum(scheduled, self.most_new)
        )
        return rows

    def _places_of(
        self, input_batch: Any, texts: Texts, number: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = texts.lengths.to(torch.int64)
        return (end - number).clamp(min=0), end

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=tokens, positions=positions, intermediate_tensors=None)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits
