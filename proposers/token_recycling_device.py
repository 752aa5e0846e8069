# SPDX-License-Identifier: Apache-2.0
"""Token Recycling that lives on the device: drafts without a round trip to the host.

`token_recycling` has the method, its source and the deviations; the tables, their growing and their learning are
`vllm_ext.kernels.recycling`, the same algorithm in three launches a step. What differs: roots that were never read are
not filled with guesses, and how often nodes are right is counted in integers, which fade by step instead of by trial:
float sums depend on the order in which threads add, and tensor-parallel ranks must draft alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import EMPTY, RowLayout, SlotTrees
from vllm_ext.kernels.learned_arrays import Learned, check_array, check_names
from vllm_ext.kernels.recycling import (
    FIRST_CALL,
    Calibration,
    Marks,
    RecyclingTables,
    WalkedRows,
    grow,
    learn,
    mark,
    record_prompts,
)
from vllm_ext.proposers import token_recycling_template
from vllm_ext.proposers.calibration import NUM_DEPTHS, PRIOR_TRIALS
from vllm_ext.proposers.joint_device import joint_prior
from vllm_ext.proposers.learned import check_distinct
from vllm_ext.proposers.token_recycling import PAIR_SLOTS, SHARES, TEXT_SLOTS, prior_chances


class DeviceTokenRecycling:
    """Tables for all requests, and a tree for each slot.

    Args:
        nodes: of a tree.
        width: successors kept for each token and pair.
        longest: tokens of the longest context looked up, 1 to 8; 1: the paper's matrix alone.
        tree: "dynamic", "static" or "chain", see `TokenRecyclingOptions`.
        vocab_size: number of token ids of the target.
        slots: most requests at a time.
        device: where everything is.
        backend: of the kernels.
        text_slots: places for contexts of text, a power of two.
        beside_heads: heads go on below its trees (`joint_device`), and are counted here too, as one level more.
    """

    def __init__(
        self,
        nodes: int,
        width: int,
        longest: int,
        tree: str,
        vocab_size: int,
        slots: int,
        device: torch.device,
        backend: Backend = "auto",
        text_slots: int = TEXT_SLOTS,
        *,
        beside_heads: bool = False,
    ) -> None:
        self.only_chains = tree == "chain"
        self._longest, self._backend = longest, backend
        room = (PAIR_SLOTS, text_slots) if longest > 1 else (0, 0)
        self._tables = RecyclingTables.empty(vocab_size, width, *room, device)
        self.trees = SlotTrees.of_size(slots, nodes, device)
        self.tokens = torch.zeros((slots, nodes), dtype=torch.int64, device=device)
        self._marks = Marks.of_size(slots * (1 + nodes), device)
        self._template = None
        if tree == "static":
            self._template = torch.from_numpy(token_recycling_template.positions(width)).to(device)
        self._shares = torch.from_numpy(SHARES).to(device)
        chances = prior_chances(longest)
        if beside_heads:
            chances = np.concatenate([chances, joint_prior(chances.shape[1])[None]])
        prior = torch.from_numpy(chances)[..., None].expand(-1, -1, NUM_DEPTHS)
        self._prior = Calibration.of_prior(prior.contiguous().to(device), PRIOR_TRIALS)
        self.calibration = Calibration(*(part.clone() for part in self._prior))
        self._call = FIRST_CALL  # of what writes to the tables: each has a number of its own

    def forget(self) -> None:
        """As if nothing had been seen yet."""
        self._tables.successors.fill_(EMPTY)
        self._tables.classes.zero_()
        self._tables.pair_keys.zero_()
        self._tables.text_keys.zero_()
        for part, prior in zip(self.calibration, self._prior, strict=True):
            part.copy_(prior)

    def state_dict(self) -> dict[str, Learned]:
        """What to save: the tables and the counts. Waits for the device, so that all is of one moment."""
        if self.tokens.is_cuda:
            torch.cuda.synchronize(self.tokens.device)  # of what other streams still do
        return {name: part.to("cpu", copy=True).numpy() for name, part in self._learnt().items()}

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """Take over what was saved, before any request has come.

        Raises:
            ValueError: names, types, shapes or ranges are not those of a drafter with these options.
        """
        learnt = self._learnt()
        check_names(arrays, learnt)
        any_number, positive = np.iinfo(np.int64), (1, np.iinfo(np.int64).max)
        tokens = EMPTY, self._tables.vocab - 1
        ranges = {
            "successors": tokens,
            "classes": (0, self.calibration.trials.shape[1] - 1),
            "pair_keys": (any_number.min, any_number.max),
            "text_keys": (any_number.min, any_number.max),
            "text_successors": tokens,
            "trials": positive,
            "hits": (0, positive[1]),
        }
        for name, part in learnt.items():
            check_array(
                name, arrays[name], tuple(part.shape), str(part.dtype).partition(".")[2], *ranges[name]
            )
        check_distinct("successors", arrays["successors"], EMPTY)
        if (arrays["hits"] > arrays["trials"]).any():
            raise ValueError("hits has more than there were trials")
        self.forget()
        for name, part in learnt.items():
            part.copy_(torch.from_numpy(arrays[name]))
        counts = self.calibration
        counts.estimates.copy_(counts.hits.float() / counts.trials.float())

    def _learnt(self) -> dict[str, torch.Tensor]:
        tables = self._tables._asdict()
        kept = {name: tables[name] for name in tables if not name.endswith("marks")}
        return kept | {"trials": self.calibration.trials, "hits": self.calibration.hits}

    @property
    def memory_bytes(self) -> int:
        """Device memory: ``8 * (vocab + 2**16) * (width + 1) + 2**19``, and 16 for each context of text."""
        parts = *self._tables, *self.trees, *self._marks, *self.calibration, *self._prior, self.tokens
        return sum(part.nbytes for part in parts)

    def start(self, text: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, most: int) -> None:
        """Requests have come: note their texts.

        Args:
            text: int32 ``[slots, tokens]``.
            slots: int64 ``[requests]``.
            lengths: int32 ``[slots]`` tokens of each.
            most: of the longest.
        """
        record_prompts(self._tables, text, slots, lengths, most, self._longest, self._call, self._backend)
        self._call += len(slots)

    def observe(
        self,
        verified: WalkedRows,
        layout: RowLayout | None,
        text: torch.Tensor,
        prefill_len: torch.Tensor,
        teaches: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        """Learn from a step; see `vllm_ext.kernels.recycling.mark` and `learn` for the arguments."""
        mark(
            self._tables,
            self.calibration,
            verified,
            layout,
            text,
            prefill_len,
            teaches,
            self._longest,
            self._call,
            self._marks,
            self._backend,
        )
        self._call += 1
        learn(
            self._tables,
            self.calibration,
            logits,
            verified.tokens,
            self._shares,
            self._marks,
            self._backend,
        )

    def propose(
        self,
        text: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        chains: torch.Tensor,
        max_depths: torch.Tensor,
    ) -> torch.Tensor:
        """Grow each slot's tree; see `vllm_ext.kernels.recycling.grow` for the arguments.

        Returns:
            int64 ``[requests, nodes]``, good until the next call; of padding the root's token.
        """
        tokens = self.tokens[: len(slots)]
        grow(
            self._tables,
            self.calibration.estimates,
            text,
            lengths,
            slots,
            chains,
            max_depths,
            self._template,
            self._longest,
            self.trees,
            tokens,
            self._backend,
        )
        return tokens
