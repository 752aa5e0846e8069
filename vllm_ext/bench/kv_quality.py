# SPDX-License-Identifier: Apache-2.0
"""What an encoded KV cache holds, what it costs in quality, and how fast it is read, beside vLLM's own.

One engine has vLLM's cache, others the encoded ones, each in the same memory. Quality is what a model says of each
token of a text when it reads those before it out of the cache: once of prompts, and once of their last tokens as
answers, given one by one, which is where methods lose that read less behind a prompt.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext.bench.divergence import Place, divergence, perplexity

TOP = 20  # likeliest tokens of a position that divergences are of
SPARE_TOKENS = 64  # that a request may have while others' prompts are read
SHUTDOWN_SECONDS = 30  # after which an engine is killed
NAMES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Cairo", "Perth", "Turin", "Lagos")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        text: of which windows are read.
        methods: what stands in ``additional_config["vllm_ext"]["kv"]``, for each engine.
        context: tokens of a window, and of the text around a pass key.
        windows: how many.
        answer: tokens at the end of a window that are also given as an answer to what is before them.
        keys: how many pass keys are hidden at each depth.
        decode_contexts: behind how many tokens decoding is timed.
        batch: requests that decode at once.
        decode_tokens: of each of them.
        rounds: of decoding, in turns with vLLM's cache, after one that warms up.
        fill: whether the whole cache is filled with requests.
        max_num_batched_tokens: of a step; None: vLLM's default. Under a window what a request needs at most is that
            and its window.
        block_size: tokens of a block of the cache; None: vLLM's default.
    """

    model: str
    text: str
    methods: Sequence[Mapping[str, Any]]
    context: int = 4096
    windows: int = 3
    answer: int = 256
    keys: int = 4
    decode_contexts: Sequence[int] = (1024, 7168)
    batch: int = 4
    decode_tokens: int = 32
    rounds: int = 3
    fill: bool = False
    dtype: str = "bfloat16"
    memory_bytes: int = 1 << 30
    max_num_batched_tokens: int | None = None
    block_size: int | None = None


Say = Callable[[str], None]


def measure(plan: Plan, say: Say) -> Iterator[dict[str, Any]]:
    """The figures, as JSON can have them: the same dictionary after each method.

    Args:
        plan: of what.
        say: is told what is under way.

    Raises:
        ValueError: the text is too short, or vLLM or ours refuses the settings.
    """
    say("vLLM's cache: loading")
    plain = _engine(plan, None)
    tokenizer = plain.get_tokenizer()
    tokens = tokenizer.encode(plan.text)
    windows = _windows(tokens, plan.context, plan.windows)
    hidden = _hidden_keys(tokenizer, tokens, plan)
    long = {num: _different(tokens, num, plan.batch) for num in plan.decode_contexts}
    say("vLLM's cache: reading")
    expected = [_read(plain, window, TOP) for window in windows]
    answers = _split(windows, plan)
    answered = _answer(plain, answers, TOP)
    own_keys = _find_keys(plain, hidden)
    report: dict[str, Any] = {
        "plain": {
            "capacity_tokens": capacity(plain),
            "bytes_per_token": _bytes_per_token(plain, None),
            "perplexity": perplexity(expected),
            "answers": {"perplexity": perplexity(answered)},
            "keys": own_keys,
        },
        "methods": [],
    }
    for method in plan.methods:
        name = ", ".join(f"{value}" if key == "method" else f"{key}={value}" for key, value in method.items())
        say(f"{name}: loading")
        encoded = _engine(plan, method)
        say(f"{name}: reading")
        found = [_read(encoded, window, TOP) for window in windows]
        given = _answer(encoded, answers, TOP)
        entry = {
            "method": dict(method),
            "label": name,
            "capacity_tokens": capacity(encoded),
            "capacity": capacity(encoded) / capacity(plain),
            "bytes_per_token": _bytes_per_token(encoded, method),
            "perplexity": perplexity(found),
            **divergence(expected, found),
            "answers": {"perplexity": perplexity(given), **divergence(answered, given)},
            "keys": _find_keys(encoded, hidden),
            "decode": [],
        }
        for num, prompts in long.items():
            say(f"{name}: decoding behind {num} tokens")
            ratios, steps = [], []
            for turn in range(plan.rounds + 1):
                theirs, ours = (decode_seconds(llm, prompts, plan.decode_tokens) for llm in (plain, encoded))
                if turn:  # the first warms up
                    ratios.append(theirs / ours)
                    steps.append(1e3 * ours / plan.decode_tokens)
            entry["decode"].append(
                {
                    "context": num,
                    "speed": statistics.median(ratios),
                    "speed_rounds": ratios,
                    "step_ms": statistics.median(steps),
                }
            )
        if plan.fill:
            say(f"{name}: filling the cache")
            entry["fill"] = _fill(encoded, tokens)
        report["methods"].append(entry)
        yield report
        encoded.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)
        del encoded
    plain.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)


def asked_of(plan: Plan) -> dict[str, Any]:
    """What `measure` asks, in tokens, for others to be asked the same: prompts and their answers, of windows and keys.

    Raises:
        ValueError: the text is too short.
    """
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(plan.model)
    tokens = tokenizer.encode(plan.text)
    keys = [
        {"depth": key.depth, "prompt": key.tokens[: -key.num_answer], "answer": key.tokens[-key.num_answer :]}
        for key in _hidden_keys(tokenizer, tokens, plan)
    ]
    return {"answers": _split(_windows(tokens, plan.context, plan.windows), plan), "keys": keys}


def _split(windows: Sequence[list[int]], plan: Plan) -> list[tuple[list[int], list[int]]]:
    """By window, what is given as a prompt, and as its answer."""
    return [(window[: -plan.answer], window[-plan.answer :]) for window in windows]


def _engine(plan: Plan, kv: Mapping[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        plan.model,
        dtype=plan.dtype,
        max_model_len=max([plan.context, *plan.decode_contexts]) + plan.decode_tokens + SPARE_TOKENS,
        max_num_seqs=64,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        kv_cache_memory_bytes=plan.memory_bytes,
        block_size=plan.block_size,
        disable_log_stats=False,
        logits_processors=["vllm_ext.bench.forced_decoding:ForcedTokens"],
        additional_config={} if kv is None else {"vllm_ext": {"kv": dict(kv)}},
    )


def capacity(llm: Any) -> int:
    """Tokens, as vLLM reports them at start-up."""
    return int(llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens)


def _bytes_per_token(llm: Any, kv: Mapping[str, Any] | None) -> float:
    """Of all layers, once a block is full."""
    from vllm_ext.config import kv_cache

    config = llm.llm_engine.vllm_config
    model = config.model_config
    head = model.get_head_size()
    of_head = 2 * head * model.dtype.itemsize
    if kv is not None:
        of_head = kv_cache.parse(kv).codec(config.cache_config.block_size, head).bytes_per_token
    heads = model.get_num_kv_heads(config.parallel_config)
    return float(of_head * heads * model.get_num_layers(config.parallel_config))


def _windows(tokens: Sequence[int], size: int, most: int) -> list[list[int]]:
    found = [list(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]
    if not found:
        raise ValueError(
            f"the text has {len(tokens)} tokens, fewer than the context of {size}; give more, or ask for less"
        )
    return found[:most]


def _different(tokens: Sequence[int], size: int, num: int) -> list[list[int]]:
    """So many prompts, none the beginning of another's."""
    found = (_windows(tokens, size, num) * num)[:num]
    return [[*each[i:], *each[:i]] for i, each in enumerate(found)]


def _read(llm: Any, tokens: Sequence[int], top: int) -> list[Place]:
    """Of each token behind the first."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top)
    (output,) = llm.generate([{"prompt_token_ids": list(tokens)}], asked, use_tqdm=False)
    return [
        Place(
            found[token].logprob, {each: value.logprob for each, value in found.items() if value.rank <= top}
        )
        for token, found in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    ]


def _answer(llm: Any, given: Sequence[tuple[Sequence[int], Sequence[int]]], top: int) -> list[list[Place]]:
    """Of each token of answers that are given, by prompt and answer; all at once."""
    from vllm import SamplingParams

    from vllm_ext.bench.forced_decoding import FORCED

    asked = [
        SamplingParams(
            temperature=0,
            max_tokens=len(answer),
            ignore_eos=True,
            logprobs=top,
            extra_args={FORCED: list(answer)},
        )
        for _, answer in given
    ]
    prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in given]
    places = []
    for output, (_, answer) in zip(llm.generate(prompts, asked, use_tqdm=False), given, strict=True):
        rows = output.outputs[0].logprobs
        places.append(
            [
                Place(
                    found[token].logprob,
                    {each: value.logprob for each, value in found.items() if value.rank <= top},
                )
                for token, found in zip(answer, rows, strict=True)
            ]
        )
    return places


@dataclass(frozen=True)
class HiddenKey:
    """A prompt that ends with a pass key it has said before."""

    depth: float
    tokens: list[int]
    num_answer: int


def _hidden_keys(tokenizer: Any, tokens: Sequence[int], plan: Plan) -> list[HiddenKey]:
    draw = random.Random(0)
    found = []
    for depth in DEPTHS:
        for i in range(plan.keys):
            name, number = NAMES[i % len(NAMES)], f"{draw.randrange(10**4, 10**5)}"
            said, asked, answer = (
                tokenizer.encode(text, add_special_tokens=False)
                for text in (
                    f"\n\nThe pass key of {name} is {number}. Remember it.\n\n",
                    f"\n\nWhat is the pass key of {name}? The pass key of {name} is",
                    f" {number}",
                )
            )
            room = plan.context - len(said) - len(asked)
            around = _different(tokens, room, plan.keys)[i]
            at = int(depth * room)
            whole = [*around[:at], *said, *around[at:], *asked, *answer]
            found.append(HiddenKey(depth, whole, len(answer)))
    return found


def _find_keys(llm: Any, hidden: Sequence[HiddenKey]) -> list[dict[str, float]]:
    """By depth: the part of keys that a greedy answer would say, and the mean log-probability of a key in nats."""
    rows = []
    given = [(key.tokens[: -key.num_answer], key.tokens[-key.num_answer :]) for key in hidden]
    answered = _answer(llm, given, 1)
    for depth in DEPTHS:
        places = [each for each, key in zip(answered, hidden, strict=True) if key.depth == depth]
        if not places:
            continue
        said = [all(place.log_prob >= max(place.likeliest.values()) for place in of_key) for of_key in places]
        total = [sum(place.log_prob for place in of_key) for of_key in places]
        rows.append({"depth": depth, "found": statistics.fmean(said), "log_prob": statistics.fmean(total)})
    return rows


def decode_seconds(llm: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Of so many steps, once all prompts (token ids) are read."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    asked = SamplingParams(temperature=0, max_tokens=num_tokens + SPARE_TOKENS, ignore_eos=True)
    names = [f"decode-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, asked)
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    began = time.perf_counter()
    for _ in range(num_tokens):
        engine.step()
    seconds = time.perf_counter() - began
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def _fill(llm: Any, tokens: Sequence[int]) -> dict[str, float]:
    """As many requests of the greatest length as vLLM says there is room for, at once."""
    config = llm.llm_engine.vllm_config
    longest = int(config.model_config.max_model_len)
    num = capacity(llm) // longest
    text = list(tokens) * (1 + longest // len(tokens) + 1)
    # The last tokens are decoded: none is done before the last prompt is read.
    left = min(32 + num * longest // config.scheduler_config.max_num_batched_tokens, longest // 2)
    starts = [37 * i % len(tokens) for i in range(num)]
    prompts = [text[at : at + longest - left] for at in starts]
    return {"requests": num, "tokens": num * longest, **serve(llm, prompts, left)}


def serve(llm: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
    """Answer prompts (token ids) that come at once with so many tokens each.

    Returns:
        how many finished, most that ran ``at_once``, most of the cache's ``usage`` (0 to 1), ``preemptions``, and
        ``seconds`` of all.
    """
    from vllm import SamplingParams

    engine, before = llm.llm_engine, _metric(llm, "vllm:num_preemptions")
    asked = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"serve-{i}", {"prompt_token_ids": list(prompt)}, asked)
    usage, running, finished = 0.0, 0.0, 0
    while engine.has_unfinished_requests():
        finished += sum(output.finished for output in engine.step())
        usage = max(usage, _metric(llm, "vllm:kv_cache_usage_perc"))
        running = max(running, _metric(llm, "vllm:num_requests_running"))
    return {
        "finished": finished,
        "at_once": running,
        "usage": usage,
        "preemptions": _metric(llm, "vllm:num_preemptions") - before,
        "seconds": time.perf_counter() - began,
    }


def _metric(llm: Any, name: str) -> float:
    return float(sum(metric.value for metric in llm.get_metrics() if metric.name == name))
