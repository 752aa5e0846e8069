# SPDX-License-Identifier: Apache-2.0
"""Token Recycling that lives on the device: drafts without a round trip to the host.

The paper's matrix and the growing by estimated acceptance of `token_recycling`, which has source and deviations; what
is missing are the longer contexts, pairs and past text. Counts of how often nodes are right are integers: float sums
depend on the order in which threads add, and tensor-parallel ranks must draft alike.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import EMPTY, RecycledTable, SlotTrees, grow, record, seed
from vllm_ext.proposers import token_recycling_template
from vllm_ext.proposers.calibration import NUM_DEPTHS, PRIOR_TRIALS
from vllm_ext.proposers.token_recycling import ROW_TRUST, SEEDED, SHARES, TokenRecyclingOptions

UNIT = 1 << 20  # of a count: one trial
LASTING = 200  # trials after which an older one counts for a third


class DeviceTokenRecycling:
    """One table for all requests, and a tree for each slot.

    Args:
        options: the method's.
        vocab_size: number of token ids of the target.
        slots: most requests at a time.
        device: where everything is.
        backend: of the kernels.
    """

    def __init__(
        self,
        options: TokenRecyclingOptions,
        vocab_size: int,
        slots: int,
        device: torch.device,
        backend: Backend = "auto",
    ) -> None:
        nodes = options.num_speculative_tokens
        self.width = options.matrix_width
        self._backend = backend
        self.table = RecycledTable.empty(vocab_size, self.width, device)
        self.trees = SlotTrees.of_size(slots, nodes, device)
        self.tokens = torch.zeros((slots, nodes), dtype=torch.int64, device=device)
        self.only_chains = options.tree == "chain"
        self._template = None
        if options.tree == "static":
            positions = token_recycling_template.positions(self.width)
            self._template = torch.from_numpy(positions).to(device)
        self._shares = torch.from_numpy(SHARES).to(device)
        middle = np.sqrt(np.array([0.001, *SHARES]) * np.array([*SHARES, 1.0]))
        self._prior = torch.from_numpy(np.array([SEEDED, *(middle * ROW_TRUST)])).to(device)
        shape = len(self._prior), NUM_DEPTHS
        self._trials = torch.zeros(shape, dtype=torch.int64, device=device)
        self._hits = torch.zeros_like(self._trials)
        self.estimates = torch.zeros(shape, dtype=torch.float32, device=device)
        self.forget()

    def forget(self) -> None:
        """As if nothing had been seen yet."""
        self.table.successors.fill_(EMPTY)
        self.table.classes.zero_()
        self._trials.fill_(int(PRIOR_TRIALS * UNIT))
        self._hits.copy_((self._prior[:, None] * (PRIOR_TRIALS * UNIT)).to(torch.int64).expand_as(self._hits))
        self._estimate()

    @property
    def memory_bytes(self) -> int:
        """Device memory: ``8 * vocab_size * (width + 1)``, and ``slots * nodes * 40`` about."""
        parts = *self.table, *self.trees, self.tokens, self._trials, self._hits, self.estimates
        return sum(part.nbytes for part in parts)

    def start(self, prompt: torch.Tensor) -> None:
        """A request has come: take successors from its prompt for tokens that have none.

        Args:
            prompt: int32 ``[num_tokens]``.
        """
        if len(prompt) > 1:
            seed(self.table, prompt)

    def observe(
        self,
        tokens: torch.Tensor,
        known: torch.Tensor,
        accepted: torch.Tensor,
        top_ids: torch.Tensor,
        top_logits: torch.Tensor,
    ) -> None:
        """Overwrite the table's rows of verified tokens; those of accepted ones last.

        Args:
            tokens: int64 ``[rows]`` each row's input token.
            known: bool ``[rows]``: the row has something to say; padding has not.
            accepted: int32 ``[rows]`` 1 if the input token is part of the output.
            top_ids: int32 ``[rows, width]`` ids of the largest logits, best first.
            top_logits: float32 ``[rows, width]`` those logits.
        """
        place = torch.arange(len(tokens), device=tokens.device) + len(tokens) * accepted
        priority = torch.where(known, place, EMPTY)
        record(self.table, self._shares, tokens, priority, top_ids, top_logits)

    def judge(self, groups: torch.Tensor, parent_rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """Count how often the nodes of each group were right, of those whose parents were.

        Args:
            groups: int32 ``[rows]`` as `propose` wrote them; -1 for what is no node, or not to be counted.
            parent_rows: int64 ``[rows]`` of nodes the parent's place among all rows.
            accepted: int32 ``[rows]``.
        """
        trials, hits = self._trials.view(-1), self._hits.view(-1)
        tried = (groups >= 0) * accepted[parent_rows]
        group = groups.clamp(min=0).to(torch.int64)
        more = torch.zeros((2, len(trials)), dtype=torch.int64, device=trials.device)
        more[0].index_add_(0, group, tried.to(torch.int64))
        more[1].index_add_(0, group, (tried * accepted).to(torch.int64))
        fading = more[0].clamp(max=LASTING)
        trials += more[0] * UNIT - trials * fading // LASTING
        hits += more[1] * UNIT - hits * fading // LASTING
        self._estimate()

    def propose(
        self, roots: torch.Tensor, slots: torch.Tensor, chains: torch.Tensor, max_depths: torch.Tensor
    ) -> torch.Tensor:
        """Grow each slot's tree; see `vllm_ext.kernels.device_trees.grow` for the arguments.

        Returns:
            int64 ``[requests, nodes]``, good until the next call; of padding the root's token.
        """
        tokens = self.tokens[: len(slots)]
        grow(
            self.table,
            self.estimates,
            roots,
            slots,
            chains,
            max_depths,
            self._template,
            self.trees,
            tokens,
            self._backend,
        )
        return tokens

    def _estimate(self) -> None:
        torch.div(self._hits.float(), self._trials.clamp(min=1).float(), out=self.estimates)
