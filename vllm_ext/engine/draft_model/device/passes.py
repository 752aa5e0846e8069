# SPDX-License-Identifier: Apache-2.0
"""Passes over the nodes of growing trees in vLLM's V2 worker: what models and heads that draft there have in common.

The host knows the shapes of all passes without asking the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.likeliest import likeliest
from vllm_ext.kernels.top_k import MAX_K


class Likeliest(NamedTuple):
    """Distributions after some rows, their likeliest tokens only."""

    ids: torch.Tensor  # int32 [rows, MAX_K], likeliest first
    log_q: (
        torch.Tensor
    )  # float32 [rows, MAX_K] at temperature 1, over the whole vocabulary; -inf: there is none


class Texts(NamedTuple):
    """Whose nodes a pass reads, in the order of the step."""

    slots: torch.Tensor  # int64 [requests]
    lengths: torch.Tensor  # int32 [requests] tokens of each
    blocks: torch.Tensor  # int [requests] of its KV, in the group of the layers that draft

    @property
    def number(self) -> int:
        """Of requests."""
        return len(self.slots)

    def of(self, some: slice) -> Texts:
        """Those of some requests."""
        return Texts(*(part[some] for part in self))


class Room(NamedTuple):
    """Of the nodes that are read in a step, by place."""

    slots: torch.Tensor  # int64 [requests, nodes] where the KV of each goes; -1: nowhere
    positions: torch.Tensor  # int64 [requests, nodes] rotary positions
    blocks: torch.Tensor  # int32 [requests, blocks] of each request; behind a longest text, vLLM's null block

    def of(self, some: slice) -> Room:
        """That of some requests."""
        return Room(*(part[some] for part in self))


class Committed(NamedTuple):
    """What the target's step has computed, and what became of its rows."""

    hidden: torch.Tensor  # [query rows, hidden_size] behind the last norm
    streams: Sequence[torch.Tensor]  # [query rows, hidden_size] after each of `DevicePasses.aux_layers`
    # int32 [requests, nodes + 1] offsets of accepted rows, the root's first; behind the last, their own place. None: no
    # request had drafts.
    path: torch.Tensor | None
    num_new: torch.Tensor  # int32 [requests] tokens of each that are new; 0 while its prompt is incomplete


class DevicePasses(ABC):
    """A model or heads that draft, and their passes.

    Args:
        vllm_config: the target's.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
    """

    reads = False  # whether it has a cache of its own, which `read` keeps in step with the target's
    ahead = 0  # how many tokens behind a row's place its token is
    follows = False  # whether `read` needs what each step of the target has computed, one with no drafts too
    aux_layers: Sequence[int] = ()  # after how many of its layers the target is to hand out hidden states
    token_map: torch.Tensor | None = (
        None  # int64 [rows of the language head] their tokens; None: all, in order
    )
    deepest = 32  # nodes of which it knows something
    most_new = 1  # tokens that a step may put out of a request; set before `load`

    def __init__(self, vllm_config: Any, req_states: Any, backend: Backend) -> None:
        self._target_config, self._states, self._backend = vllm_config, req_states, backend
        self._device: torch.device = req_states.device
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.config: Any = vllm_config  # vLLM's, of the model that drafts
        self.layers: list[str] = []  # names of the attention layers it runs
        self.own_layers: list[str] = []  # those of them that are not the target's
        self._runner: Any = None

    @abstractmethod
    def load(self, target: Any) -> None:
        """Make it; ``target`` is vLLM's model, loaded."""

    def bind(self, runner: Any) -> None:
        """After vLLM has bound the caches."""
        self._runner = runner

    def blocks(self, slots: Any) -> Any:
        """int32 ``[requests]`` on the host: `Texts.blocks` of these slots in this step; zeros of what has no layers."""
        return np.zeros(len(slots), np.int32)

    def take(self, input_batch: Any, committed: Committed) -> None:
        """A step is over; before `read`, and not in a graph.

        Args:
            input_batch: vLLM's, of the step.
            committed: what it has computed.
        """

    def is_short(self, input_batch: Any, behind: Any) -> bool:
        """Whether `read_last` is enough; arguments as of `read`."""
        return True

    @abstractmethod
    def read_last(self, texts: Texts) -> Likeliest:
        """Read each text's last tokens, where nothing before them is new: the same shapes for as many requests.

        Args:
            texts: as they are now.

        Returns:
            The distribution after each one's last token.
        """

    def read(self, input_batch: Any, texts: Texts, behind: Any) -> Likeliest:
        """Read what the step has committed, as far as it was not.

        Args:
            input_batch: vLLM's, of the step.
            texts: as they are now.
            behind: int ``[requests]`` on the host: tokens more that were not read yet, at most.

        Returns:
            The distribution after each one's last token, or after what is there of an incomplete prompt.
        """
        return self.read_last(texts)

    @abstractmethod
    def room(self, texts: Texts, widths: Sequence[int]) -> Room:
        """Where the nodes of a step lie, which all of its passes read. Trees begin.

        Args:
            texts: what lies before them.
            widths: how many nodes of each depth, from 1 on, are read of a request.
        """

    @abstractmethod
    def nodes(
        self, texts: Texts, room: Room, tokens: torch.Tensor, parents: torch.Tensor, past: int
    ) -> Likeliest:
        """Read the nodes of one depth, the same number of each request.

        Args:
            texts: what lies before them.
            room: of all nodes of the step.
            tokens: int32 ``[requests, width]``.
            parents: int32 ``[requests, past + width]``: places of the parents of all nodes read so far and of these; -1
                of those that have none but the last token.
            past: nodes of a request that were read before.
        """

    @abstractmethod
    def dummy(self, num_tokens: int) -> None:
        """A pass of so many rows, without attention, as vLLM's own dummy runs: what memory it takes is measured."""

    def _of_logits(self, logits: torch.Tensor) -> Likeliest:
        support = min(MAX_K, logits.shape[1])
        ids, log_q = likeliest(logits, support, self._backend)
        if self.token_map is not None:
            ids = self.token_map[ids.long()].to(torch.int32)
        missing = MAX_K - support
        if not missing:
            return Likeliest(ids, log_q)
        return Likeliest(
            torch.nn.functional.pad(ids, (0, missing)),
            torch.nn.functional.pad(log_q, (0, missing), value=-torch.inf),
        )

    def to_device(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        moved: torch.Tensor = async_tensor_h2d(numbers, device=self._device, dtype=dtype)
        return moved
