# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext bench``: every method on a real engine of its own, side by side, turn by turn.

All methods of a batch size are started together and take turns of a few prompts, so that a slow minute of the
machine hits all of them; each batch size gets fresh engines, so that a method that learns has not
seen the prompts before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import Any

from vllm_ext.bench.engine import SETTLE_LIMIT_S, EncodedPrompt, Engine, chat_token_ids, check_engines, settle
from vllm_ext.bench.settings import PLAIN, Settings
from vllm_ext.bench.stats import TIE_TOLERANCE, Divergence, first_difference, summarise
from vllm_ext.compat.vllm_log import hide_vllm_log
from vllm_ext.data.prompts import Prompt, evenly_spaced, load_prompts, rounds_of, turns_of


@dataclass
class Report:
    """What came out."""

    dtype: str = ""  # resolved
    runs: list[dict[str, Any]] = field(default_factory=list)  # of the JSON
    wrong: list[str] = field(default_factory=list)  # one line for each wrong divergence
    notices: list[str] = field(default_factory=list)


# Called with what begins now, units of work done, and units in all.
Progress = Callable[[str, int, int], None]


def run(settings: Settings, progress: Progress = lambda what, done, total: None) -> Report:
    """Run the whole comparison.

    Raises:
        ValueError: prompts, methods or options that cannot be used; raised before any engine starts.
        EngineError: an engine did not start, or died. No engine is left running.
    """
    set_environment(settings.verbose)
    report = Report()
    prompts = encode_prompts(settings, report.notices)
    plan = rounds_of(len(prompts), settings.rounds, settings.workload)
    turns = {size: [turns_of(members, size) for members in plan] for size in settings.batch_sizes}
    progress("checking all arguments", 0, 0)
    check_engines(settings)
    begun = count()
    total = len(settings.methods) * sum(1 + sum(map(len, of_size)) for of_size in turns.values())
    for batch_size in settings.batch_sizes:
        if (fewest := min(map(len, plan))) < batch_size:
            report.notices.append(
                f"batch size {batch_size}: a round has only {fewest} prompts, the batch never fills"
            )

        def begin(what: str, prefix: str = f"batch {batch_size}: ") -> None:
            progress(prefix + what, next(begun), total)

        with ExitStack() as stack:
            engines: list[Engine] = []
            for method in settings.methods:
                begin(f"starting {method.label}")
                engines.append(Engine(settings, method, batch_size))
                stack.callback(engines[-1].shutdown)
                engines[-1].warm_up()
            for number, parts in enumerate(turns[batch_size], 1):
                for engine in engines:
                    engine.begin_round()
                for turn, members in enumerate(parts):
                    first = (number + turn - 1) % len(engines)
                    for engine in engines[first:] + engines[:first]:
                        begin(f"round {number} of {len(plan)}, {engine.method.label}")
                        if not settle():
                            report.notices.append(
                                f"batch size {batch_size}, round {number}, {engine.method.label}: "
                                f"other engines still used the CPU after {SETTLE_LIMIT_S:.0f} s"
                            )
                        engine.answer([(index, prompts[index]) for index in members])
            _compare(engines, prompts, report, drawn=settings.temperature > 0.0)
    return report


def _compare(
    engines: Sequence[Engine], prompts: Sequence[EncodedPrompt], report: Report, drawn: bool
) -> None:
    """Add the figures of one batch size to the report, and the output check of answers that were not drawn."""
    plain = next(engine for engine in engines if engine.method.name == PLAIN)
    report.dtype = plain.dtype
    tolerance = TIE_TOLERANCE.get(plain.dtype, 0.0)
    for engine in engines:
        found = None if drawn else _divergences(engine, plain, prompts)
        run = summarise(engine.method, engine.batch_size, engine.rounds, plain.rounds, found, tolerance)
        report.runs.append(run)
        report.wrong += [f"{run['label']}, batch size {run['batch_size']}: {line}" for line in run["wrong"]]


def _divergences(engine: Engine, plain: Engine, prompts: Sequence[EncodedPrompt]) -> list[Divergence]:
    """Where the engine's answers leave plain's, with plain's view of the first differing token."""
    found = []
    for ours, theirs in zip(engine.rounds, plain.rounds, strict=True):
        plain_tokens = {answer.prompt: answer.token_ids for answer in theirs.answers}
        for answer in ours.answers:
            expected = plain_tokens[answer.prompt]
            position = first_difference(expected, answer.token_ids)
            if position is None:
                continue
            prompt = prompts[answer.prompt]
            divergence = Divergence(
                prompt=answer.prompt,
                source=prompt.source,
                position=position,
                plain_token=next(iter(expected[position:]), None),
                method_token=next(iter(answer.token_ids[position:]), None),
                preferred_token=None,
                gap=inf,
                top_gap=inf,
            )
            if divergence.plain_token is not None and divergence.method_token is not None:
                top = plain.top_logprobs(prompt.token_ids + expected[:position], position > 0)
                (first_token, first), (_, second) = list(top.items())[:2]
                divergence = replace(
                    divergence,
                    preferred_token=first_token,
                    gap=first - top.get(divergence.method_token, -inf),
                    top_gap=first - second,
                )
            found.append(divergence)
    return found


def encode_prompts(settings: Settings, notices: list[str]) -> list[EncodedPrompt]:
    """Load, tokenize and select the prompts."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model={settings.model!r}: no tokenizer ({error}); give a model folder or id."
        ) from error
    if tokenizer.chat_template is None:
        notices.append(f"{settings.model} has no chat template: prompts go in as plain text")
    loaded: list[Prompt] = load_prompts(settings.prompt_files)
    encoded = [
        EncodedPrompt(prompt.source, prompt.category, chat_token_ids(tokenizer, prompt.messages))
        for prompt in loaded
    ]
    room_tokens = settings.max_model_len - settings.max_tokens
    fitting = [prompt for prompt in encoded if len(prompt.token_ids) <= room_tokens]
    if skipped := len(encoded) - len(fitting):
        notices.append(
            f"skipped {skipped} of {len(encoded)} prompts: longer than {room_tokens} tokens "
            "(--max-model-len minus --max-tokens)"
        )
    if not fitting:
        raise ValueError(
            f"--max-model-len={settings.max_model_len} leaves {room_tokens} tokens for a prompt "
            "and none fits; raise it or lower --max-tokens."
        )
    return evenly_spaced(fitting, settings.limit)


def set_environment(verbose: bool) -> None:
    """Before vLLM is imported: it reads these once. What the user has set stays."""
    if not verbose:
        hide_vllm_log()
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the engines' processes
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of vLLM's part in C++, on a CPU
    # This process has threads from the first engine on; a fork could inherit a held lock.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
