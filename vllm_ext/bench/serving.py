# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext bench`` over HTTP: methods on real servers, under real load, in turns.

Each method has a ``vllm serve`` of its own, or one that is running already. All are started together and take turns of
the same prompts, so that a slow minute of the machine hits all; no prompt comes twice, so that a method that learns has
not seen it before.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from vllm_ext.bench.engine import CPU_KV_CACHE_BYTES, EncodedPrompt, check_engines
from vllm_ext.bench.load import Load, Target, Turn, drive
from vllm_ext.bench.local_server import LocalServer, wait_until_ready
from vllm_ext.bench.serving_stats import LIMITS, summarise
from vllm_ext.bench.settings import PLAIN, Settings, own_state, split_outside_brackets
from vllm_ext.bench.side_by_side import encode_prompts, set_environment
from vllm_ext.data.prompts import turns_of

SERVED_NAME = "bench"
WARM_UP_REQUESTS = 2  # for each in flight

# Called with what begins now, units of work done, and units in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ServingSettings:
    """What to compare on what, under which load."""

    base: Settings  # model, prompts, methods, lengths, rounds
    loads: tuple[Load, ...]
    urls: tuple[
        tuple[str, str], ...
    ] = ()  # labels and addresses of running servers; empty: start one for each method
    input_tokens: int | None = None  # None: prompts as they are
    fixed_output: bool = False  # answers go on after their end, to `max_tokens`
    limits_ms: dict[str, float] = field(default_factory=dict)
    serve_args: tuple[str, ...] = ()  # further arguments of `vllm serve`


@dataclass
class ServingReport:
    """What came out."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def parse_loads(concurrency: str | None, request_rate: str | None) -> tuple[Load, ...]:
    """``1,8,32`` and ``0.5,2`` -> loads; a single concurrency is the ceiling of requests that come at a rate.

    Raises:
        ValueError: anything but positive numbers, each once; several of both.
    """
    flying = _numbers("--concurrency", concurrency, int)
    rates = _numbers("--request-rate", request_rate, float)
    if len(flying) > 1 and rates:
        raise ValueError(
            f"--concurrency={concurrency!r} with --request-rate={request_rate!r}: next to rates, a concurrency is the "
            "most requests in flight, one number; give one, or no rate."
        )
    if rates:
        return tuple(Load(next(iter(flying), None), rate) for rate in rates)
    return tuple(Load(number) for number in flying)


def _numbers(option: str, text: str | None, kind: type[Any]) -> list[Any]:
    if text is None:
        return []
    try:
        numbers = [kind(item) for item in text.split(",")]
    except ValueError:
        numbers = []
    if (
        not numbers
        or not all(0 < number < float("inf") for number in numbers)
        or len(set(numbers)) < len(numbers)
    ):
        what = "positive integers, each once: 1,8,32" if kind is int else "positive numbers, each once: 0.5,2"
        raise ValueError(f"{option}={text!r} is not allowed; allowed: {what}.")
    return numbers


def parse_urls(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """``plain=http://host:8000`` -> label and address; one without a label is called by its address.

    Raises:
        ValueError: no http address; a label given twice.
    """
    found = []
    for text in texts:
        label, equals, url = text.partition("=")
        if not equals or "://" in label:
            label, url = text.partition("://")[2].rstrip("/"), text
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url={text!r} is not allowed; allowed: LABEL=http://host:port.")
        found.append((label, url.rstrip("/").removesuffix("/v1")))
    labels = [label for label, _ in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(
            f"--url: {', '.join(twice)} is given more than once; give each server its own label."
        )
    return tuple(found)


def parse_limits(text: str | None) -> dict[str, float]:
    """``ttft:500,tpot:50`` -> milliseconds by name.

    Raises:
        ValueError: another name, or no positive number.
    """
    limits = {}
    for item in split_outside_brackets(text or ""):
        name, _, value = item.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in LIMITS or not 0 < limits[name] < float("inf"):
            raise ValueError(
                f"--goodput={text!r} is not allowed; allowed: {', '.join(f'{each}:MS' for each in LIMITS)}, "
                "separated by commas."
            )
    return limits


def run_serving(
    settings: ServingSettings, progress: Progress = lambda what, done, total: None
) -> ServingReport:
    """Run the whole comparison.

    Raises:
        ValueError: prompts or methods that cannot be used; before any server starts.
        RuntimeError: a server did not start, died, or answers nothing.
    """
    set_environment(settings.base.verbose)
    report = ServingReport()
    if not settings.urls:
        most = max(load.concurrency or 0 for load in settings.loads) or 1
        check_engines(replace(settings.base, batch_sizes=(most,)))
    prompts = encode_prompts(settings.base, report.notices)
    if settings.input_tokens is not None:
        prompts = of_length(prompts, settings.input_tokens)
    plan = deal(len(prompts), settings.loads, settings.base.rounds, report.notices)
    labels = [label for label, _ in settings.urls] or [method.label for method in settings.base.methods]
    units = len(labels) * (1 + sum(len(turns) for of_load in plan for turns in of_load))
    begun = count()
    with ExitStack() as stack:
        targets = _targets(settings, stack, lambda what: progress(what, next(begun), units))
        for number, (load, of_load) in enumerate(zip(settings.loads, plan, strict=True)):
            _warm_up(targets, prompts, load)
            rounds: dict[str, list[list[Turn]]] = {label: [[] for _ in of_load] for label in labels}
            for place, turns in enumerate(of_load):
                for turn, members in enumerate(turns):
                    first = (place + turn) % len(labels)
                    for label in labels[first:] + labels[:first]:
                        progress(f"{load}: round {place + 1} of {len(of_load)}, {label}", next(begun), units)
                        asked = [(index, prompts[index].token_ids) for index in members]
                        seed = hash((number, place, turn))
                        rounds[label][place].append(_driven(targets, label, asked, load, seed))
            compared = settings.base.temperature == 0.0
            base = rounds.get(PLAIN) or rounds[labels[0]]
            report.rows += [
                summarise(label, load, rounds[label], base, settings.limits_ms, compared) for label in labels
            ]
    for row in report.rows:
        if row["errors"]:
            report.notices.append(
                f"{row['label']}: {len(row['errors'])} requests failed, first: {row['errors'][0].splitlines()[-1]}"
            )
    return report


def _driven(
    targets: dict[str, Target], label: str, asked: Sequence[tuple[int, list[int]]], load: Load, seed: int
) -> Turn:
    try:
        turn = drive(targets[label], asked, load, seed)
    except OSError as error:
        raise RuntimeError(
            f"{label}: the server at {targets[label].url} does not answer ({error})"
        ) from error
    if not turn.replies:
        raise RuntimeError(f"{label}: the server answered no request: {turn.errors[0].splitlines()[-1]}")
    return turn


def deal(
    num_prompts: int, loads: Sequence[Load], rounds: int, notices: list[str]
) -> list[list[list[Sequence[int]]]]:
    """The prompts of each load, round and turn, each prompt once; loads with more in flight get more.

    Raises:
        ValueError: a load would have a round without a prompt.
    """
    weights = [load.concurrency or 8 for load in loads]
    # A load of 1 needs a few prompts too, or its figures are of nothing.
    shares = [max(weight, 4) for weight in weights]
    plan, first = [], 0.0
    for load, share, weight in zip(loads, shares, weights, strict=True):
        last = first + num_prompts * share / sum(shares)
        members = range(round(first), round(last))
        first = last
        if len(members) < rounds:
            raise ValueError(
                f"--prompts: {load} gets {len(members)} of {num_prompts} prompts, for --rounds={rounds}; lower "
                "--rounds, or give more prompts."
            )
        if len(members) < rounds * weight and load.rate is None:
            notices.append(
                f"{load}: a round has only {len(members) // rounds} prompts, the server is never full; give more"
            )
        plan.append([turns_of(members[place::rounds], weight) for place in range(rounds)])
    return plan


def of_length(prompts: Sequence[EncodedPrompt], input_tokens: int) -> list[EncodedPrompt]:
    """Prompts of exactly so many tokens: text of others ahead of each, or its own beginning left out."""
    texts = [prompt.token_ids for prompt in prompts]
    made = []
    for place, prompt in enumerate(prompts):
        token_ids, other = list(prompt.token_ids), place
        while len(token_ids) < input_tokens:
            other = (other + 1) % len(texts)
            token_ids = texts[other] + token_ids
        made.append(EncodedPrompt(prompt.source, prompt.category, token_ids[-input_tokens:]))
    return made


def _targets(settings: ServingSettings, stack: ExitStack, begin: Callable[[str], None]) -> dict[str, Target]:
    base = settings.base
    asked = (base.max_tokens, base.temperature, settings.fixed_output)
    if settings.urls:
        found = {}
        for label, url in settings.urls:
            begin(f"asking {label}")
            found[label] = Target(url, _served_model(label, url), *asked)
        return found
    servers = []
    for method in base.methods:
        begin(f"starting {method.label}")
        config = stack.enter_context(own_state(method)).speculative_config
        server = LocalServer(method.label, base.model, serve_arguments(settings), config)
        servers.append(stack.enter_context(server))
        # One after the other: starting takes the whole machine.
        for _ in wait_until_ready([server]):
            pass
    return {server.label: Target(server.url, SERVED_NAME, *asked) for server in servers}


def serve_arguments(settings: ServingSettings) -> list[str]:
    """Of ``vllm serve``, the same for all methods."""
    from vllm.platforms import current_platform

    base = settings.base
    on_cpu = current_platform.is_cpu()
    most = max(load.concurrency or 0 for load in settings.loads)
    arguments = [
        *("--served-model-name", SERVED_NAME, "--dtype", base.dtype, "--seed", "0"),
        *("--max-model-len", str(base.max_model_len)),
    ]
    if most and all(load.rate is None for load in settings.loads):
        arguments += ["--max-num-seqs", str(most)]
    if not (not on_cpu if base.compile is None else base.compile):
        arguments.append("--enforce-eager")
    if on_cpu or base.kv_cache_memory_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(base.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES)]
    else:
        # They share the device.
        arguments += ["--gpu-memory-utilization", f"{0.9 / len(base.methods):.3f}"]
    return [*arguments, *settings.serve_args]


def _served_model(label: str, url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            name: str = json.load(response)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        raise RuntimeError(f"--url: {label}: {url}/v1/models names no model ({error})") from error
    return name


def _warm_up(targets: dict[str, Target], prompts: Sequence[EncodedPrompt], load: Load) -> None:
    """One untimed batch of as many requests as will be in flight, of prompts turned around: text of no set."""
    number = WARM_UP_REQUESTS * (load.concurrency or 8)
    asked = [(-1, prompts[place % len(prompts)].token_ids[::-1]) for place in range(number)]
    for label, target in targets.items():
        short = Target(target.url, target.model, min(32, target.max_tokens), 0.0, True)
        _driven({label: short}, label, asked, Load(load.concurrency or 8), 0)
