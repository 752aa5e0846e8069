# SPDX-License-Identifier: Apache-2.0
"""The proposer interface: arrays and ints in, draft trees out. No engine type crosses it.

A *proposer* answers one question: which tokens may follow this prefix? The engine adapter calls it once a
step for the whole batch, in this order:

1. ``observe(rows)`` with every row the target model has just verified;
2. ``start(request)`` for each request whose prompt has just been computed for the first time;
3. ``propose(requests)`` for the drafts of the next step;
4. ``finish(request_id)`` when a request is gone (finished or aborted, not when preempted).

State belongs to a request id, never to a batch slot. What a proposer returns can cost time but never change
the output: verification sees to that. Everywhere ``p`` is the target's distribution and ``q`` the draft's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ext.kernels.learned_arrays import Learned, check_names
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.reflection import ReflectionRule
from vllm_ext.proposers.sure_text import EntropyRule
from vllm_ext.proposers.tree import DraftTree, Float32, Int32

# vLLM's rejection sampler verifies at most this many draft tokens of one request in one step.
MAX_SPECULATIVE_TOKENS = 128


class MethodOptions(BaseModel):
    """Options of a method, as the user writes them in ``--speculative-config``.

    A proposer adds its own fields in a subclass. Strict: no coercion, no unknown key.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    num_speculative_tokens: int = Field(
        default=16,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="most draft tokens (tree nodes) of one request verified in one step",
    )
    budget: Literal["goodput", "shared", "fixed"] = Field(
        default="goodput",
        description="goodput: of each tree verify what pays at the current load, down to nothing; "
        "shared: likewise, on the V2 model runner more of some trees than of others; "
        "fixed: always num_speculative_tokens",
    )
    linear_layers: Literal["auto", "bfloat16", "vllm"] = Field(
        default="auto",
        description="auto: on x86 CPUs without AMX bfloat16 layers multiply a tree's rows in about the time of one, "
        "and draft models and heads hold their weights in 8 bits; bfloat16: likewise, but in 16; vllm: vLLM's own "
        "products",
    )
    verify: Literal["exact", "typical", "entropy", "reflective"] = Field(
        default="exact",
        description="exact: the answers are those without drafts; typical: lossy, on the V1 model runner: of requests "
        "that sample without a seed drafts are kept that the target finds likely enough; entropy: lossy, likewise: of "
        "requests without a seed what the draft model is sure of, where there is one; reflective: lossy, likewise: a "
        "draft model's chain is read twice; a request may say otherwise",
    )
    verify_threshold: float = Field(
        default=0.09,
        gt=0.0,
        le=1.0,
        description="of typical: a draft passes where its probability is above the smaller of this and "
        "verify_alpha * exp(-entropy)",
    )
    verify_alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="of typical; null: the square root of verify_threshold",
    )
    verify_entropy: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description="of entropy: a drafted token is taken where the draft's mean entropy, in nats, is below this",
    )
    verify_window: int = Field(
        default=5,
        ge=1,
        le=1024,
        description="of entropy: how many tokens that is the mean of, the drafted one and those before it",
    )
    verify_weight: float = Field(
        default=0.3,
        ge=0.0,
        le=1.0,
        description="of reflective: how much what the target says of the second copy counts; 0 is exact",
    )
    verify_prompt: str = Field(
        default=" Wait, is that right? Again:",
        min_length=1,
        max_length=1024,
        description="of reflective: text between the copies; num_speculative_tokens holds it and two copies",
    )
    state_dir: UserPath | None = Field(
        default=None,
        min_length=1,
        description="folder where what the method learns is kept over restarts; none: it is forgotten",
    )
    state_interval_minutes: float = Field(
        default=10.0,
        ge=0.1,
        le=1440.0,
        description="how often it is saved while the server runs; also when it shuts down",
    )


def in_one_line(error: ValidationError, before: str = "") -> str:
    """What is wrong with some options: each field, its value and why, with ``before`` in front of its name."""
    problems = (
        f"{before}{'.'.join(map(str, each['loc']))}={each['input']!r:.200}: {each['msg']}"
        for each in error.errors(include_url=False)
    )
    return "; ".join(problem.removeprefix("=") for problem in problems)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request samples; what a proposer may want to know of it."""

    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # 0 means all tokens
    min_p: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """One request at the moment it is drafted for."""

    request_id: str
    tokens: Int32  # [num_tokens] prompt and output; the last one is the tree's root. A view: copy to keep
    num_prompt_tokens: int
    budget_tokens: int  # most draft nodes worth proposing now
    max_depth: int  # deepest node that may be proposed: never past max_tokens or max_model_len
    sampling: Sampling
    chain: bool = False  # a tree cannot be verified here: of one that branches only the best chain is used
    # A host proposer's tree may be drawn at random and say from what: it is verified by that, and cut by nothing drawn.
    may_draw: bool = False
    # Its draft is a chain, and of that what the drafting model is sure of is taken; None: all is verified.
    entropy_rule: EntropyRule | None = None
    # Its draft is a chain that the target reads twice, for which the step has room.
    reflection: ReflectionRule | None = None

    @property
    def has_room(self) -> bool:
        """Whether any node may be proposed."""
        return self.budget_tokens > 0 and self.max_depth > 0


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """What one target step computed: for each request its root row, then the rows of its draft nodes."""

    request_ids: Sequence[str]  # [num_requests]
    row_start: Int32  # [num_requests + 1] rows of request i are row_start[i]:row_start[i + 1]
    tokens: Int32  # [num_rows] the token that was this row's input
    parents: Int32  # [num_rows] the parent row, as an offset inside the request; -1 for roots
    accepted: npt.NDArray[np.bool_]  # [num_rows] the row's input token is now part of the output; roots are
    top_ids: Int32  # [num_rows, verified_top_k] ids of the target's largest logits, best first
    top_logits: Float32  # [num_rows, verified_top_k] those logits, before penalties, masks and temperature
    # [num_requests] the tokens each request put out: the accepted path, then one sampled; none while a prompt
    # is incomplete. They judge a proposed tree whole, also the part of it that was not verified.
    emitted: Sequence[Sequence[int]]
    # [num_rows] the log of the sum of the exponentials of a row's logits; of rows that nobody wants it of, 0.
    log_total: Float32 | None = None

    def where(self, kept: npt.NDArray[np.bool_]) -> VerifiedRows:
        """Some of the rows, of the same requests.

        Args:
            kept: bool ``[num_rows]``; of a request the first ones, or none.
        """
        num_before = np.concatenate([[0], np.cumsum(kept)])
        return replace(
            self,
            row_start=num_before[self.row_start].astype(np.int32),
            tokens=self.tokens[kept],
            parents=self.parents[kept],
            accepted=self.accepted[kept],
            top_ids=self.top_ids[kept],
            top_logits=self.top_logits[kept],
            log_total=None if self.log_total is None else self.log_total[kept],
        )


def no_top(num_rows: int) -> tuple[Int32, Float32]:
    """``top_ids`` and ``top_logits`` for a proposer that wants none."""
    return np.empty((num_rows, 0), np.int32), np.empty((num_rows, 0), np.float32)


class Proposer(ABC):
    """Base class of all drafters."""

    # What `vllm-ext methods` prints.
    summary: ClassVar[str]
    paper: ClassVar[str]
    Options: ClassVar[type[MethodOptions]] = MethodOptions
    # Options that the engine tests of exactness give it (scripts/matrix.sh); all that it requires are among them.
    tested_with: ClassVar[Mapping[str, Any]] = {}

    # Where it drafts with vLLM's V2 model runner: on the device or on the host. None: it runs on V1 alone.
    on_v2: ClassVar[Literal["device", "host"] | None] = "host"
    why_v1: ClassVar[str] = ""  # of those: what "it" does
    # How many of each verified row's best tokens `observe` wants; 0 spares the top-k.
    verified_top_k: int = 0
    # Whether `observe` wants ``log_total`` of prompt tokens' rows, which makes probabilities of these tokens' logits.
    verified_log_total: ClassVar[bool] = False
    # Whether `hybrid` may have it among its drafters.
    fuses: ClassVar[bool] = True
    # Options that it cannot have as a hybrid's drafter.
    only_alone: ClassVar[Sequence[str]] = ()
    # Whether it has a model whose own text is an answer, so that `verify` may be `entropy`.
    writes_text: ClassVar[bool] = False
    draws = True  # whether requests that sample may get drawn trees; not where these are fused with others

    @classmethod
    @abstractmethod
    def from_options(cls, options: Any, vocab_size: int) -> Proposer:
        """Build the proposer. ``options`` is an instance of ``cls.Options``."""

    @classmethod
    def check(cls, options: Any, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """Refuse at start-up, before the model is loaded, what the options' own rules cannot see: files, say.

        Args:
            options: an instance of ``cls.Options``.
            vocab_size: number of token ids of the target.
            tokenizer_hash: tells which id stands for which token; loads the tokenizer when it is called.

        Raises:
            ValueError: the message names the field, the value, what is wrong and the way out.
        """

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Host memory of the proposer's state that does not depend on the load."""

    def warm_up(self) -> None:
        """Compile what would else stall the first request; called once, before any request."""

    def start(self, request: Request) -> None:
        """A request's prompt has been computed; called once, also when it is later preempted."""

    def observe(self, rows: VerifiedRows) -> None:
        """Learn from one step's verification."""

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """One tree for each request, in the same order; at most ``budget_tokens`` nodes, possibly none.

        No more than a prefix of each tree is verified: the nodes worth their cost at the current load.
        """

    def finish(self, request_id: str) -> None:
        """Forget a request."""

    def state_dict(self) -> dict[str, Learned]:
        """What is worth keeping over a restart, by name. Nothing that belongs to one request.

        C-contiguous copies: they are written to disk while requests go on. Changes nothing, not even what is only
        tidying up: of tensor-parallel ranks one is asked, and all must go on alike.
        """
        return {}

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """Take over what `state_dict` of an equal proposer gave; called before any request.

        Raises:
            ValueError: naming the array, and how its shape, type or values differ from what can be used. Then the
                proposer is not to be used any more: some of the arrays may have been taken over.
        """
        check_names(arrays, ())


def chains_where_asked(requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[DraftTree]:
    """The trees, of requests that can have chains alone the best ones."""
    return [
        tree.best_chain() if request.chain and not tree.is_chain else tree
        for request, tree in zip(requests, trees, strict=True)
    ]


def propose_apart(
    proposer: Proposer, requests: Sequence[Request], fault: Callable[[str], None]
) -> list[DraftTree]:
    """`Proposer.propose`, of which a fault costs the request whose it is its draft, and no other.

    Args:
        proposer: asked once; where that fails for each request alone.
        requests: any.
        fault: told, in an except block, the id of each request that goes without; or of all, where each alone is fine.

    Returns:
        A tree for each request, in the same order.
    """
    faults = 0

    def alone(request: Request) -> list[DraftTree]:
        nonlocal faults
        try:
            return proposer.propose([request])
        except Exception:
            faults += 1
            fault(request.request_id)
            return [DraftTree.empty()]

    if len(requests) == 1:
        return alone(requests[0])
    try:
        return proposer.propose(requests)
    except Exception:
        trees = [tree for request in requests for tree in alone(request)]
        if not faults:
            fault(", ".join(request.request_id for request in requests))
        return trees


def practise(proposer: Proposer, tokens: Int32) -> None:
    """Take one request through a proposer: numba then has compiled what it calls, for all of its types.

    Args:
        proposer: a small one, not to be used any more.
        tokens: int32 ``[num_tokens]``, at least 2: a prompt and one token behind it.
    """
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
    request = Request("", tokens, len(tokens) - 1, budget_tokens=1, max_depth=1, sampling=sampling)
    proposer.start(request)
    proposer.propose([request])
    proposer.propose([replace(request, may_draw=True)])
    proposer.observe(
        VerifiedRows(
            [""],
            np.array([0, 1], np.int32),
            tokens[-1:],
            np.array([-1], np.int32),
            np.array([True]),
            np.zeros((1, proposer.verified_top_k), np.int32),
            np.zeros((1, proposer.verified_top_k), np.float32),
            [[0]],
            np.zeros(1, np.float32) if proposer.verified_log_total else None,
        )
    )
