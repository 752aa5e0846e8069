# SPDX-License-Identifier: Apache-2.0
"""Drafting with a second model: what its methods have in common.

The engine's adapter runs the model and gives its distributions as arrays; which nodes are asked for, and what is drawn
from the answers, is a `TreeBuilder`'s. A request that samples without a seed gets a tree drawn from the draft's
distributions, whose verifier needs them; any other gets the likeliest nodes and the target's own draws (`tree_walk`),
so that greedy and seeded output is what it is without drafts, token for token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field, field_validator

from vllm_ext.kernels.chance import Chance, RandomChance
from vllm_ext.kernels.sparse import Float64, Int32, Sparse
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, Sampling, VerifiedRows
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.online import OnlineOptions
from vllm_ext.proposers.sampled import ASKED_PER_NODE, ROOT, TreeBuilder, grow
from vllm_ext.proposers.sure_text import SureChain, SureTexts
from vllm_ext.proposers.tree import DraftTree, Float32

if TYPE_CHECKING:
    from vllm_ext.proposers.sampled_device import Growth  # with torch

SELF = "self"
SEED = 0x5EED  # of the draft's noise: apart from vLLM's and from verification's
GUESSES, MOST_GUESSES = 6, 16  # that a pass of a cascade reads ahead


class Rows(NamedTuple):
    """The draft's distributions after some nodes, its likeliest tokens only."""

    ids: Int32  # [num_rows, support] token ids, likeliest first
    log_q: Float32  # [num_rows, support] log-probabilities at temperature 1, over the whole vocabulary


class DraftModel(Protocol):
    """A second model that has read what the requests have put out so far."""

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """After the last token of each request; nodes asked for before are forgotten."""

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """After nodes below those, in one forward pass.

        Args:
            request_ids: ``[num_nodes]`` in the order of `roots`; a request may have several nodes, or none.
            parents: ``[num_nodes]`` the parent's place among the nodes asked for of its request so far; ROOT below the
                last token. Parents were asked for in an earlier pass.
            tokens: ``[num_nodes]``.
        """


class PassOptions(MethodOptions):
    """Options of all methods that draft with passes of a model."""

    max_depth: int = Field(
        default=8, ge=1, le=32, description="deepest node: each depth is a forward pass of the draft model"
    )


class DraftModelOptions(PassOptions):
    """Options of all methods with a second model."""

    model: UserPath = Field(
        min_length=1,
        description="folder or hub name of a draft model with the target's tokenizer; "
        "'self': the target's own first layers",
    )
    self_layers: int | None = Field(
        default=None, ge=1, description="how many, with model='self'; none: a quarter of them"
    )
    export_dir: UserPath | None = Field(
        default=None,
        min_length=1,
        description="folder where answers are kept for `vllm-ext train draft --answers`; none: they are not",
    )
    export_mb: float = Field(default=64.0, ge=1.0, le=65536.0, description="most of them, the newest ones")
    online: OnlineOptions | None = Field(
        default=None,
        description="the draft goes on learning from what is asked, in a process of its own; none: it stays as it is",
    )

    cascade: Literal["token_recycling"] | None = Field(
        default=None,
        description="the draft model's own drafter, on the V1 model runner: a pass of the draft model then says "
        "several tokens; none: it has none",
    )
    cascade_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_GUESSES,
        description=f"with cascade, what a pass reads ahead of each request; none: {GUESSES}",
    )

    @property
    def guesses(self) -> int:
        """Nodes of a request that a pass reads ahead."""
        return 0 if self.cascade is None else self.cascade_tokens or GUESSES

    @field_validator("cascade_tokens")
    @classmethod
    def _only_of_cascade(cls, cascade_tokens: int | None, info: Any) -> int | None:
        if cascade_tokens is not None and info.data.get("cascade") is None:
            raise ValueError(
                "without a cascade nothing is read ahead; add cascade='token_recycling', or remove it"
            )
        return cascade_tokens

    @field_validator("self_layers")
    @classmethod
    def _only_of_self(cls, self_layers: int | None, info: Any) -> int | None:
        if self_layers is not None and info.data.get("model", SELF) != SELF:
            raise ValueError(
                f"only model='self' has layers to choose; model={info.data['model']!r}: remove it"
            )
        return self_layers

    @field_validator("online")
    @classmethod
    def _learns_alone(cls, online: OnlineOptions | None, info: Any) -> OnlineOptions | None:
        if online is None:
            return None
        if info.data.get("model") == SELF:
            raise ValueError(
                "it trains a model of its own, and model='self' has the target's weights; name a draft model, or "
                "remove it"
            )
        if (export_dir := info.data.get("export_dir")) is not None:
            raise ValueError(
                f"export_dir={export_dir!r} keeps the same answers for good, and these are deleted once the draft has "
                "learnt from them; remove one of the two"
            )
        return online


class DraftModelProposer(Proposer):
    """Trees from a draft model.

    Args:
        options: an instance of the class's ``Options``.
    """

    Options: ClassVar[type[MethodOptions]] = DraftModelOptions
    tested_with: ClassVar[Mapping[str, Any]] = {"model": "self"}
    on_v2: ClassVar[Literal["device", "host"] | None] = None
    # Whether a drawn tree must be verified whole or not at all. Of others a scheduler may leave out the last nodes.
    whole: ClassVar[bool] = False
    draft: DraftModel  # set by the adapter, before any request
    least_reach = 0.0  # set by the adapter: see `sampled.grow`
    deepest = 32  # set by the adapter: nodes of which the draft knows something
    fuses: ClassVar[bool] = False  # whether it may be one of a hybrid's drafters
    only_alone: ClassVar[Sequence[str]] = ("export_dir", "online", "cascade")
    in_rounds: ClassVar[bool] = False  # whether it then goes on below what the others say, depth by depth
    blind: Container[str] = frozenset()  # set by the adapter: requests that the draft can say nothing of

    def __init__(self, options: Any) -> None:
        self.options = options
        self.noise = np.random.default_rng(SEED)
        self.chance = RandomChance(self.noise)
        # Of the last `propose`: forward passes, the one for the roots left out, and `TreeBuilder.reached` by request.
        self.passes = 0
        self.reached: dict[str, list[float]] = {}
        self.first: dict[str, Sparse] = {}  # by request, the draft's distribution after the root
        self.sure_texts = SureTexts()

    @classmethod
    def from_options(cls, options: DraftModelOptions, vocab_size: int) -> DraftModelProposer:
        """See `Proposer.from_options`."""
        return cls(options)

    @property
    def memory_bytes(self) -> int:
        """None: the model is the adapter's."""
        return 0

    @abstractmethod
    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """The builder of a tree for a request that samples."""

    def chosen(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """The builder of a tree for any other request: its nodes are chosen, not drawn."""
        return LikeliestTree(num_nodes, max_depth)

    def chained(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """The builder of a chain, for a request that can have nothing else; its nodes are chosen."""
        return LikeliestTree(num_nodes, max_depth, width=1)

    def sure_chain(self, num_nodes: int, chance: Chance | None, sure: SureChain) -> TreeBuilder:
        """The builder of a chain of which sure tokens are taken; of methods with ``writes_text``.

        Args:
            num_nodes: most nodes.
            chance: draws them; None: the likeliest ones are taken.
            sure: knows of each node whether it is sure, once it is there.
        """
        raise NotImplementedError

    def drawn_on_device(self, num_nodes: int) -> Growth:
        """What `drawn` builds, of a batch on the device; of methods with ``on_v2 = "device"``."""
        raise NotImplementedError

    def chosen_on_device(self, num_nodes: int) -> Growth:
        """What `chosen` builds, likewise."""
        from vllm_ext.proposers.likeliest_device import Likeliest

        return Likeliest(num_nodes, self.most_depth)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """See `Proposer.propose`. A drawn tree is to be verified as it is, not cut by what it holds."""
        self.passes = 0
        self.reached, self.first = {}, {}
        self.sure_texts.clear()
        asked = [request for request in requests if self.drafts(request)]
        if not asked:
            return [DraftTree.empty() for _ in requests]
        builders = [self._builder(request) for request in asked]
        # Of each builder, the place among the nodes asked for of each node that was.
        places: list[dict[int, int]] = [{ROOT: ROOT} for _ in builders]

        def distributions(wanted: Sequence[tuple[int, int]]) -> list[Sparse]:
            if wanted[0][1] == ROOT:  # the first round, of all builders
                rows = self.draft.roots([asked[index].request_id for index, _ in wanted])
            else:
                self.passes += 1
                rows = self.draft.nodes(
                    [asked[index].request_id for index, _ in wanted],
                    [places[index][builders[index].parents[node]] for index, node in wanted],
                    [builders[index].tokens[node] for index, node in wanted],
                )
                for index, node in wanted:
                    places[index][node] = len(places[index]) - 1
            for (index, _), log_q in zip(wanted, rows.log_q, strict=True):
                if (sure := self.sure_texts.of(asked[index].request_id)) is not None:
                    sure.see(log_q)
            return [
                shaped(ids, log_q, asked[index].sampling)
                for (index, _), ids, log_q in zip(wanted, *rows, strict=True)
            ]

        grow(builders, distributions, self.least_reach)
        self.reached = {r.request_id: b.reached for r, b in zip(asked, builders, strict=True)}
        self.first = {r.request_id: b.q[ROOT] for r, b in zip(asked, builders, strict=True) if ROOT in b.q}
        trees = iter(self._finished(r, b) for r, b in zip(asked, builders, strict=True))
        return [next(trees) if self.drafts(request) else DraftTree.empty() for request in requests]

    def drafts(self, request: Request) -> bool:
        """Whether a request gets a tree."""
        return request.has_room and request.request_id not in self.blind

    def _finished(self, request: Request, builder: TreeBuilder) -> DraftTree:
        tree, sure = builder.tree(), self.sure_texts.of(request.request_id)
        return tree if sure is None else replace(tree, sure=np.array(sure.sure[: len(tree)], np.bool_))

    def observe(self, rows: VerifiedRows) -> None:
        """See `Proposer.observe`."""
        self.sure_texts.observe(rows.request_ids, rows.emitted)

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self.sure_texts.finish(request_id)

    def _builder(self, request: Request) -> TreeBuilder:
        if request.entropy_rule is not None:
            sampled = request.sampling.temperature > 0.0 and request.sampling.seed is None
            sure = self.sure_texts.start(request.request_id, request.entropy_rule)
            return self.sure_chain(min(self.limits(request)), self.chance if sampled else None, sure)
        build = self.drawn if self.draws and is_drawn(request) else self.chosen
        return (self.chained if request.chain else build)(*self.limits(request))

    def limits(self, request: Request) -> tuple[int, int]:
        """Most nodes of a request's tree, and its deepest."""
        return (
            min(request.budget_tokens, self.options.num_speculative_tokens),
            min(request.max_depth, self.most_depth),
        )

    @property
    def most_depth(self) -> int:
        """Of any node."""
        most: int = min(self.options.max_depth, self.deepest)
        return most


def places_per_node(options: MethodOptions) -> int:
    """Slots in the KV cache behind the root for each node of a tree: a cascade reads as many again ahead."""
    return (2 if getattr(options, "guesses", 0) else 1) * ASKED_PER_NODE


def is_drawn(request: Request) -> bool:
    """Whether the request's trees are drawn from the draft's distributions."""
    return request.sampling.temperature > 0.0 and request.sampling.seed is None and not request.chain


def shaped(ids: Int32, log_q: Float32, sampling: Sampling) -> Sparse:
    """The distribution a request's draft is drawn from: the model's, treated as the target's will be.

    Any distribution would do: verification is exact with each, and accepts most where the two are alike. So what of
    the vocabulary is not among ``ids`` is left out.

    Args:
        ids: int32 ``[support]``.
        log_q: float32 ``[support]`` descending, at temperature 1.
        sampling: the request's; greedy ones keep temperature 1, for the nodes' probabilities.
    """
    temperature = sampling.temperature if sampling.temperature > 0.0 else 1.0
    scaled = log_q.astype(np.float64) / temperature
    q: Float64 = np.exp(scaled - scaled[0])
    if sampling.temperature > 0.0:
        if 0 < sampling.top_k < len(q):
            q[sampling.top_k :] = 0.0
        if sampling.min_p > 0.0:
            q[q < sampling.min_p] = 0.0
        if sampling.top_p < 1.0:
            before = np.cumsum(q) - q
            q[before >= sampling.top_p * q.sum()] = 0.0
    kept = q > 0.0
    return Sparse(ids[kept], q[kept] / q.sum())
