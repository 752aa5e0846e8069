# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, which answers what it is asked over a socket: `suite` starts several."""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

from vllm_ext.bench import kv_quality


def main() -> None:
    """Start the engine, then serve requests until the other side hangs up."""
    address, options = sys.argv[1], json.loads(sys.argv[2])
    connection = Client(address)
    try:
        started = time.perf_counter()
        engine = _Engine(options)
        connection.send({"ready": time.perf_counter() - started, **engine.facts()})
    except BaseException:
        connection.send({"error": traceback.format_exc()[-4000:]})
        raise
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send({"result": getattr(engine, name)(**arguments)})
        except BaseException:
            connection.send({"error": traceback.format_exc()[-4000:]})


class _Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)

    def facts(self) -> dict[str, Any]:
        """What it has become."""
        config = self._llm.llm_engine.vllm_config
        compilation = config.compilation_config
        return {
            "v2": bool(config.use_v2_model_runner),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "capture_sizes": list(compilation.cudagraph_capture_sizes or ()),
        }

    def call(self, method: str, args: list[Any]) -> Any:
        """A method of the worker."""
        return self._llm.collective_rpc(method, args=tuple(args))[0]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._llm.reset_prefix_cache()

    def capacity(self) -> int:
        """Tokens that the KV cache has room for."""
        return kv_quality.capacity(self._llm)

    def step_ms(self, context: int, batch: int, tokens: int) -> float:
        """Of decoding behind prompts of so many random tokens, the mean of ``tokens`` steps."""
        prompts = self._random_prompts(context, batch)
        return 1e3 * kv_quality.decode_seconds(self._llm, prompts, tokens) / tokens

    def crowd(self, context: int, num: int, tokens: int) -> dict[str, float]:
        """Answer ``num`` requests that come at once: seconds, and most that ran at once."""
        return kv_quality.serve(self._llm, self._random_prompts(context, num), tokens)

    def _random_prompts(self, size: int, num: int) -> list[list[int]]:
        draw = random.Random(size)
        most = self._llm.llm_engine.vllm_config.model_config.get_vocab_size() - 1
        return [[draw.randint(1, most) for _ in range(size)] for _ in range(num)]

    def generate(self, texts: list[list[int]], params: list[dict[str, Any]]) -> dict[str, Any]:
        """Answer all at once; params are vLLM's, by text.

        Returns:
            wall and decode seconds, the tokens, and log-probabilities where they were asked for.
        """
        from vllm import SamplingParams

        started = time.perf_counter()
        outputs = self._llm.generate(
            [{"prompt_token_ids": text} for text in texts],
            [SamplingParams(detokenize=False, **values) for values in params],
            use_tqdm=False,
        )
        wall = time.perf_counter() - started
        stats = [output.metrics for output in outputs]
        answers = [output.outputs[0] for output in outputs]
        return {
            "wall_s": wall,
            "decode_s": max(stat.last_token_ts for stat in stats)
            - min(stat.first_token_ts for stat in stats),
            "tokens": [list(answer.token_ids) for answer in answers],
            "logprobs": [
                [{token: entry.logprob for token, entry in position.items()} for position in answer.logprobs]
                if answer.logprobs
                else None
                for answer in answers
            ],
        }


if __name__ == "__main__":
    main()
