# SPDX-License-Identifier: Apache-2.0
"""A model of the zoo with a method beside plain vLLM: whether trees were verified, and whether tokens are plain's.

Prompts are shorter and longer than windows, or have images; requests are greedy and seeded, come again with their
prefix in the cache, and lose their blocks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tiny_qwen_vl
import zoo
from conftest import engine
from helpers import preemptions
from v2_requests import counters, sampling

Got = Literal["trees", "chains", "refused"]

# What both tests and the record ask of each model, and what the record asks where it applies.
METHODS: dict[str, dict[str, Any]] = {
    "token_recycling": {},
    "hybrid": {"drafters": ["token_recycling", "suffix_tree"]},
}
BY_MODELS: dict[str, dict[str, Any]] = {
    "dyspec": {"model": "self", "self_layers": 3},
    "layerskip": {"exit_layer": 3, "width": 3},
}
NODES = 12
ENGINE: dict[str, Any] = {
    "max_model_len": 448,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
}
FEW_BLOCKS = 22  # for five requests: some are preempted
ROUNDS = 2  # the second time with prefixes in the cache
# Drafts accepted by a step; fewer, and a wrong mask could go unseen. Models that draft are random, and seldom right.
LEAST_ACCEPTED, LEAST_BY_MODELS = 0.3, 0.05
# How ours begin: before there is an engine, or as vLLM hands on what a worker says.
REFUSAL = re.compile(r"(?:^|Worker failed with error ')(speculative[ _].*?)(?:', please check|$)", re.DOTALL)

NAMES = (*zoo.MODELS, *tiny_qwen_vl.NAMES)
ABOUT = {**zoo.ABOUT, **tiny_qwen_vl.ABOUT}
PROMPTS = [random.Random(n).choices(range(3, zoo.LIKELY), k=n) for n in (12, 40, 100, 300, 350)]
KINDS = [
    sampling(max_tokens=60),
    sampling(max_tokens=80, temperature=0.8, seed=3),
    sampling(max_tokens=60, temperature=1.2, seed=4, repetition_penalty=1.1),
    sampling(max_tokens=70),
    sampling(max_tokens=80, temperature=0.6, seed=5, logprobs=1),
]


@dataclass
class Plain:
    """What vLLM answers without us: all at once, then each alone."""

    together: list[list[int]]
    alone: list[list[int]]


@dataclass
class Outcome:
    """What became of a model with a method."""

    method: str
    got: Got
    reason: str | None  # why not trees
    rounds: list[list[list[int]]] = field(default_factory=list)  # answers
    totals: dict[str, int] = field(default_factory=dict)  # the worker's counters
    preemptions: int = 0

    @property
    def accepted_enough(self) -> bool:
        """Whether the comparison says something."""
        least = LEAST_BY_MODELS if self.method in BY_MODELS else LEAST_ACCEPTED
        return self.totals["spec_accepted_tokens"] > least * self.totals["spec_steps"]


class Zoo:
    """Checkpoints by name, made when they are asked for.

    Args:
        tokenizer: folder of the model whose tokenizer all have.
        folder: where they are made.
    """

    def __init__(self, tokenizer: str, folder: Path) -> None:
        self._tokenizer, self._folder = Path(tokenizer), folder
        self._made: dict[str, str] = {}

    def checkpoint(self, name: str) -> str:
        """The folder of a model."""
        if name not in self._made:
            folder = self._folder / name
            folder.mkdir()
            module = zoo if name in zoo.MODELS else tiny_qwen_vl
            self._made[name] = module.write(name, self._tokenizer, folder)
        return self._made[name]

    def options(self, method: str) -> dict[str, Any]:
        """vLLM's ``speculative_config`` for a method: a budget that no clock moves."""
        options = {"num_speculative_tokens": NODES, "budget": "fixed"}
        return {"method": method, **options, **{**METHODS, **BY_MODELS}[method]}


def plain(models: Zoo, name: str) -> Plain:
    """The answers of plain vLLM."""
    for llm in _engine(models, name):
        together = answers(llm, name)
        alone = [answers(llm, name, [place])[0] for place in range(len(KINDS))]
    return Plain(together, alone)


def compare(models: Zoo, name: str, method: str) -> Outcome:
    """A model with a method."""
    few = {"num_gpu_blocks_override": FEW_BLOCKS, **_options(name)}["num_gpu_blocks_override"]
    # Layers that draft have blocks too.
    blocks = few * 2 if method in BY_MODELS else few
    running = _engine(models, name, models.options(method), num_gpu_blocks_override=blocks)
    try:
        llm = next(running)
    except (ValueError, RuntimeError) as error:
        refusal = REFUSAL.search(str(error))
        if refusal is None:
            raise
        return Outcome(method, "refused", refusal[1].replace(models.checkpoint(name), name))
    try:
        return _outcome(llm, name, method)
    finally:
        next(running, None)  # ends it


def answers(llm: Any, name: str, places: Sequence[int] = range(len(KINDS))) -> list[list[int]]:
    """To the requests of these places, all at once."""
    if name in zoo.MODELS:
        prompts: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    else:
        prompts = tiny_qwen_vl.prompts(llm.get_tokenizer())
    asked = [prompts[place] for place in places]
    outputs = llm.generate(asked, [KINDS[place] for place in places], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _options(name: str) -> dict[str, Any]:
    """Of a model's engines."""
    return {**ENGINE, **(zoo.OPTIONS.get(name, {}) if name in zoo.MODELS else tiny_qwen_vl.OPTIONS)}


def _engine(models: Zoo, name: str, method: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    environment = None if name in zoo.MODELS else tiny_qwen_vl.ENVIRONMENT
    return engine(models.checkpoint(name), method, environment=environment, **{**_options(name), **options})


def _outcome(llm: Any, name: str, method: str) -> Outcome:
    (reason,) = llm.collective_rpc(_chain_reason)
    rounds = [answers(llm, name) for _ in range(ROUNDS)]
    totals = counters(llm)
    assert totals["fallbacks:proposer_error"] == 0
    assert (totals["fallbacks:model_chain"] > 0) == (reason is not None)
    return Outcome(method, "trees" if reason is None else "chains", reason, rounds, totals, preemptions(llm))


def _chain_reason(worker: Any) -> str | None:
    """Sent to the worker: why its drafts are chains."""
    reason: str | None = worker.model_runner.drafter.chain_reason
    return reason


def num_identical(expected: Sequence[Sequence[int]], rounds: Sequence[Sequence[Sequence[int]]]) -> int:
    """How many answers are token for token what they should be, of all rounds."""
    return sum(list(a) == list(b) for answers in rounds for a, b in zip(expected, answers, strict=True))
