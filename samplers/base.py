# SPDX-License-Identifier: Apache-2.0
"""The rule interface: rows of logits in, rows of logits out. No engine type crosses it.

A *rule* says what the target distribution ``p`` of a request is, where that is not what the model's logits say. It is a
pure function of rows of logits, of the tokens before each row, and of the request's parameters. So it is right without
speculation, on a chain and on a tree, where rows of one request stand behind different tokens: the engine adapter
applies it to each row that verification visits, behind that row's own path. What a rule keeps between calls may make
it faster, never make a difference.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from vllm_ext.kernels.learned_arrays import Learned

if TYPE_CHECKING:
    import torch

MAX_TEXT = 65_536
# How a grammar is written; a structural tag has all of its text in one JSON schema.
Kind = Literal["json", "regex", "grammar", "structural_tag"]


class RuleOptions(BaseModel):
    """What the server is started with, as the user writes it in ``--additional-config``. Strict: no unknown key."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    max_text: int = Field(
        default=MAX_TEXT,
        ge=1,
        le=10_000_000,
        description="longest text that a request may give the rule in one parameter, in characters",
    )

    @property
    def text_limit(self) -> tuple[str, int]:
        """The option that says how long a request's texts may be, and what it says."""
        return "max_text", self.max_text


class RuleParams(BaseModel):
    """What a request says, a key of ``vllm_xargs`` each. Strict; the keys of all rules differ."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _switch(cls, value: Any, info: ValidationInfo) -> Any:
        """Of switches 1 and 0 are true and false, which vLLM's HTTP types turn into these."""
        assert info.field_name is not None
        kind = cls.model_fields[info.field_name].annotation
        if type(value) is int and value in (0, 1) and (kind is bool or bool in get_args(kind)):
            return bool(value)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """JSON can hold half a surrogate pair, which no tokenizer takes."""
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("it holds half of a surrogate pair, which is no text; remove it") from None
        return value


@dataclass(frozen=True, slots=True)
class Asked:
    """What else a request asks for; a rule may have to refuse it."""

    structured: bool = False  # structured_outputs, response_format
    grammar: tuple[Kind, str] | None = None  # of these, where xgrammar has it; its kind and source
    max_tokens: int | None = None
    ignores_end: bool = False  # ignore_eos
    min_tokens: int = 0
    lists_tokens: bool = False  # allowed_token_ids, bad_words
    temperature: float = 1.0  # 0: greedy
    seed: int | None = None
    truncates: bool = False  # top_k, top_p, min_p
    penalizes: bool = False  # repetition_penalty, presence_penalty, frequency_penalty, logit_bias
    num_answers: int = 1  # n

    @property
    def contradictions(self) -> list[str]:
        """Parameters of the request that say what may come, or when to end, as a rule may do by itself."""
        given = {
            "structured_outputs (response_format)": self.structured,
            "ignore_eos=True": self.ignores_end,
            f"min_tokens={self.min_tokens}": self.min_tokens > 0,
            "allowed_token_ids or bad_words": self.lists_tokens,
        }
        return [what for what, is_given in given.items() if is_given]


@dataclass(frozen=True, slots=True)
class Row:
    """Where a row of logits stands."""

    prompt: Sequence[int]
    output: Sequence[int]  # since the prompt's end, with the path down the draft tree; may go on behind `end`
    end: int  # the token that ends the request
    params: Any  # the rule's `Params`
    asked: Asked
    # What a rule that reports says of a row's token, by its place in the output; the engine adapter takes it.
    notes: dict[int, float] = field(default_factory=dict)
    # What a rule keeps of the rows before this one, by their place in the output: of a row on a tree, those of its own
    # path. It outlives a preemption.
    kept: dict[int, Any] = field(default_factory=dict)
    # What rules have raised for the request, by place in its output; the engine adapter ends it.
    faults: dict[int, str] = field(default_factory=dict)


class Vocabulary(Protocol):
    """The target's token ids."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """By id, what a token adds to the text; nothing for special tokens, and for ids that stand for none."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone, without special ones."""


class Constraint(Protocol):
    """What may come behind a row, for drafts: those that it forbids are never accepted."""

    def accept(self, token: int) -> bool:
        """Take one token more; False, and nothing changes, where it may not come."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ones."""

    def forced(self, most: int) -> list[int]:
        """The next tokens as long as each is the only one that may come, so many at most."""


def allows(constraint: Constraint, token: int) -> bool:
    """Whether a token may come next."""
    taken = constraint.accept(token)
    if taken:
        constraint.rollback(1)
    return taken


class Rule(ABC):
    """Base class of all rules."""

    # What `vllm-ext rules` prints.
    summary: ClassVar[str]
    paper: ClassVar[str]
    # Whether it leaves only some tokens: two such rules might leave none.
    closed: ClassVar[bool] = False
    Options: ClassVar[type[RuleOptions]] = RuleOptions
    Params: ClassVar[type[RuleParams]]
    # Parameters of a request under the rule, for the tests that take every rule of the registry.
    example: ClassVar[Mapping[str, Any]]
    # Whether a request can be under no other rule besides.
    alone: ClassVar[bool] = False
    # Whether a row's logits depend on the tokens before it, other than through the model. Where not, an engine may
    # apply the rule to all rows of a tree at once, and `Row.prompt` and `Row.output` cost what it takes to read them.
    reads_tokens: ClassVar[bool] = True
    # What vLLM's V2 model runner has no place for yet, as "it ..."; None: the rule runs there.
    why_v1: ClassVar[str | None] = None
    # Whether a row may have to wait for what is made beside the engine; see `waiting`.
    waits: ClassVar[bool] = False
    # Whether it reads the grammars of structured output; on vLLM's V2 runner, so that it puts no rows off there, as the
    # engine core has compiled them: see `shared_grammars`.
    shares_grammars: ClassVar[bool] = False
    # Set by the engine adapter: seconds that a call of `apply` may wait; None: as long as it takes, here and now.
    patience: float | None = None
    # Rows of the last call of `apply` for which that was not enough: they get no token yet, and come again.
    waiting: Sequence[int] = ()
    # What the sum of a request's notes is called where it is returned; a note of minus infinity ends the sum.
    reports: ClassVar[str | None] = None

    @classmethod
    @abstractmethod
    def from_options(cls, options: Any, vocabulary: Vocabulary) -> Rule:
        """Build the rule. ``options`` is an instance of ``cls.Options`` that `check` has let through."""

    @classmethod
    def check(cls, options: Any, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """Refuse at start-up what the options' own rules cannot see: files, say.

        Args:
            options: an instance of ``cls.Options``.
            vocab_size: number of token ids of the target.
            tokenizer_hash: tells which id stands for which token; loads the tokenizer when it is called.

        Raises:
            ValueError: the message names the field, the value, what is wrong and the way out.
        """

    @classmethod
    @abstractmethod
    def problem(cls, options: Any, params: Any, asked: Asked) -> str | None:
        """Why a request cannot be served, with the way out; None where it can."""

    @classmethod
    def grammar(cls, params: Any) -> tuple[Kind, str] | None:
        """A request's grammar, for vLLM to look at before the request is taken: field of structured_outputs, source."""
        return None

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Make the logits those of ``p``, in place.

        Args:
            logits: float32 ``[num_rows, vocab]``, before penalties, temperature and truncation.
            rows: as many. Where the output has ended anything will do that is not minus infinity everywhere.
        """

    def constraint(self, row: Row) -> Constraint | None:
        """What may be drafted behind a row; None where any token may."""
        return None


class LearningRule(Rule):
    """A rule whose ``p`` depends on what it has seen; its options have ``state_dir`` and ``state_interval_minutes``."""

    # Held while it learns or is read: a save copies what was learnt in another thread.
    lock: AbstractContextManager[Any] = nullcontext()
    # Called then, when there is something new; None where nobody saves.
    mark_dirty: Callable[[], None] | None = None

    @abstractmethod
    def state_dict(self) -> dict[str, Learned]:
        """Copies of all that was learnt, C-contiguous."""

    @abstractmethod
    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """Take over what `state_dict` has given, in this process or another.

        Raises:
            ValueError: these can be no such arrays; nothing has changed.
        """


def contradiction(what: str, who: str, asked: Asked) -> str | None:
    """Why a request cannot be under a rule that says by itself what may come, and when to end; see `Rule.problem`.

    Args:
        what: the parameter that asks for the rule.
        who: what it is that says so.
        asked: what else the request asks for.
    """
    if given := asked.contradictions:
        return (
            f"{what} does not go with {' nor '.join(given)}: {who} says by itself what may come, and when to end. "
            "Leave one of them out"
        )
    return None


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    """The text of some tokens; a character that goes on behind them is there in part."""
    return b"".join([vocabulary.pieces[token] for token in tokens])


def load_function(field: str, where: str) -> Any:
    """A function of the user's.

    Args:
        field: the option that names it.
        where: ``package.module:function``.

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        if not callable(found):
            raise TypeError("it is no function")
    except Exception as error:  # importing runs whatever is there
        raise ValueError(
            f"{field}={where!r} cannot be imported ({error}); name a function that this server's Python can import, as "
            "package.module:function"
        ) from None
    return found


def rows_by(rows: Sequence[Row], key: Callable[[Row], Any]) -> Mapping[Any, list[int]]:
    """Indices of rows, by what a function says of them."""
    groups: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(key(row), []).append(place)
    return groups
