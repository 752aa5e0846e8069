# SPDX-License-Identifier: Apache-2.0
"""What a method knows before its first request: the target answers prompts, and the method's ``state_dir`` is kept.

First each token of the vocabulary alone: what follows it where nothing else is known. Then prompts, given ones or the
target's own, greedily answered, with the method at work: it learns as it does of users' requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext.data.answers import engine, users_messages
from vllm_ext.data.atomic_files import Progress

ALONE = 0.2  # of the time, at most, for tokens alone
LOT = 1024  # of these, between looks at the clock


@dataclass
class Warmed:
    """What was learnt from."""

    vocabulary: int = 0  # tokens of it that were read alone
    prompts: int = 0
    tokens: int = 0  # of their answers


def warm(
    model: str,
    method: dict[str, Any],
    chats: Sequence[list[dict[str, Any]]],
    minutes: float,
    max_tokens: int,
    engine_options: dict[str, Any],
    report: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Warmed:
    """Have the target answer for some minutes, its start and its end left out.

    Args:
        model: the target's folder or hub name.
        method: vLLM's ``speculative_config``, with ``state_dir``.
        chats: lists of messages, answered first; then come prompts of the target's own, if it is a chat model.
        minutes: how long.
        max_tokens: of an answer.
        engine_options: of vLLM's ``LLM``.
        report: progress in seconds.
        clock: seconds.

    Raises:
        ValueError: there are no prompts: none given, and none that the target ends.
    """
    from vllm import SamplingParams

    llm = engine(model, {**engine_options, "speculative_config": method})
    at_once = llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    done, began, seconds = Warmed(), clock(), 60.0 * minutes

    is_chat = llm.get_tokenizer().chat_template is not None
    if not chats and not is_chat:
        raise ValueError(
            f"--prompts is needed: {model} has no chat template, and writes none of its own; give some"
        )

    def spent() -> float:
        found = clock() - began
        report("warming", min(int(found), int(seconds)), int(seconds))
        return found

    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    alone = SamplingParams(temperature=0.0, max_tokens=1)
    while done.vocabulary < vocab_size and spent() < ALONE * seconds:
        tokens = range(done.vocabulary, min(done.vocabulary + LOT, vocab_size))
        llm.generate([{"prompt_token_ids": [token]} for token in tokens], alone, use_tqdm=False)
        done.vocabulary = tokens.stop
    given = list(chats)
    answered = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    while spent() < seconds:
        some, given = given[:at_once], given[at_once:]
        if not some and is_chat:
            some = [[{"role": "user", "content": text}] for text in users_messages(llm, at_once)]
        if not some:
            break
        if is_chat:
            outputs = llm.chat(some, answered, use_tqdm=False)
        else:
            outputs = llm.generate([chat[-1]["content"] for chat in some], answered, use_tqdm=False)
        done.prompts += len(some)
        done.tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    llm.llm_engine.engine_core.shutdown()
    report("warming", int(seconds), int(seconds))
    if not done.prompts:
        raise ValueError(
            f"--prompts is needed: {model} writes none of its own within --minutes={minutes:g}; give some, or more "
            "minutes"
        )
    return done
