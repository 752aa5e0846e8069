# SPDX-License-Identifier: Apache-2.0
"""The rule `trie` on the device: requests that are under it and no other rule, of whose tokens the host waits for none.

The sets lie in the device's memory, nine bytes a prefix; the state of each request goes on from step to step there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_ext.kernels import backends
from vllm_ext.kernels.trie_rows import NO_TRIE, SlotTries, catch_up, join, mask_trie_rows
from vllm_ext.samplers.trie import TrieRule

logger = init_logger("vllm.vllm_ext")


class TrieRows:
    """The sets of one server, and which request is under which.

    Args:
        rule: holds them.
        req_states: vLLM's.

    Raises:
        ValueError: they are too large together.
    """

    def __init__(self, rule: TrieRule, req_states: Any) -> None:
        self._states, device = req_states, req_states.device
        self._number = {name: number for number, name in enumerate(rule.tries)}
        self._tries = join(list(rule.tries.values()), device)
        self._slots = SlotTries.of_size(req_states.max_num_reqs, device)
        self._under = np.zeros(req_states.max_num_reqs, bool)
        self._staged: dict[int, tuple[int, int]] = {}  # by slot, number of the set and the end token

    @classmethod
    def of(cls, rules: dict[str, Any], req_states: Any) -> TrieRows | None:
        """None where there is no such rule, or its sets are too large together."""
        rule = rules.get("trie")
        if not isinstance(rule, TrieRule):
            return None
        try:
            return cls(rule, req_states)
        except ValueError as error:
            logger.warning("vllm-ext: rule trie stays on the host, where steps wait for it: %s.", error)
            return None

    def put(self, slot: int, name: str, end: int) -> None:
        """A request has come that is under the set of this name."""
        self._under[slot] = True
        self._staged[slot] = self._number[name], end

    def drop(self, slot: int) -> None:
        """Whoever has the slot now is under none."""
        if self._under[slot]:
            self._under[slot] = False
            self._staged[slot] = NO_TRIE, 0

    def apply_staged_writes(self) -> None:
        """Take over what `put` and `drop` have said; none of the output is read yet."""
        if self._staged:
            rows = [(slot, which, end, 0) for slot, (which, end) in self._staged.items()]
            slots, *values = torch.tensor(rows, dtype=torch.int32).T.to(
                self._slots.which.device, non_blocking=True
            )
            into = self._slots.which, self._slots.end, self._slots.num_read
            for kept, value in zip(into, values, strict=True):
                kept[slots.long()] = value
            self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: Any, ancestor_bits: torch.Tensor | None) -> None:
        """Mask the rows of its requests, in place.

        Args:
            logits: ``[rows, vocab]``.
            ctx: vLLM's ``LogitsContext``.
            ancestor_bits: of rows of trees, see `mask_trie_rows`.
        """
        if not self._under[ctx.idx_mapping_np].any():
            return
        states = self._states
        text, prompt_len, total_len = (
            each.gpu for each in (states.all_token_ids, states.prompt_len, states.total_len)
        )
        catch_up(self._tries, self._slots, ctx.idx_mapping, text, prompt_len, total_len, backends.V2)
        slots, tokens, offsets = ctx.expanded_idx_mapping, ctx.input_ids, ctx.expanded_local_pos
        mask_trie_rows(logits, self._tries, self._slots, slots, tokens, offsets, ancestor_bits, backends.V2)
