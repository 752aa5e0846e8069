# SPDX-License-Identifier: Apache-2.0
"""Learning the threshold of rule adadec: a model reads code in a real engine, and `adadec_threshold` does the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_ext.samplers.adadec import AdadecOptions
from vllm_ext.samplers.adadec_threshold import Bools, Floats, Told, check, check_told, learn, told
from vllm_ext.training.adadec_texts import Text

if TYPE_CHECKING:
    from vllm_ext.data.atomic_files import Progress

AT_ONCE = 16  # texts that the engine is given
HELD_OUT = 5  # one text of so many
DIGITS = 3  # of the threshold
DEFAULT: float = AdadecOptions().threshold


@dataclass(frozen=True)
class Read:
    """What the model said of one text's tokens that count."""

    entropy: Floats  # [count] nats
    first: Bools  # [count] whether the token has rank 1


@dataclass(frozen=True)
class Result:
    """What was learnt."""

    num_tokens: int
    num_held_out: int
    rank_1: float  # share of all tokens
    weight: float
    bias: float
    cut: float
    threshold: float
    learnt: Told  # on tokens held out
    default: Told  # the default threshold on the same


def engine_options(dtype: str, context: int, verbose: bool) -> dict[str, Any]:
    """Of vLLM's ``LLM``, which reads each text once, and puts out a token that nobody asked for."""
    from vllm.platforms import current_platform

    from vllm_ext.bench.engine import CPU_KV_CACHE_BYTES

    options: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": context + 1,
        "max_num_seqs": AT_ONCE,
        "enforce_eager": True,
        "enable_prefix_caching": False,  # what is in the cache is not computed
        "seed": 0,
        "use_tqdm_on_load": verbose,
        "worker_extension_cls": "vllm_ext.training.adadec_worker.EntropyReader",
    }
    if current_platform.is_cpu():
        options["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    return options


def check_engine(model: str, options: dict[str, Any]) -> None:
    """Let vLLM check the arguments; no engine is started.

    Raises:
        ValueError: naming the model, the field and the reason.
    """
    from vllm import EngineArgs

    from vllm_ext.bench.engine import reason

    try:
        config = EngineArgs(model=model, **options).create_engine_config()
    except Exception as error:
        raise ValueError(
            f"--model={model!r} with --dtype={options['dtype']} and --context={options['max_model_len'] - 1}: "
            f"{reason(error)}"
        ) from None
    if config.use_v2_model_runner:
        raise ValueError(
            f"VLLM_USE_V2_MODEL_RUNNER={os.environ.get('VLLM_USE_V2_MODEL_RUNNER')} is not allowed; allowed: unset or "
            "0, as rule adadec runs on V1 and is learnt there. Unset it for this command"
        )


def read(model: str, texts: Sequence[Text], options: dict[str, Any], report: Progress) -> list[Read]:
    """Have the model read the texts, in an engine that is started for it.

    Args:
        model: folder or Hugging Face id.
        texts: what is read.
        options: of the engine.
        report: progress in tokens that count.

    Raises:
        ValueError: the engine does not start, or the model's logits are no numbers.
    """
    from vllm_ext.data.answers import engine

    report("starting the engine", 0, 1)
    try:
        llm = engine(model, options)
    except Exception as error:
        raise ValueError(f"--model={model!r}: the engine did not start: {error}") from None
    report("starting the engine", 1, 1)
    try:
        made = read_by(llm, texts, report)
    finally:
        llm.llm_engine.engine_core.shutdown()
    if wrong := sum(int((~np.isfinite(each.entropy)).sum()) for each in made):
        raise ValueError(
            f"--dtype={options['dtype']} is not allowed: the model's logits are no numbers before {wrong:,} tokens of "
            f"{sum(text.count for text in texts):,}; allowed: what the model can do, bfloat16 or float32"
        )
    return made


def read_by(llm: Any, texts: Sequence[Text], report: Progress) -> list[Read]:
    """The same by an ``LLM`` whose workers have `adadec_worker.EntropyReader`, and without prefix caching."""
    from vllm import SamplingParams

    from vllm_ext.training.adadec_worker import ASKED

    total = sum(text.count for text in texts)
    found: dict[str, tuple[list[float], list[bool]]] = {}
    done = 0
    llm.collective_rpc("vllm_ext_adadec_read")
    report("reading", 0, total)
    for start in range(0, len(texts), AT_ONCE):
        part = texts[start : start + AT_ONCE]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=1,
                detokenize=False,
                extra_args={ASKED: [str(number), text.counts_from]},
            )
            for number, text in enumerate(part, start)
        ]
        llm.generate([{"prompt_token_ids": text.tokens} for text in part], params, use_tqdm=False)
        for of_rank in llm.collective_rpc("vllm_ext_adadec_read"):
            found.update(of_rank)
        done += sum(text.count for text in part)
        report("reading", done, total)
    rows = [found[str(number)] for number in range(len(texts))]
    return [Read(np.array(entropy, np.float32), np.array(first, np.bool_)) for entropy, first in rows]


def learn_from(texts: Sequence[Read]) -> Result:
    """The threshold, and how it does on one text of `HELD_OUT`, from which nothing is learnt.

    Raises:
        NotTold: the classes cannot be told apart.
    """
    held_out = _together(texts[HELD_OUT - 1 :: HELD_OUT])
    to_learn = _together([text for number, text in enumerate(texts, 1) if number % HELD_OUT])
    found = learn(to_learn.entropy, to_learn.first)
    check(held_out.first, "held out")
    threshold = round(found.threshold, DIGITS)
    on_these = told(held_out.entropy, held_out.first, threshold)
    check_told(on_these)
    everything = _together(texts)
    return Result(
        num_tokens=len(everything.first),
        num_held_out=len(held_out.first),
        rank_1=float(everything.first.mean()),
        weight=found.weight,
        bias=found.bias,
        cut=found.cut,
        threshold=threshold,
        learnt=on_these,
        default=told(held_out.entropy, held_out.first, DEFAULT),
    )


def _together(texts: Sequence[Read]) -> Read:
    if not texts:
        return Read(np.zeros(0, np.float32), np.zeros(0, np.bool_))
    return Read(
        np.concatenate([text.entropy for text in texts]), np.concatenate([text.first for text in texts])
    )
