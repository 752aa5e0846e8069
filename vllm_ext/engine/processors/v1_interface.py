# SPDX-License-Identifier: Apache-2.0
"""The user's logits processors of V1's interface, as one processor of vLLM's V2 runner.

V1 tells a processor of the batch, and then of each token once: ``update_state``, then ``apply`` with a row of each
request. So does this, for every token of a walk down a tree: trees of requests that a processor concerns are sampled
depth by depth (`engine.v2.rejection_sampler`), along tokens that are taken, so that nothing has to be taken back. What
a step without drafts is to a processor on V1, each depth is here.

Which requests a processor concerns V1's interface does not say. Of vLLM's adapter it is those that get a function, of
vLLM's own processors those with the parameter, of any other all. They wait for their tokens, others do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from vllm.utils.torch_utils import PIN_MEMORY, guard_cuda_initialization
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_ext.engine.processors.v1_batch import Member, V1Batch

# Of vLLM's own, by their very class: whether a request asks for anything.
ASKED: dict[type[Any], Callable[[Any], bool]] = {
    MinTokensLogitsProcessor: lambda params: params.min_tokens > 0,
    LogitBiasLogitsProcessor: lambda params: bool(params.logit_bias),
    MinPLogitsProcessor: lambda params: params.min_p > 0,
}


def asks_each(kind: type[Any]) -> bool:
    """Whether a class does what vLLM's adapter does, and no more: it calls something of each request's."""
    return (
        issubclass(kind, AdapterLogitsProcessor)
        and kind.apply is AdapterLogitsProcessor.apply
        and kind.update_state is AdapterLogitsProcessor.update_state
    )


def concerns_all(kind: type[Any]) -> bool:
    """Whether nothing says of a class which requests it has nothing to do for."""
    return kind not in ASKED and not asks_each(kind)


class _Wrapped:
    """One processor."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._asks_each = asks_each(type(processor))
        # V1 has it behind temperatures, and only for requests that have one.
        self.is_scaled: bool = processor.is_argmax_invariant()
        self.under: set[int] = set()  # slots of the requests that it concerns
        self._untold: Any = None  # an update that goes with the next token

    def take(self, update: Any, batch: V1Batch) -> None:
        """The batch has changed."""
        # An adapter says by it which requests it is for. To others a call means new tokens: they get it with those.
        if self._asks_each:
            self._processor.update_state(update)
        else:
            if self._untold is not None:
                self._processor.update_state(self._untold)
            self._untold = update
        self.under = {
            member.slot for place, member in enumerate(batch.members) if self._concerns(place, member)
        }

    def _concerns(self, place: int, member: Member) -> bool:
        if self.is_scaled and not member.params.temperature:
            return False
        if self._asks_each:
            return place in self._processor.req_info
        asked = ASKED.get(type(self._processor))
        return asked is None or asked(member.params)

    def catch_up(self) -> None:
        """The lists of output tokens have grown."""
        if not self._asks_each:
            self._processor.update_state(self._untold)
            self._untold = None

    def apply(self, logits: torch.Tensor, rows: Mapping[int, int], batch: V1Batch) -> None:
        """Change some rows in place.

        Args:
            logits: float32 ``[rows, vocab]``.
            rows: of requests that it concerns, by place.
            batch: as it is now.
        """
        places, index = torch.tensor([[*rows], [*rows.values()]], device=logits.device)
        part = logits[index]
        if self.is_scaled:
            scale = [batch.members[place].params.temperature for place in rows]
            scales = torch.tensor(scale, dtype=part.dtype, device=part.device)[:, None]
            part /= scales
        if self._asks_each:
            for row, place in zip(part, rows, strict=True):
                result = self._processor.req_info[place](row)
                if result is not row:
                    row.copy_(result)
        else:
            whole = part.new_zeros((len(batch.members), part.shape[1]))
            whole[places] = part
            part = self._processor.apply(whole)[places]
        if self.is_scaled:
            part = part * scales  # vLLM divides it again
        logits[index] = part


class V1Processors(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """All of one engine, in their order; a subclass has their classes."""

    kinds: ClassVar[Sequence[type[Any]]]

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """HTTP 400 for what any of them refuses."""
        for kind in cls.kinds:
            kind.validate_params(sampling_params)

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        wrapped = [_Wrapped(kind(vllm_config, req_states.device, PIN_MEMORY)) for kind in self.kinds]
        self._scaled = [each for each in wrapped if each.is_scaled]
        self._unscaled = [each for each in wrapped if not each.is_scaled]
        self._batch = V1Batch()
        self._serves = False
        self._concerned: set[int] = set()  # slots
        self._ctx: Any = None  # of the rows that are sampled
        self._rows: dict[int, int] = {}  # of these, by place

    @property
    def after_temperature(self) -> list[ScaledProcessors]:
        """What comes behind all other processors."""
        return [ScaledProcessors(self)] if self._scaled else []

    def serve(self) -> None:
        """Requests have been made up so far, to warm up: V1 tells processors of none."""
        self._serves = True

    def take(self, slots: Mapping[str, int], new: Sequence[Any]) -> None:
        """Before each step; see `V1Batch.change`."""
        update = self._batch.change(slots, new) if self._serves else None
        if update is None:
            return
        wrapped = [*self._unscaled, *self._scaled]
        for each in wrapped:
            each.take(update, self._batch)
        self._concerned = set().union(*(each.under for each in wrapped))

    def is_under(self, slot: int) -> bool:
        """Whether the request in a slot concerns any of them."""
        return slot in self._concerned

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Not known yet: `take` has the request's text too."""
        return False

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See vLLM's: each request's rows stand behind each other, a chain. Its last row is changed, no other."""
        return self._apply(self._unscaled, logits, ctx)

    def apply_scaled(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The same of those that V1 has behind temperatures."""
        return self._apply(self._scaled, logits, ctx)

    def _apply(self, wrapped: Sequence[_Wrapped], logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        if ctx is not self._ctx:
            self._ctx, self._rows = ctx, {}
            if not self._concerned.isdisjoint(ctx.idx_mapping_np.tolist()):
                self._rows = self._batch.grow(ctx, self._concerned)
                for each in (*self._unscaled, *self._scaled):
                    each.catch_up()
        for each in wrapped:
            slots = self._batch.members
            rows = {place: row for place, row in self._rows.items() if slots[place].slot in each.under}
            if rows:
                each.apply(logits, rows, self._batch)
        return logits


class ScaledProcessors(LogitsProcessor):  # type: ignore[misc]
    """Those of `V1Processors` that do not change which logit is the highest."""

    def __init__(self, all_of_them: V1Processors) -> None:
        self._all = all_of_them

    def is_under(self, slot: int) -> bool:
        """See `V1Processors`."""
        return self._all.is_under(slot)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """See `V1Processors`."""
        return False

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See `V1Processors`."""
        return self._all.apply_scaled(logits, ctx)


class _Configured:
    """Subclasses of `V1Processors` by attribute: ``x`` and the names of their classes as JSON in hexadecimal."""

    def __init__(self) -> None:
        self._made: dict[str, type[Any]] = {}

    def __getattr__(self, name: str) -> type[Any]:
        if not name.startswith("x"):
            raise AttributeError(name)
        if name not in self._made:
            kinds = [load(each) for each in json.loads(bytes.fromhex(name[1:]))]
            self._made[name] = type(V1Processors.__name__, (V1Processors,), {"kinds": kinds})
        return self._made[name]


configured = _Configured()


def name_of(classes: Sequence[str]) -> str:
    """What to put in ``logits_processors``, which vLLM loads in its own processes.

    Args:
        classes: as vLLM has them, ``module:name``.
    """
    return f"{__name__}:configured.x{json.dumps(list(classes)).encode().hex()}"


def names_in(entries: Sequence[Any]) -> list[str]:
    """The names that one of a list's entries was made of by `name_of`."""
    prefix = f"{__name__}:configured.x"
    (own,) = (each for each in entries if isinstance(each, str) and each.startswith(prefix))
    names: list[str] = json.loads(bytes.fromhex(own.removeprefix(prefix)))
    return names


def load(name: str) -> Any:
    """The class that a name in ``logits_processors`` is for."""
    module, _, path = name.partition(":")
    with guard_cuda_initialization():
        found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
