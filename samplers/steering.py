# SPDX-License-Identifier: Apache-2.0
"""What rules have in common that make ``p`` of several distributions: of the model, its layers, a second model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from pydantic import Field

from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.samplers.base import Asked, Row, Rule, RuleOptions, Vocabulary
from vllm_ext.samplers.prompt_parts import PairedPrompt, Prompt

if TYPE_CHECKING:
    import torch


class AuxLogits(Protocol):
    """Other logits of the rows that a rule is applied to, in their order; float32 ``[num_rows, vocab]``.

    Where ``ids`` are given, int64 ``[num_rows, k]``, they are those tokens' alone, ``[num_rows, k]``: most rules
    contrast few tokens, and a model's head is large.
    """

    def layers(self, layers: Sequence[int], norm: bool, ids: torch.Tensor | None = None) -> torch.Tensor:
        """What the target's head makes of the hidden states after so many layers: ``[len(layers), num_rows, ...]``.

        Args:
            layers: of `SteeringRule.layers`.
            norm: whether its final norm comes first.
            ids: see above.
        """

    def companion(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """The second model's, of the same tokens; minus infinity where it knows no such token."""

    def companion_layers(
        self, layers: Sequence[int], norm: bool, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `layers`, of the second model."""

    def target(self) -> torch.Tensor:
        """The target's own, as no rule has changed them yet."""

    def of_pairs(self, which: Sequence[bool]) -> AuxLogits:
        """The same behind the same output but another prompt, that of `SteeringRule.paired_prompt`.

        Args:
            which: ``[num_rows]``; others are as here.
        """

    def hidden(self) -> torch.Tensor:
        """No logits but what the target's head makes them of: ``[num_rows, hidden_size]``, in the model's dtype."""


class SteeringOptions(RuleOptions):
    """Of all rules that steer. Other fields are what a request gets that does not say otherwise."""

    always: bool = Field(
        default=False,
        description="for every request that does not turn it off, instead of those that ask for it",
    )


class CompanionOptions(SteeringOptions):
    """Of rules that read a second model."""

    model: UserPath = Field(
        min_length=1,
        description="folder or hub name of a companion model with the target's tokenizer; 'self': the target's own "
        "first layers. The same for all rules of a server",
    )
    self_layers: int | None = Field(
        default=None, ge=1, description="how many, with model='self'; none: a quarter of them"
    )


class SteeringRule(Rule):
    """A rule that makes ``p`` of several distributions."""

    name: ClassVar[str]  # in the registry; also of the parameter, a bool, that turns it on and off
    Options: ClassVar[type[RuleOptions]] = SteeringOptions
    example: ClassVar[Mapping[str, Any]] = {}  # beside its switch
    # Set by the engine adapter, before any row.
    aux_logits: AuxLogits
    layer_numbers: Sequence[int] = ()  # what `layers` says of the target
    companion_layer_numbers: Sequence[int] = ()
    has_pairs: ClassVar[bool] = False  # whether it reads `AuxLogits.of_pairs`

    def __init__(self, options: Any) -> None:
        self.options = options

    @classmethod
    def from_options(cls, options: Any, vocabulary: Vocabulary) -> SteeringRule:
        return cls(options)

    @classmethod
    def problem(cls, options: Any, params: Any, asked: Asked) -> str | None:
        """See the base class; it goes with everything."""
        return None

    @classmethod
    def layers(cls, options: Any, num_layers: int) -> Sequence[int]:
        """Those of the target that it reads: after how many, 0 to ``num_layers``.

        Raises:
            ValueError: the target has no such layers; the message says which it has.
        """
        return ()

    @classmethod
    def companion_layers(cls, options: Any, num_layers: int) -> Sequence[int]:
        """Those of the second model, which has so many; see `layers`."""
        return ()

    @classmethod
    def paired_prompt(cls, params: Any, prompt: Prompt) -> PairedPrompt | None:
        """The other prompt of a request's pair; None where it wants no pair.

        Args:
            params: the request's.
            prompt: its own.

        Raises:
            ValueError: what it asks for cannot be; the message names the field, and the way out.
        """
        return None

    def value(self, row: Row, option: str) -> Any:
        """What a request has given for an option, or else the server's."""
        given = getattr(row.params, f"{self.name}_{option}")
        return getattr(self.options, option) if given is None else given

    def values(self, rows: Sequence[Row], option: str, like: torch.Tensor) -> torch.Tensor:
        """Those of all rows: float32 ``[num_rows, 1]``."""
        import torch  # here: options are read without it

        given = [[self.value(row, option)] for row in rows]
        return torch.tensor(given, dtype=torch.float32).to(like.device, non_blocking=True)


class Candidate(NamedTuple):
    """A token that may be the next one."""

    token: int
    log_p: float


class Deferral(NamedTuple):
    """A row that gets no token yet."""

    at: int  # its place in the output
    candidates: Sequence[Candidate]  # likeliest first
    lookahead: int  # most tokens that each is continued by


class LookaheadRule(SteeringRule):
    """A rule that can put a token off, to see first how the text would go on behind each of some candidates.

    The engine adapter gives a paused row no token, has each candidate gone on with greedily, and keeps in ``Row.kept``
    of that place which one had the highest score.
    """

    deferrals: Mapping[int, Deferral] = MappingProxyType({})  # of the last call of `apply`, by row
    stops: Sequence[int] = ()  # tokens behind which none is continued

    @staticmethod
    def score(candidate: Candidate, behind: Sequence[float]) -> float:
        """The mean of a candidate's log-probability and those of the tokens behind it."""
        return (candidate.log_p + sum(behind)) / (1 + len(behind))
