# SPDX-License-Identifier: Apache-2.0
"""SpecDec++: a chain of a draft model that stops where a rejection has become likely.

With ``a_j`` the predicted chance that the chain's token j is accepted, drafting stops as soon as
``1 - a_1 a_2 ... a_k > stop_threshold``, not before two tokens and at the latest after ``max_depth``. The paper shows
that a threshold on this is the best policy for what passes of draft and target cost.

Lossless: whether a token more is drafted depends on those before it, all of which stay, so what is verified at each
place was drawn from what verification is told. A chain cut by its own last token would not be.

Source: "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", arXiv 2405.19715, section 3; bounds
and threshold as in github.com/Kaffaljidhmah2/SpecDec_pp, of which no code was taken.

Deviation: the paper predicts ``a_j`` by a head that is trained on the draft's hidden states. Here tokens of about the
same probability by the draft are counted as requests go on, and how often these were accepted is the prediction
(`calibration`). It is known with the token, a pass before the head would say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.kernels.learned_arrays import Learned, check_names
from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.base import MAX_SPECULATIVE_TOKENS, MethodOptions, Request, VerifiedRows
from vllm_ext.proposers.calibration import Calibration
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.sampled import ROOT, TreeBuilder
from vllm_ext.proposers.sure_text import SureChain
from vllm_ext.proposers.tree import DraftTree, SampledDrafts

LEAST_NODES, MOST_NODES = 2, 20
BINS = 16  # of a token's probability by the draft
CHOSEN, DRAWN = 0, 1  # how a token was taken from the draft's distribution: calibrated apart


def bin_of(probability: float) -> int:
    """Which class of tokens one is in, by its probability."""
    return min(int(probability * BINS), BINS - 1)


class StoppedChain(TreeBuilder):
    """A chain.

    Args:
        num_nodes: most nodes.
        accepted: predicts of a token's probability the chance that it is accepted.
        threshold: chance of a rejection above which no token follows.
        chance: of this request alone, not verification's; None: the likeliest tokens are taken.
    """

    def __init__(
        self, num_nodes: int, accepted: Callable[[float], float], threshold: float, chance: Chance | None
    ) -> None:
        super().__init__()
        self.probabilities: list[float] = []  # of each node by the draft, given those before it
        self._num_nodes, self._accepted, self._threshold = num_nodes, accepted, threshold
        self._chance = chance
        self._all = 1.0  # that all are accepted

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        count = len(self.tokens)
        stops = count >= LEAST_NODES and 1.0 - self._all > self._threshold
        return [] if stops or count >= self._num_nodes else [count - 1]

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        (row,) = rows
        last = len(self.tokens) - 1 if self.tokens else ROOT
        self.q[last] = row
        place = int(row.q.argmax()) if self._chance is None else self._chance.draw(row.q)
        self.add(int(row.ids[place]), last)
        self.probabilities.append(float(row.q[place]))
        self._all *= self._accepted(self.probabilities[-1])

    def reach(self) -> float:
        """See `TreeBuilder.reach`; of a chain, what was drawn may say whether it goes on."""
        return self._all

    def drawn(self, q: dict[int, Sparse]) -> SampledDrafts | None:
        """See `TreeBuilder.drawn`."""
        return None if self._chance is None else super().drawn(q)


class SpecDecOptions(DraftModelOptions):
    """Options of ``specdec_pp``."""

    num_speculative_tokens: int = Field(
        default=MOST_NODES,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="most draft tokens of one request verified in one step",
    )
    max_depth: int = Field(
        default=MOST_NODES,
        ge=LEAST_NODES,
        le=MOST_NODES,
        description="the longest chain: a pass for each token",
    )
    stop_threshold: float = Field(
        default=0.3,
        gt=0.0,
        le=1.0,
        description="a chain ends where the predicted chance that one of its tokens is rejected is larger; 1: never",
    )


class SpecDecPP(DraftModelProposer):
    """Chains that stop."""

    summary: ClassVar[str] = "a draft model's chain, as long as no rejection is likely"
    paper: ClassVar[str] = "arXiv 2405.19715"
    Options: ClassVar[type[MethodOptions]] = SpecDecOptions
    writes_text = True
    why_v1: ClassVar[str] = "decides token by token on the host whether its chain goes on"

    def __init__(self, options: SpecDecOptions) -> None:
        super().__init__(options)
        # Before anything is counted the draft is believed.
        prior = np.tile((np.arange(BINS) + 0.5) / BINS, (2, 1))
        self.calibration = Calibration(prior, num_depths=1)
        self._builders: dict[str, StoppedChain] = {}  # of the requests that are asked for now

    @property
    def memory_bytes(self) -> int:
        """See `Proposer.memory_bytes`."""
        return self.calibration.nbytes

    def observe(self, rows: VerifiedRows) -> None:
        """See `Proposer.observe`."""
        super().observe(rows)
        self.calibration.judge(rows.request_ids, rows.emitted)

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`."""
        return self._chain(min(num_nodes, max_depth), self.chance)

    def chosen(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.chosen`."""
        return self._chain(min(num_nodes, max_depth), None)

    chained = chosen

    def sure_chain(self, num_nodes: int, chance: Chance | None, sure: SureChain) -> TreeBuilder:
        """See `DraftModelProposer.sure_chain`. No sure token makes the chain stop."""
        return self._chain(num_nodes, chance, sure.chance)

    def _chain(
        self, num_nodes: int, chance: Chance | None, accepted: Callable[[float], float] = float
    ) -> StoppedChain:
        estimates = self.calibration.estimates[CHOSEN if chance is None else DRAWN, :, 0]
        return StoppedChain(
            num_nodes,
            lambda probability: accepted(float(estimates[bin_of(probability)])),
            self.options.stop_threshold,
            chance,
        )

    def _builder(self, request: Request) -> TreeBuilder:
        builder = super()._builder(request)
        assert isinstance(builder, StoppedChain)
        self._builders[request.request_id] = builder
        return builder

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """See `Proposer.propose`."""
        self._builders.clear()
        trees = super().propose(requests)
        for request, tree in zip(requests, trees, strict=True):
            # What is taken without asking the target says nothing of what it would accept.
            if len(tree) and (tree.sure is None or not tree.sure.any()):
                kind = CHOSEN if tree.drawn is None else DRAWN
                bins = map(bin_of, self._builders[request.request_id].probabilities)
                groups = np.array([kind * BINS + each for each in bins], np.uint8)
                grown = GrownTree(tree.tokens, tree.parents, tree.probabilities, groups)
                self.calibration.drafted(request.request_id, grown)
        return trees

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        super().finish(request_id)
        self.calibration.forget(request_id)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`."""
        return self.calibration.state_dict()

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`."""
        check_names(arrays, ("hits", "trials"))
        self.calibration.load_state_dict(arrays)
