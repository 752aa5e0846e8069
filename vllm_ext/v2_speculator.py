# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's V2 runner and a device-side drafter: what the steps' parts share, and vLLM's ``BaseSpeculator``.

Everything here happens on the device: no value of a tensor is asked for on the host, so that vLLM can prepare the next
step while this one runs. What the host decides it decides by what it knew before the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_ext import config
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import RowLayout, lay_out
from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.proposers.token_recycling_device import DeviceTokenRecycling
from vllm_ext.v2_counts import Counts

# vLLM's V2 runner has Triton; on a CPU its tests run it in the interpreter.
BACKEND: Backend = "triton"
# Of requests whose sampling depends on their output's tokens: their trees are sampled depth by depth.
SLOW_DEPTH = 6


class TreeSpeculator(BaseSpeculator):  # type: ignore[misc]  # vLLM is untyped to us
    """Drafts of all requests, by slot; and of the step that runs, how they were laid out."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are certain

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        settings = config.from_vllm_config(vllm_config)
        assert settings is not None
        self.req_states = req_states
        self.num_nodes: int = settings.options.num_speculative_tokens
        self.max_num_reqs: int = vllm_config.scheduler_config.max_num_seqs
        self.drafter = DeviceTokenRecycling(
            settings.options,  # type: ignore[arg-type]
            vllm_config.model_config.get_vocab_size(),
            self.max_num_reqs,
            device,
            BACKEND,
        )
        self.layout = RowLayout.of_size(self.max_num_reqs, self.max_num_reqs * (1 + self.num_nodes), device)
        self._chains = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)
        self._max_depths = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)
        self.no_past = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        # By slot: a row's distribution depends on the tokens of its path.
        self.path_dependent = np.zeros(self.max_num_reqs, dtype=bool)
        self.structured = np.zeros(self.max_num_reqs, dtype=bool)
        self._not_structured = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)
        # Why this model's drafts are chains; None where it can verify trees. Set once the caches are bound.
        self.chain_reason: str | None = None
        self.counts = Counts(vllm_config, device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing of ours is captured."""

    def capture(self) -> None:
        """See above."""

    def admit(self, slot: int, params: Any, prompt_len: int, path_dependent: bool) -> None:
        """A request has got a slot; its text is on the device.

        Args:
            slot: of vLLM's request state.
            params: its sampling parameters.
            prompt_len: tokens of its text so far.
            path_dependent: what is sampled depends on more of the output than its length.
        """
        structured = params.structured_outputs is not None
        self.structured[slot] = structured
        self._not_structured.np[slot] = not structured
        self.path_dependent[slot] = path_dependent
        # vLLM masks the logits along the flat list of drafts: right for a chain, wrong for a tree.
        chain = structured or self.chain_reason is not None or self.drafter.only_chains
        self._chains.np[slot] = chain
        self._max_depths.np[slot] = SLOW_DEPTH if path_dependent else self.num_nodes
        self.drafter.start(self.req_states.all_token_ids.gpu[slot, :prompt_len])

    def apply_staged_writes(self) -> None:
        """After `admit`, before the step."""
        self._chains.copy_to_uva()
        self._max_depths.copy_to_uva()
        self._not_structured.copy_to_uva()

    @property
    def not_structured(self) -> torch.Tensor:
        """bool ``[slots]``: the logits of a request are the model's own, no grammar's mask is in them."""
        flags: torch.Tensor = self._not_structured.gpu
        return flags != 0

    def to_device(self, numbers: Any) -> torch.Tensor:
        """Integers that the host knows, int64, without waiting."""
        moved: torch.Tensor = async_tensor_h2d(numbers, device=self.drafter.tokens.device, dtype=torch.int64)
        return moved

    def lay_out(self, input_batch: Any) -> None:
        """Rows and positions of the step's trees, in buffers that stay where they are."""
        lay_out(
            self.drafter.trees,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            input_batch.seq_lens,
            input_batch.positions,
            self.layout,
            BACKEND,
        )

    def learn(
        self, logits: torch.Tensor, tokens: torch.Tensor, known: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        """Take over what the target ranks highest after each row; see `DeviceTokenRecycling.observe`.

        Args:
            logits: ``[rows, vocab]``, the target's own.
            tokens: int64 ``[rows]``.
            known: bool ``[rows]``.
            accepted: int32 ``[rows]``.
        """
        top_ids = top_k_ids(logits, self.drafter.width, BACKEND)
        top_logits = logits.gather(1, top_ids.to(torch.int64)).to(torch.float32)
        self.drafter.observe(tokens, known, accepted, top_ids, top_logits)

    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """vLLM's: int64 ``[requests, nodes]`` in batch order, after the step's tokens were taken over."""
        if dummy_run or kwargs.get("num_speculative_tokens") == 0:
            return self.drafter.tokens[: input_batch.num_reqs]
        return self.drafter.propose(
            self.req_states.last_sampled_tokens.view(-1),
            input_batch.idx_mapping,
            self._chains.gpu,
            self._max_depths.gpu,
        )
