# SPDX-License-Identifier: Apache-2.0
"""Rule asap: answers under a grammar that have the model's own law given that it obeys, better with each answer.

What an answer teaches of a prompt under a grammar is shared by all its answers, and survives restarts where a folder is
given for it; `asap.py` has the paper. It is the one rule that keeps what makes a difference: the law of an answer is
that of what was seen before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator

from vllm_ext.kernels.learned_arrays import Learned, check_array, check_names
from vllm_ext.kernels.sparse import Int32
from vllm_ext.kernels.token_mask import keep_tokens
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.samplers import grammar
from vllm_ext.samplers.asap import ExpectedFuture
from vllm_ext.samplers.base import (
    Asked,
    Constraint,
    Kind,
    LearningRule,
    Row,
    RuleOptions,
    RuleParams,
    Vocabulary,
)
from vllm_ext.samplers.kept import digest

KEY_BYTES = len(digest())


class AsapOptions(RuleOptions):
    compile_seconds: float = grammar.COMPILE_SECONDS
    memory_mb: int = Field(
        default=256,
        ge=1,
        le=1 << 20,
        description="most memory for what is learnt, compiled grammars among it; what was not asked for longest is "
        "forgotten",
    )
    state_dir: UserPath | None = Field(
        default=None,
        min_length=1,
        description="folder where what is learnt is kept over restarts; none: it is forgotten",
    )
    state_interval_minutes: float = Field(
        default=10.0,
        ge=0.1,
        le=1440.0,
        description="how often it is saved while the server runs; also when it shuts down",
    )


class AsapParams(RuleParams):
    """Of a request; one of them."""

    asap_json: str | None = Field(default=None, min_length=1, description=grammar.KINDS["json"])
    asap_regex: str | None = Field(default=None, min_length=1, description=grammar.KINDS["regex"])
    asap_grammar: str | None = Field(default=None, min_length=1, description=grammar.KINDS["grammar"])

    _only_one = model_validator(mode="after")(grammar.only_one)


FUTURE_BYTES = 1_000  # of what is known of a prompt, besides its prefixes


class AsapRule(LearningRule):
    """Weighs tokens by what is known of where they lead."""

    alone = True
    waits = True
    summary = "answers under a grammar, by the model's own odds"
    paper = "arXiv 2405.21047"
    Options = AsapOptions
    Params = AsapParams
    example: ClassVar[Mapping[str, Any]] = {"asap_json": '{"type": "integer"}'}

    def __init__(self, options: AsapOptions, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        most = options.memory_mb << 20
        self._grammars = grammar.Grammars(vocabulary, most // 4, options.compile_seconds)
        self._max_bytes = most - most // 4
        # By digests of whose answers share what is learnt: prompt, kind of grammar, grammar, temperature, end token.
        self._futures: OrderedDict[bytes, ExpectedFuture] = OrderedDict()  # the least recently used first
        self._num_bytes = 0  # of them

    @classmethod
    def from_options(cls, options: AsapOptions, vocabulary: Vocabulary) -> AsapRule:
        return cls(options, vocabulary)

    def warm_up(self) -> None:
        self._grammars.warm_up()

    @classmethod
    def problem(cls, options: AsapOptions, params: AsapParams, asked: Asked) -> str | None:
        if asked.temperature == 0.0:
            return "temperature=0 does not go with asap, which says how answers are sampled; give one above 0"
        return grammar.problem(asked, "asap")

    @classmethod
    def grammar(cls, params: AsapParams) -> tuple[Kind, str] | None:
        return grammar.grammar_of(params, "asap")

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class; learns from each row."""
        waiting: list[int] = []
        patience = self.patience
        with self.lock:
            for place, row in enumerate(rows):
                if row.end in row.output:
                    continue
                found = self._grammars.of_row(row, "asap", patience)
                ids = None if found is None else found.mask(row.output, patience)
                if ids is None:
                    waiting.append(place)
                    patience = 0.0
                else:
                    self._apply(logits, place, row, ids)
            self.waiting = waiting
            if self.mark_dirty is not None:
                self.mark_dirty()

    def _apply(self, logits: torch.Tensor, place: int, row: Row, ids: Int32) -> None:
        given = grammar.grammar_of(row.params, "asap")
        assert given is not None
        temperature = row.asked.temperature
        p = (logits[place].double() / temperature).softmax(0).cpu().numpy()[ids]
        prompt = np.array(row.prompt, dtype=np.int64).tobytes()
        future = self._future(digest(prompt, *given, temperature, row.end))
        before = future.num_bytes
        chances = future.chances(row.output, ids, p)
        self._num_bytes += future.num_bytes - before
        self._forget()
        if not chances.any():  # a dead end's answer ends
            logits[place] = -torch.inf
            logits[place, row.end] = 0.0
            return
        # Where nothing is known it is plain masking, to the last bit.
        keep_tokens(logits, [place], [ids])
        with np.errstate(divide="ignore"):
            weights = torch.from_numpy(temperature * np.log(chances)).to(logits)
        logits[place, torch.from_numpy(ids).long().to(logits.device)] += weights

    def _future(self, key: bytes) -> ExpectedFuture:
        if key not in self._futures:
            self._futures[key] = ExpectedFuture(self._max_bytes - FUTURE_BYTES)
            self._num_bytes += FUTURE_BYTES
        self._futures.move_to_end(key)
        return self._futures[key]

    def _forget(self) -> None:
        while len(self._futures) > 1 and self._num_bytes > self._max_bytes:
            self._num_bytes -= FUTURE_BYTES + self._futures.popitem(last=False)[1].num_bytes

    @property
    def num_bytes(self) -> int:
        """Of all that is kept, compiled grammars among it."""
        return self._num_bytes + self._grammars.num_bytes

    def constraint(self, row: Row) -> Constraint | None:
        return self._grammars.constraint(row, "asap", self.patience)

    def state_dict(self) -> dict[str, Learned]:
        keys = np.frombuffer(b"".join(self._futures), dtype=np.uint8).reshape(-1, KEY_BYTES).copy()
        arrays = {"keys": keys}
        for number, future in enumerate(self._futures.values()):
            arrays |= {f"{number}.{name}": array for name, array in future.state_dict().items()}
        return arrays

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        if "keys" not in arrays:
            raise ValueError("keys is missing")
        check_array("keys", arrays["keys"], (None, KEY_BYTES), np.uint8, 0, 255)
        keys = [key.tobytes() for key in arrays["keys"]]
        if len(set(keys)) < len(keys):
            raise ValueError("keys has one twice")
        names = [f"{number}.{name}" for number in range(len(keys)) for name in ExpectedFuture.ARRAYS]
        check_names(arrays, ["keys", *names])
        futures = OrderedDict()
        for number, key in enumerate(keys):
            its = {name: arrays[f"{number}.{name}"] for name in ExpectedFuture.ARRAYS}
            futures[key] = ExpectedFuture.restored(self._max_bytes - FUTURE_BYTES, its, self._vocabulary.size)
        self._futures = futures
        self._num_bytes = sum(FUTURE_BYTES + future.num_bytes for future in futures.values())
        self._forget()
