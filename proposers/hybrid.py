# SPDX-License-Identifier: Apache-2.0
"""Several drafters at once: their trees as one, every node with a probability learnt for who proposed it.

Each drafter judges itself by its own classes, and none knows of the others. What counts here is the set of
drafters that propose a node, the largest chance one of them gives it after its parent, in bins, and its depth: how
often such nodes were right is counted as the requests go on, with older counts fading. So a drafter that
promises too much is discounted, and agreement counts for what it is worth on this very text.

Source: the fusion of retrieval and drafter trees along common prefixes of RASD, arXiv 2503.03434. Deviations: any
set of drafters, one learnt estimate instead of fixed shares of the budget, no pruning by a draft model's first
distribution: where one is asked, it goes on below the others' nodes (`joint_tree`). As published: `rasd`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeGuard

import numpy as np
from pydantic import Field, ValidationError, field_validator

from vllm_ext.kernels.fuse_trees import fuse_trees
from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.kernels.learned_arrays import Learned, check_names
from vllm_ext.proposers import registry
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows, in_one_line
from vllm_ext.proposers.calibration import Calibration
from vllm_ext.proposers.clover import CloverOptions
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer, PassOptions
from vllm_ext.proposers.eagle import EagleOptions
from vllm_ext.proposers.joint_tree import JointProposer, PassGain, unsaid
from vllm_ext.proposers.layerskip import LayerSkipOptions
from vllm_ext.proposers.medusa import MedusaOptions
from vllm_ext.proposers.tree import DraftTree, Float32
from vllm_ext.proposers.vllm_chain import NAME as VLLM
from vllm_ext.proposers.vllm_chain import VllmChain, VllmChainOptions

BOUNDS: Float32 = np.array(
    [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96], np.float32
)  # between bins
FUSING = ("hybrid", "rasd")  # methods with drafters
MAX_DRAFTERS = 4  # 15 sets times 13 bins are 195 groups; a group is a byte
# Prior: a bin's middle, for one drafter; every further one that agrees takes a third off the doubt.
AGREEMENT = 2 / 3
# Of methods that ask heads, a model of their own, or the target's first layers.
DraftOptions = EagleOptions | MedusaOptions | CloverOptions | DraftModelOptions | LayerSkipOptions


class HybridOptions(MethodOptions):
    """Options of ``hybrid``."""

    drafters: list[dict[str, Any] | str] = Field(
        default=["token_recycling", "suffix_tree"],
        min_length=1,
        max_length=MAX_DRAFTERS,
        description='names of methods, or objects with their options: {"method": NAME, OPTION: VALUE, ...}',
    )

    @field_validator("drafters")
    @classmethod
    def _known(cls, drafters: list[dict[str, Any] | str]) -> list[dict[str, Any] | str]:
        names = [drafter if isinstance(drafter, str) else drafter.get("method") for drafter in drafters]
        asking = []
        for place, drafter in enumerate(drafters):
            options = make_options(drafter)[1]
            if isinstance(options, VllmChainOptions):
                names[place] = f"{VLLM}: {options.speculative_config['method']}"
            if isinstance(options, DraftOptions) or (isinstance(options, VllmChainOptions) and options.asks):
                asking.append(str(names[place]))
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{name!r} is there more than once, which proposes nothing new; name each method once"
                )
        if len(asking) > 1:
            raise ValueError(f"{' and '.join(asking)} both draft with passes of a model; name one of them")
        return drafters


def make_options(drafter: dict[str, Any] | str) -> tuple[type[Proposer], MethodOptions]:
    """The class of one drafter, and its options, checked.

    Raises:
        ValueError: an unknown method, or an option that its method does not have or allow.
    """
    options = {"method": drafter} if isinstance(drafter, str) else dict(drafter)
    name = options.pop("method", None)
    if name in FUSING:
        raise ValueError(
            f"drafters: {name!r} cannot be one of its own drafters, or of another's; name the methods themselves"
        )
    if not isinstance(name, str) or name not in (*registry.METHODS, VLLM):
        allowed = [m for m in registry.METHODS if m not in FUSING]
        raise ValueError(registry.unknown_method(name, [*allowed, VLLM]))
    for field in MethodOptions.model_fields:
        if field in options:
            raise ValueError(f"drafters: {field} is an option of the whole; move it out of {name}'s")
    proposer = VllmChain if name == VLLM else registry.load_method(name)
    if issubclass(proposer, DraftModelProposer) and not proposer.fuses:
        instead = (
            "'dyspec' drafts with the same model, and can be: a hybrid's trees are never drawn"
            if issubclass(proposer.Options, DraftModelOptions)
            else "leave it out"
        )
        raise ValueError(f"drafters: {name!r} cannot be fused with others; {instead}")
    for option in proposer.only_alone:
        if options.get(option) is not None:
            raise ValueError(f"drafters: {name}.{option} needs {name} alone; leave it out")
    if not proposer.fuses:
        raise ValueError(
            f"drafters: {name!r} has rows in the tree that only its own drafts go with; leave it out, or use it alone"
        )
    try:
        return proposer, proposer.Options.model_validate(options)
    except ValidationError as error:
        problems = in_one_line(error, f"{name}.")
        raise ValueError(
            f"drafters: {problems}; its options are {', '.join(options_of(proposer))}"
        ) from error


def draft_of(options: MethodOptions) -> DraftOptions | None:
    """Of the heads or the model that a method asks, alone or among others; None: it asks none."""
    if isinstance(options, DraftOptions):
        return options
    own = [own for _, own in map(make_options, getattr(options, "drafters", ()))]
    return next((each for each in own if isinstance(each, DraftOptions)), None)


def chains_of(options: MethodOptions) -> list[VllmChainOptions]:
    """Of the proposers of vLLM's that are among a method's drafters."""
    if not isinstance(options, HybridOptions):
        return []
    return [own for _, own in map(make_options, options.drafters) if isinstance(own, VllmChainOptions)]


def reads_nodes(options: MethodOptions) -> bool:
    """Whether a method, or a drafter of it, has passes over nodes that lie in the KV cache before they are verified."""
    if any(chain.asks for chain in chains_of(options)):
        return True
    return isinstance(options, PassOptions) or isinstance(draft_of(options), PassOptions)


def _in_rounds(drafter: Proposer) -> TypeGuard[JointProposer]:
    return isinstance(drafter, JointProposer) and drafter.in_rounds


def _asks_vllm(drafter: Proposer) -> TypeGuard[VllmChain]:
    return isinstance(drafter, VllmChain) and drafter.options.asks


def options_of(proposer: type[Proposer]) -> list[str]:
    """What may stand in a drafter's object."""
    return [name for name in proposer.Options.model_fields if name not in MethodOptions.model_fields]


class Hybrid(Proposer):
    """The union of several proposers' trees.

    Args:
        drafters: up to four.
    """

    on_v2: ClassVar[Literal["device", "host"] | None] = "device"
    summary: ClassVar[str] = "several drafters' trees as one, by what each was worth so far"
    paper: ClassVar[str] = "arXiv 2503.03434"
    Options: ClassVar[type[MethodOptions]] = HybridOptions

    def __init__(self, drafters: Sequence[Proposer]) -> None:
        self.drafters = list(drafters)
        self.verified_top_k = max(drafter.verified_top_k for drafter in drafters)
        middles = (np.array([0.0, *BOUNDS]) + np.array([*BOUNDS, 1.0])) / 2
        agreeing = np.array([mask.bit_count() for mask in range(1, 1 << len(self.drafters))])
        prior = 1.0 - (1.0 - middles) * AGREEMENT ** (agreeing[:, None] - 1)
        self.calibration = Calibration(prior)  # of sets of drafters and bins
        self.gain = PassGain()  # of the passes
        # Set by the adapter where a draft is asked: tokens that a pass must bring to pay, by request the first, and of
        # all one after it; and what has the draft read what was committed, for those that are drafted for.
        self.least_first: Mapping[str, float] = {}
        self.least_reach = 0.0
        self.read: Callable[[set[str]], None] = lambda _: None
        self.draft_seconds = 0.0  # of the last time that it drafted

    @classmethod
    def from_options(cls, options: Any, vocab_size: int) -> Hybrid:
        """See `Proposer.from_options`."""
        made = []
        for proposer, own in map(make_options, options.drafters):
            nodes = options.num_speculative_tokens
            drafter = proposer.from_options(
                own.model_copy(update={"num_speculative_tokens": nodes}), vocab_size
            )
            drafter.draws = False
            made.append(drafter)
        return cls(made)

    @classmethod
    def check(cls, options: Any, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See `Proposer.check`."""
        for proposer, own in map(make_options, options.drafters):
            proposer.check(own, vocab_size, tokenizer_hash)

    @property
    def memory_bytes(self) -> int:
        """All drafters' and the counts."""
        return sum(d.memory_bytes for d in self.drafters) + self.calibration.nbytes

    def start(self, request: Request) -> None:
        """See `Proposer.start`."""
        for drafter in self.drafters:
            drafter.start(request)

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the fused trees of the last `propose`, and let every drafter learn."""
        self.calibration.judge(rows.request_ids, rows.emitted)
        self.gain.judge(rows.request_ids, rows.emitted)
        for drafter in self.drafters:
            width = drafter.verified_top_k
            drafter.observe(
                rows
                if width == self.verified_top_k
                else replace(rows, top_ids=rows.top_ids[:, :width], top_logits=rows.top_logits[:, :width])
            )

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The most probable nodes of all drafters' trees together."""
        none = [DraftTree.empty() for _ in requests]
        proposals = [
            none if _in_rounds(each) or _asks_vllm(each) else each.propose(requests) for each in self.drafters
        ]
        # Passes come last: what the others say tells whether they pay, and a draft of ours goes on below it.
        for place, drafter in enumerate(self.drafters):
            if _in_rounds(drafter):
                # Where the draft does not even pay if the others say nothing, they are not put together for it.
                told = self._others(requests, proposals) if self._may_pay(requests) else {}
                proposals[place] = self._beside(drafter, requests, told)
            elif _asks_vllm(drafter):
                proposals[place] = self._vllms(drafter, requests, self._others(requests, proposals))
        fused = []
        for request, trees in zip(requests, zip(*proposals, strict=True), strict=True):
            tree = self._fuse(request, trees)
            self.calibration.drafted(request.request_id, tree)
            fused.append(DraftTree(*tree[:3]))
        return fused

    def _others(
        self, requests: Sequence[Request], proposals: Sequence[Sequence[DraftTree]]
    ) -> dict[str, DraftTree]:
        return {
            request.request_id: DraftTree(*self._fuse(request, trees)[:3])
            for request, trees in zip(requests, zip(*proposals, strict=True), strict=True)
        }

    def _beside(
        self,
        drafter: JointProposer,
        requests: Sequence[Request],
        others: Mapping[str, DraftTree],
    ) -> list[DraftTree]:
        """A draft's trees, beside what the others say; none where they are so sure that it does not pay to ask."""
        given = {name: self.gain.given_to(name) for name in others}
        worth = self._paying(requests, others)
        drafter.beside, drafter.given, drafter.least_reach = others, given, self.least_reach
        trees = self._ask(drafter, requests, worth.keys())
        for name in worth:
            if name in drafter.blind:
                continue
            reach = [
                unsaid(others[name]),
                *(tokens / given[name] for tokens in drafter.reached.get(name, ())),
            ]
            self.gain.drafted(name, others[name], reach)
        return trees

    def _may_pay(self, requests: Sequence[Request]) -> bool:
        return any(
            self.gain.given_to(each.request_id) >= self.least_first.get(each.request_id, 0.0)
            for each in requests
            if each.has_room
        )

    def _paying(self, requests: Sequence[Request], others: Mapping[str, DraftTree]) -> dict[str, float]:
        """By request, the tokens that a first pass brings beside what others say, where they are worth the pass."""
        worth = {
            each.request_id: self.gain.given_to(each.request_id) * unsaid(others[each.request_id])
            for each in requests
            if each.has_room and each.request_id in others
        }
        return {name: tokens for name, tokens in worth.items() if tokens >= self.least_first.get(name, 0.0)}

    def _ask(
        self, drafter: DraftModelProposer, requests: Sequence[Request], asked: AbstractSet[str]
    ) -> list[DraftTree]:
        """A draft's trees, none for requests that it is not asked about; it reads what was committed, and is timed."""
        self.read(set(asked))
        started = time.perf_counter()
        trees = drafter.propose(
            [each if each.request_id in asked else replace(each, budget_tokens=0) for each in requests]
        )
        self.draft_seconds = time.perf_counter() - started
        return trees

    def _vllms(
        self, drafter: VllmChain, requests: Sequence[Request], others: Mapping[str, DraftTree]
    ) -> list[DraftTree]:
        """Chains of a model that vLLM asks, as long as passes pay; none where asking does not."""
        reach = {}  # by request, and pass: that the text comes so far, and not as the others say
        for request in requests:
            name = request.request_id
            if request.has_room and name not in drafter.blind:
                chances = [1.0, *drafter.chances(name, drafter.most)[:-1]]
                reach[name] = [unsaid(others[name]) * chance for chance in chances]
        worth = [
            sum(self.gain.given_to(name) * each[depth] for name, each in reach.items())
            for depth in range(drafter.most)
        ]
        length = drafter.most
        if drafter.varies:
            length = next((n for n in range(1, length) if worth[n] < drafter.least_each), length)
        least = drafter.least_first + (length - 1) * drafter.least_each
        if not drafter.pays(sum(worth[:length]) - least if reach else None):
            return [DraftTree.empty() for _ in requests]
        trees = drafter.chains(requests, length)
        for request, tree in zip(requests, trees, strict=True):
            name = request.request_id
            if len(tree):
                self.gain.drafted(name, others[name], reach[name][: len(tree)])
        return trees

    def _fuse(self, request: Request, trees: Sequence[DraftTree]) -> GrownTree:
        return fuse_trees(
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([tree.probabilities for tree in trees]),
            np.cumsum([0, *map(len, trees)], dtype=np.int32),
            self.calibration.estimates,
            BOUNDS,
            request.budget_tokens,
        )

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self.calibration.forget(request_id)
        self.gain.forget(request_id)
        for drafter in self.drafters:
            drafter.finish(request_id)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`: the counts, and what drafter ``i`` has learnt as ``i.NAME``."""
        arrays = self.calibration.state_dict()
        for i, drafter in enumerate(self.drafters):
            arrays |= {f"{i}.{name}": array for name, array in drafter.state_dict().items()}
        return arrays

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`."""
        own: dict[str, Learned] = {}
        parts: dict[str, dict[str, Learned]] = {str(i): {} for i in range(len(self.drafters))}
        for name, array in arrays.items():
            drafter_place, _, its_name = name.partition(".")
            if drafter_place in parts:
                parts[drafter_place][its_name] = array
            else:
                own[name] = array
        check_names(own, ("hits", "trials"))
        self.calibration.load_state_dict(own)
        place = 0
        try:
            for place, drafter in enumerate(self.drafters):
                drafter.load_state_dict(parts[str(place)])
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from None

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""
        for drafter in self.drafters:
            drafter.warm_up()
        token, root, chance = np.zeros(1, np.int32), np.full(1, -1, np.int32), np.ones(1, np.float32)
        start = np.array([0, 1], np.int32)
        tree = fuse_trees(token, root, chance, start, self.calibration.estimates, BOUNDS, budget=1)
        spare = Calibration(self.calibration.estimates[..., 0].astype(np.float64))
        spare.drafted("", tree)
        spare.judge([""], [[0]])
