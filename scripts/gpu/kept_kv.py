# SPDX-License-Identifier: Apache-2.0
"""Methods that keep some of a prompt's blocks, behind long prompts: what a step takes, and how many requests fit.

A run of its own, `--stages kv`: engines with room for long requests leave none for others'. Prompts are random tokens,
so nothing is said of answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapes import DRY, EIGHT_B

from vllm_ext.codecs.registry import CODECS, load_codec

if TYPE_CHECKING:
    from suite import Suite

GROUP = "kv"
KEPT = 1024  # tokens
CONTEXTS = (8192, 32768)
TOKENS = 256  # of an answer
MORE = 3  # times as many requests as vLLM's cache has room for


def run(suite: Suite) -> None:
    """Plain, and each method that V2 has, in turns."""
    contexts, kept, tokens = ((160,), 96, 8) if suite.dry else (CONTEXTS, KEPT, TOKENS)
    own: dict[str, Any] = {"max_model_len": max(contexts) + 2 * TOKENS, "kv_cache_bytes": 9 << 30}
    shape = replace(DRY, max_model_len=256) if suite.dry else replace(EIGHT_B, **own)
    suite.start(GROUP, shape, {"plain": None})
    for name in CODECS:
        codec = load_codec(name)
        if not codec.WHY_V1:
            size = "budget" if "budget" in codec.Options.model_fields else "window"
            given = {"method": name, size: kept}
            suite.start(GROUP, shape, {name: None}, additional_config={"vllm_ext": {"kv": given}})
    ready = suite.wait(GROUP)
    room = ready["plain"].ask("capacity")
    for context in contexts:
        fits = max(room // (context + tokens), 1)
        for turn in range(3):  # the first warms up
            for name, engine in ready.items():
                step = engine.ask("step_ms", context=context, batch=min(fits, 4), tokens=tokens // 4)
                if turn:
                    suite.results.add(
                        "kv step", method=name, context=context, batch=min(fits, 4), step_ms=step
                    )
        for name, engine in ready.items():
            many = engine.ask("crowd", context=context, num=MORE * fits, tokens=tokens)
            suite.results.add("kv crowd", method=name, context=context, fits=fits, **many)
