# SPDX-License-Identifier: Apache-2.0
"""One engine of ``vllm-ext bench``: started, driven step by step, its steps timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vllm_ext.bench.settings import Method, Settings, own_state
from vllm_ext.bench.stats import Answer, Round

# Repetition on purpose: it makes lookup methods draft, so that verification is warm too.
WARM_UP_PROMPT = "Write the line 'the sea is blue and the sand is warm' eight times."
WARM_UP_TOKENS = 48
TOP_LOGPROBS = 20  # vLLM's default max_logprobs
# vLLM's workers spin for one second after their last message before they sleep.
SETTLE_WINDOW_S, SETTLE_LIMIT_S = 0.2, 10.0
IDLE_CORES = 0.1
CPU_KV_CACHE_BYTES = 1 << 30


class EngineError(RuntimeError):
    """An engine did not start or died; the message is vLLM's own."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine is given it."""

    source: str
    category: str
    token_ids: list[int]


class Engine:
    """One vLLM engine with its processes, driven step by step from here."""

    def __init__(self, settings: Settings, method: Method, batch_size: int) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self.method = method
        self.rounds: list[Round] = []
        self.batch_size = batch_size
        self._max_tokens = settings.max_tokens
        self.temperature = settings.temperature  # of the rounds to come
        self._drafts = _DraftCounter()
        self._num_requests = 0
        self._top_logprobs: dict[tuple[int, ...], dict[int, float]] = {}
        self._own = ExitStack()
        try:
            self._engine = LLMEngine.from_engine_args(
                engine_args(settings, self._own.enter_context(own_state(method)), batch_size),
                # vLLM's Prometheus counters are one set per process, shared by all our engines.
                stat_loggers=[lambda vllm_config, engine_index: self._drafts],
            )
        except Exception as error:
            self._own.close()
            raise EngineError(f"{method.label}: the engine did not start: {error}") from error
        self.dtype = str(self._engine.vllm_config.model_config.dtype).removeprefix("torch.")

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.engine_core.shutdown()
        self._own.close()

    def warm_up(self) -> None:
        """One untimed batch of a prompt that is in no set."""
        token_ids = chat_token_ids(
            self._engine.get_tokenizer(), [{"role": "user", "content": WARM_UP_PROMPT}]
        )
        prompts = [(-1, EncodedPrompt("", "", token_ids))] * self.batch_size
        self._answer(prompts, min(WARM_UP_TOKENS, self._max_tokens))

    def begin_round(self) -> None:
        """Forget other rounds' prefixes, start the counts at zero."""
        self._engine.reset_prefix_cache()
        timed = self._take_draft_s() is not None
        self.rounds.append(Round([], 0.0, 0, 0.0 if timed else None))
        self._drafts.take()

    def answer(self, prompts: Sequence[tuple[int, EncodedPrompt]]) -> None:
        """Answer more of the round's prompts, and record that."""
        now = self.rounds[-1]
        started_s = time.perf_counter()
        now.answers += self._answer(prompts, self._max_tokens)
        now.wall_s += time.perf_counter() - started_s
        now.num_draft_tokens += self._drafts.take()
        draft_s = self._take_draft_s()
        now.draft_s = None if now.draft_s is None or draft_s is None else now.draft_s + draft_s

    def top_logprobs(self, token_ids: Sequence[int], decoded: bool) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens, best first.

        Args:
            token_ids: what is before them.
            decoded: the last of these was put out, and is put out again, in a step of its own: in 16 bits what comes
                next depends on how many tokens a step has.
        """
        key = tuple(token_ids)
        if key not in self._top_logprobs:
            prompt = list(token_ids[:-1] if decoded else token_ids)
            self._add_request(prompt, 1 + decoded, logprobs=TOP_LOGPROBS)
            tokens: list[int] = []
            positions: list[Any] = []
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    tokens += output.outputs[0].token_ids
                    positions += output.outputs[0].logprobs or ()
            if decoded and (tokens[0] != token_ids[-1] or len(tokens) == 1):
                return self.top_logprobs(token_ids, False)  # it was a near tie itself
            found = {token: entry.logprob for token, entry in positions[-1].items()}
            self._top_logprobs[key] = dict(sorted(found.items(), key=lambda item: -item[1]))
        return self._top_logprobs[key]

    def _answer(self, prompts: Sequence[tuple[int, EncodedPrompt]], max_tokens: int) -> list[Answer]:
        """Closed loop: a request that ends makes room for the next."""
        waiting = iter(prompts)
        running: dict[str, Answer] = {}
        answers: list[Answer] = []
        try:
            while True:
                while len(running) < self.batch_size and (item := next(waiting, None)) is not None:
                    index, prompt = item
                    answer = Answer(index, prompt.category, time.perf_counter(), [], [])
                    answers.append(answer)
                    running[self._add_request(prompt.token_ids, max_tokens, self.temperature)] = answer
                if not running:
                    return answers
                outputs = self._engine.step()
                now_s = time.perf_counter()
                for output in outputs:
                    answer = running[output.request_id]
                    if new_token_ids := output.outputs[0].token_ids:
                        answer.token_ids.extend(new_token_ids)
                        answer.step_times_s.append(now_s)
                    if output.finished:
                        del running[output.request_id]
        except Exception as error:
            raise EngineError(f"{self.method.label}: the engine died: {error}") from error

    def _add_request(
        self, token_ids: list[int], max_tokens: int, temperature: float = 0.0, logprobs: int | None = None
    ) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_requests += 1
        request_id = str(self._num_requests)
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)
        return request_id

    def call(self, method: Any, *args: Any) -> list[Any]:
        """A method of the worker by name, or a function of it; returns what each worker's returns."""
        results: list[Any] = self._engine.collective_rpc(method, args=args)
        return results

    def _take_draft_s(self) -> float | None:
        seconds = self.call("vllm_ext_bench_draft_seconds")
        # Tensor-parallel workers draft at the same time.
        return None if None in seconds else max(seconds)


def engine_args(settings: Settings, method: Method, batch_size: int) -> Any:
    """vLLM's ``EngineArgs`` of an engine.

    Raises:
        ValueError: vLLM's own, of what cannot be.
    """
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    compiled = not on_cpu if settings.compile is None else settings.compile
    # All engines of a batch size share the device; vLLM's default is most of the memory.
    memory: dict[str, Any] = {"kv_cache_memory_bytes": settings.kv_cache_memory_bytes}
    if on_cpu:
        memory["kv_cache_memory_bytes"] = settings.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
    else:
        memory["gpu_memory_utilization"] = 0.9 / len(settings.methods)
    return EngineArgs(
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=batch_size,
        enforce_eager=not compiled,
        seed=0,
        use_tqdm_on_load=settings.verbose,
        # Carries the draft counts.
        disable_log_stats=False,
        speculative_config=method.speculative_config,
        worker_extension_cls="vllm_ext.bench.draft_timer.DraftTimer",
        **memory,
    )


def check_engines(settings: Settings) -> None:
    """Let vLLM and us check all engines' arguments. None is started.

    Raises:
        ValueError: naming the method.
    """
    for method in settings.methods:
        for batch_size in settings.batch_sizes:
            _check(settings, method, batch_size)


def _check(settings: Settings, method: Method, batch_size: int) -> None:
    try:
        engine_args(settings, method, batch_size).create_engine_config()
    except Exception as error:
        raise ValueError(f"{method.label}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """An error in a line, without what pydantic says around it."""
    if isinstance(error, ValidationError):
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        return "; ".join(f"{field}: {message}" if field else message for field, message in found)
    return str(error) or type(error).__name__


class _DraftCounter:
    """A vLLM stat logger (duck-typed: the base class would import vLLM with this module)."""

    def __init__(self) -> None:
        self._num_draft_tokens = 0

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Called by the engine after each step."""
        if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is not None:
            self._num_draft_tokens += scheduler_stats.spec_decoding_stats.num_draft_tokens

    def take(self) -> int:
        """Draft tokens verified since the last call."""
        taken, self._num_draft_tokens = self._num_draft_tokens, 0
        return taken

    def log(self, *args: Any) -> None:
        """Nothing to log."""

    def log_engine_initialized(self) -> None:
        """Nothing to log."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Never put to sleep."""


def chat_token_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The messages as the model's chat template writes them, or their text where it has none."""
    if tokenizer.chat_template is None:
        text = "\n".join(str(message.get("content", "")) for message in messages)
        return list(tokenizer.encode(text))
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    )


def settle() -> bool:
    """Wait until no engine uses the CPU; False when that does not happen.

    Nothing runs between rounds, so what is left is the spinning of the workers that were last used.
    """
    import psutil  # type: ignore[import-untyped]  # vLLM needs it too

    children = psutil.Process().children(recursive=True)
    deadline_s = time.perf_counter() + SETTLE_LIMIT_S
    before_s = _cpu_s(children)
    while time.perf_counter() < deadline_s:
        time.sleep(SETTLE_WINDOW_S)
        now_s = _cpu_s(children)
        if now_s - before_s <= IDLE_CORES * SETTLE_WINDOW_S:
            return True
        before_s = now_s
    return False


def _cpu_s(processes: Sequence[Any]) -> float:
    total_s = 0.0
    for process in processes:
        times = process.cpu_times()
        total_s += times.user + times.system
    return total_s
