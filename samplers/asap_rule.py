# SPDX-License-Identifier: Apache-2.0
"""Rule asap: answers under a grammar that have the model's own law given that it obeys, better with each answer.

What was learnt of a prompt under a grammar is shared by all its answers, and survives restarts where a folder is given
for it; `asap.py` has the paper. It is the one rule that keeps what makes a difference: the law of an answer is that of
what was seen before.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator

from vllm_ext.kernels.learned_arrays import Learned, check_array, check_names
from vllm_ext.kernels.token_mask import keep_tokens
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.samplers import grammar
from vllm_ext.samplers.asap import ENTRY_BYTES, ExpectedFuture
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


class AsapOptions(RuleOptions):
    """Of the server."""

    memory_mb: int = Field(
        default=256,
        ge=1,
        le=1 << 20,
        description="most memory for what is learnt; of what was not asked for longest it is forgotten",
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


# Whose answers share what is learnt: prompt, kind of grammar, grammar, temperature, end token.
Key = tuple[tuple[int, ...], str, str, float, int]


class AsapRule(LearningRule):
    """Weighs tokens by what is known of where they lead."""

    alone = True
    summary = "answers under a grammar, in proportion to the model's own odds"
    paper = "arXiv 2405.21047"
    Options = AsapOptions
    Params = AsapParams

    def __init__(self, options: AsapOptions, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._max_entries = options.memory_mb * (1 << 20) // ENTRY_BYTES
        self._grammars = grammar.Grammars(vocabulary)
        self._futures: OrderedDict[Key, ExpectedFuture] = OrderedDict()  # the least recently used first

    @classmethod
    def from_options(cls, options: AsapOptions, vocabulary: Vocabulary) -> AsapRule:
        """See the base class."""
        return cls(options, vocabulary)

    def warm_up(self) -> None:
        """See the base class."""
        self._grammars.warm_up()

    @classmethod
    def problem(cls, options: AsapOptions, params: AsapParams, asked: Asked) -> str | None:
        """See the base class."""
        if asked.temperature == 0.0:
            return "temperature=0 does not go with asap, which says how answers are sampled; give one above 0"
        return grammar.problem(asked, "asap")

    @classmethod
    def grammar(cls, params: AsapParams) -> tuple[Kind, str] | None:
        """See the base class."""
        return grammar.grammar_of(params, "asap")

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class; learns from each row."""
        with self.lock:
            for place, row in enumerate(rows):
                if row.end not in row.output:
                    self._apply(logits, place, row)
            if self.touch is not None:
                self.touch()

    def _apply(self, logits: torch.Tensor, place: int, row: Row) -> None:
        given = grammar.grammar_of(row.params, "asap")
        assert given is not None
        temperature = row.asked.temperature
        behind = self._grammars.behind(*given, row.end, row.output)
        ids = np.empty(0, dtype=np.int32) if behind is None else behind.allowed()
        p = (logits[place].double() / temperature).softmax(0).cpu().numpy()[ids]
        future = self._future((tuple(row.prompt), *given, temperature, row.end))
        chances = future.chances(row.output, ids, p)
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

    def _future(self, key: Key) -> ExpectedFuture:
        if key not in self._futures:
            self._futures[key] = ExpectedFuture(self._max_entries)
        self._futures.move_to_end(key)
        return self._futures[key]

    def _forget(self) -> None:
        while len(self._futures) > 1 and sum(map(len, self._futures.values())) > self._max_entries:
            self._futures.popitem(last=False)

    def constraint(self, row: Row) -> Constraint | None:
        """See the base class."""
        given = grammar.grammar_of(row.params, "asap")
        assert given is not None
        behind = self._grammars.behind(*given, row.end, row.output)
        return None if behind is None else behind.fork()

    def learned(self) -> dict[str, Learned]:
        """See the base class."""
        keys = np.frombuffer(json.dumps(list(self._futures)).encode(), dtype=np.uint8).copy()
        arrays = {"keys": keys}
        for number, future in enumerate(self._futures.values()):
            arrays |= {f"{number}.{name}": array for name, array in future.learned().items()}
        return arrays

    def restore(self, arrays: Mapping[str, Learned]) -> None:
        """See the base class."""
        if "keys" not in arrays:
            raise ValueError("keys is missing")
        check_array("keys", arrays["keys"], (None,), np.uint8, 0, 255)
        keys = [_key(given) for given in json.loads(arrays["keys"].tobytes())]
        names = [f"{number}.{name}" for number in range(len(keys)) for name in ExpectedFuture.ARRAYS]
        check_names(arrays, ["keys", *names])
        futures = OrderedDict()
        for number, key in enumerate(keys):
            its = {name: arrays[f"{number}.{name}"] for name in ExpectedFuture.ARRAYS}
            futures[key] = ExpectedFuture.restored(self._max_entries, its, self._vocabulary.size)
        self._futures = futures
        self._forget()


def _key(given: Any) -> Key:
    prompt, kind, source, temperature, end = given
    if kind not in grammar.KINDS or not isinstance(source, str) or not math.isfinite(temperature):
        raise ValueError(f"keys has {given!r}")
    return tuple(map(int, prompt)), kind, source, float(temperature), int(end)
