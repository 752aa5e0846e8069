# SPDX-License-Identifier: Apache-2.0
"""A proposer of vLLM's own among a hybrid's drafters: the chain it says is a path of the tree.

vLLM's n-gram, suffix, EAGLE, MTP, Medusa and draft-model proposers stay as they are; the engine asks them. What a chain
is worth is learnt here: how often its tokens were right, by depth and by how much of the request's last chain was.

One that runs a model must read each step of a request. Where a step goes without it, because its passes do not pay, it
can say nothing more of the requests that ran (`blind`): its cache lacks their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.kernels.learned_arrays import Learned, check_names
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows
from vllm_ext.proposers.calibration import Calibration
from vllm_ext.proposers.tree import DraftTree

NAME = "vllm"  # in a list of drafters
FREE = ("ngram", "suffix")  # of vLLM's methods: they run no model
ASKING = ("draft_model", "eagle", "eagle3", "mtp", "medusa")
# What of the last chain was right: not known, none of it, some, all.
UNKNOWN, NONE, SOME, ALL = range(4)
PRIOR = np.array([0.5, 0.3, 0.5, 0.7])
NUM_DEPTHS = 8
NET_RATE = 0.1  # of learning whether it pays
RECOVERY = 0.01  # of forgetting, a step, that it did not
# Keys of vLLM's that would make something else of the chains than nodes that are chosen.
OTHERS = {
    "parallel_drafting": "drafts of one pass need slots of their own",
    "draft_sample_method": "a hybrid's nodes are chosen, not drawn",
    "rejection_sample_method": "a hybrid's trees are verified by vllm-ext",
    "num_speculative_tokens_per_batch_size": "budget, an option of the whole, drafts less where the load is high",
}


class VllmChainOptions(MethodOptions):
    """Options of the drafter ``vllm``."""

    speculative_config: dict[str, Any] = Field(
        description=f"of vLLM's own method ({', '.join((*FREE, *ASKING))}), as --speculative-config takes it"
    )

    @field_validator("speculative_config")
    @classmethod
    def _vllms(cls, given: dict[str, Any]) -> dict[str, Any]:
        config = {str(key).replace("-", "_"): value for key, value in given.items()}
        method = config.get("method")
        if method not in (*FREE, *ASKING):
            raise ValueError(f"method={method!r} is not allowed; allowed: {', '.join((*FREE, *ASKING))}")
        for key, why in OTHERS.items():
            if config.get(key):
                raise ValueError(f"{key}={config[key]!r} is not allowed: {why}; leave it out")
        return config

    @property
    def asks(self) -> bool:
        """Whether it runs a model."""
        return self.speculative_config["method"] in ASKING


class VllmChain(Proposer):
    """What becomes of the chains.

    Args:
        options: whose they are.
    """

    on_v2 = None
    why_v1 = "asks a proposer of vLLM's V1 runner"
    Options: ClassVar[type[MethodOptions]] = VllmChainOptions

    def __init__(self, options: VllmChainOptions) -> None:
        self.options = options
        self.blind: set[str] = set()
        # Set by the engine for each step: asks for so many tokens a request, of all that run; by request id.
        self.ask: Callable[[int], Mapping[str, Sequence[int]]] = lambda _: {}
        self.most = 0  # tokens of a chain
        self.varies = False  # whether it can be asked for fewer
        self.reads = True  # whether a step without it makes it blind
        # Tokens of all requests that must be expected of the first pass to pay, and of each after it.
        self.least_first = self.least_each = 0.0
        self._net = 0.0  # tokens that asking it brought lately, less what else its time brings
        self._calibration = Calibration(PRIOR, NUM_DEPTHS)
        self._class: dict[str, int] = {}
        self._chains: dict[str, list[int]] = {}

    @classmethod
    def from_options(cls, options: VllmChainOptions, vocab_size: int) -> VllmChain:
        """See `Proposer.from_options`."""
        return cls(options)

    @property
    def memory_bytes(self) -> int:
        """The counts; the proposer's own memory is vLLM's."""
        return self._calibration.nbytes

    def chances(self, request_id: str, length: int) -> list[float]:
        """By depth, that a chain of a request is right as far as there; ``length`` of them, falling."""
        kind = self._class.get(request_id, UNKNOWN)
        of_depth = self._calibration.estimates[kind]
        each = of_depth[np.minimum(np.arange(length), NUM_DEPTHS - 1)]
        return [float(chance) for chance in np.cumprod(each, dtype=np.float64)]

    def pays(self, net: float | None) -> bool:
        """Whether to ask it in a step.

        One that reads is given up for all requests that run, so that one step may not decide: the last dozen do. What
        was given up is tried again with requests that come later.

        Args:
            net: tokens that are expected of it in this step, less those that steps put out in its time; None: it knows
                none of the requests.
        """
        if not self.reads:
            return net is not None and net >= 0.0
        if self._net < 0.0 or net is None:
            self._net += RECOVERY * (1.0 - self._net)
            return net is not None and self._net >= 0.0
        self._net += NET_RATE * (net - self._net)
        return self._net >= 0.0

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """See `Proposer.propose`: as long as they may be."""
        return self.chains(requests, self.most)

    def chains(self, requests: Sequence[Request], length: int) -> list[DraftTree]:
        """Trees of one path each, of so many tokens at most."""
        said = self.ask(length)
        trees = []
        for request in requests:
            name = request.request_id
            room = min(length, request.budget_tokens, request.max_depth)
            tokens = [] if name in self.blind else list(said.get(name, ()))[: max(room, 0)]
            places = np.arange(len(tokens), dtype=np.int32)
            grown = GrownTree(
                np.array(tokens, np.int32),
                places - 1,
                np.array(self.chances(name, len(tokens)), np.float32),
                np.full(len(tokens), self._class.get(name, UNKNOWN), np.uint8),
            )
            self._chains[name] = tokens
            self._calibration.drafted(name, grown)
            trees.append(DraftTree(*grown[:3]))
        return trees

    def observe(self, rows: VerifiedRows) -> None:
        """See `Proposer.observe`: also what was not verified is judged."""
        self._calibration.judge(rows.request_ids, rows.emitted)
        for name, emitted in zip(rows.request_ids, rows.emitted, strict=True):
            chain = self._chains.pop(name, None) if len(emitted) else None
            if chain:
                compared = min(len(chain), len(emitted))
                right = next(
                    (i for i in range(compared) if chain[i] != emitted[i]),
                    compared,
                )
                self._class[name] = NONE if not right else ALL if right == compared else SOME

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._calibration.forget(request_id)
        self._class.pop(request_id, None)
        self._chains.pop(request_id, None)
        self.blind.discard(request_id)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`: the counts."""
        return self._calibration.state_dict()

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`."""
        check_names(arrays, ("hits", "trials"))
        self._calibration.load_state_dict(arrays)
