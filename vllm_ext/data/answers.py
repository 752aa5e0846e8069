# SPDX-License-Identifier: Apache-2.0
"""What a draft model learns from: the target's own answers, with what it ranked highest at each of their tokens.

Shards of a folder, each complete or not there, so that an interrupted run goes on where it stopped.

Few prompts are soon learnt by heart. A chat model that is given what its template puts before a user's words goes on
with such words: prompts without number, as Magpie has them (arXiv 2406.08464, section 2.1).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from vllm_ext.data.atomic_files import Progress

Int32 = npt.NDArray[np.int32]

SHARD = 64  # prompts
OWN_PROMPTS = "own_prompts.jsonl"
OWN_PROMPT_TOKENS = 256  # longer ones are not kept: they are cut
CPU_MEMORY = 0.5  # of a CPU's memory, for the model and its KV cache
TEMPERATURES = (
    0.0,
    1.0,
)  # of a prompt's first answer and of all others: a draft serves both kinds of requests


@dataclass(frozen=True)
class Answer:
    """One answer of the target."""

    tokens: Int32  # [num_tokens] prompt and output
    num_prompt_tokens: int
    top_ids: (
        Int32  # [num_output_tokens, top_k] what stood for choice in each output token's place, best first
    )
    top_logp: npt.NDArray[np.float32]  # [num_output_tokens, top_k] log-probabilities at temperature 1

    @property
    def is_greedy(self) -> bool:
        """Whether its output is, throughout, what the target ranked highest."""
        return bool((self.tokens[self.num_prompt_tokens :] == self.top_ids[:, 0]).all())


def leading(answers: Sequence[Answer], most_tokens: int) -> tuple[list[Answer], int]:
    """The first answers until they have so many output tokens, and how many these are."""
    kept: list[Answer] = []
    tokens = 0
    for answer in answers:
        if tokens >= most_tokens:
            break
        kept.append(answer)
        tokens += len(answer.top_ids)
    return kept, tokens


def generate(
    model: str,
    chats: Sequence[list[dict[str, Any]]],
    own_prompts: int,
    folder: Path,
    samples: int,
    max_tokens: int,
    top_k: int,
    engine_options: dict[str, Any],
    report: Progress,
) -> None:
    """Have the target answer all chats, shard by shard; shards that are there are left as they are.

    Args:
        model: the target's folder or hub name.
        chats: lists of messages.
        own_prompts: prompts that the target writes itself, which follow ``chats``.
        folder: of the shards.
        samples: answers of each chat, at `TEMPERATURES`.
        max_tokens: of an answer.
        top_k: alternatives kept of each token.
        engine_options: of vLLM's ``LLM``.
        report: progress in chats.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = folder / OWN_PROMPTS
    total = len(chats) + own_prompts
    missing = [start for start in range(0, total, SHARD) if not shard_file(folder, start).exists()]
    done = total - sum(min(SHARD, total - start) for start in missing)
    report("answers", done, total)
    if not missing:
        return
    from vllm import SamplingParams

    llm = engine(model, {"max_logprobs": max(top_k, 20), **engine_options})
    if own_prompts and not written.exists():
        _write_prompts(llm, own_prompts, written, report)
    if own_prompts:
        own = [json.loads(line) for line in written.read_text().splitlines()]
        chats = [*chats, *([{"role": "user", "content": prompt}] for prompt in own)]
    # What its words are is not looked up: of the alternatives this would take longer than sampling.
    params = [
        SamplingParams(
            temperature=TEMPERATURES[min(i, 1)], max_tokens=max_tokens, logprobs=top_k, detokenize=False
        )
        for i in range(samples)
    ]
    for start in missing:
        part = list(chats[start : start + SHARD])
        outputs = llm.chat(
            [chat for chat in part for _ in params], [p for _ in part for p in params], use_tqdm=False
        )
        write(shard_file(folder, start), [_answer(output, top_k) for output in outputs])
        done += len(part)
        report("answers", done, total)
    llm.llm_engine.engine_core.shutdown()  # its memory and its cores are training's now


def engine(model: str, options: dict[str, Any]) -> Any:
    """vLLM's ``LLM``; on a CPU in this process, where its threads take all cores."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # Its processes wait for each other in loops, which takes one core of few, and bind a worker to the rest.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Of the memory vLLM would take nine tenths, which other programs on the machine may have to do with as well.
        options = {"gpu_memory_utilization": CPU_MEMORY, "distributed_executor_backend": "uni", **options}
    from vllm import LLM

    return LLM(model, **options)


def _write_prompts(llm: Any, count: int, file: Path, report: Progress) -> None:
    """Have the target write what users would say, one line of JSON each.

    Raises:
        ValueError: it has no chat template, does not end what it writes, or repeats itself.
    """
    found: dict[str, None] = {}  # in order, each once
    while len(found) < count:
        before_these = len(found)
        found.update(dict.fromkeys(users_messages(llm, 256)))
        if len(found) == before_these:
            raise ValueError(
                f"--own-prompts={count} is not allowed: of 256 user messages the model ended none within "
                f"{OWN_PROMPT_TOKENS} tokens that is new beside {before_these}; leave it out and give --prompts"
            )
        report("prompts", min(len(found), count), count)
    part = file.with_suffix(".part")
    with _private(part) as stream:
        stream.write("".join(json.dumps(text) + "\n" for text in list(found)[:count]).encode())
    os.replace(part, file)


def users_messages(llm: Any, count: int) -> list[str]:
    """What the target writes as users' words, of so many tries those that it ends."""
    from vllm import SamplingParams

    mark = "<user's words>"
    tokenizer = llm.get_tokenizer()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before = tokenizer.encode(chat[: chat.index(mark)], add_special_tokens=False)
    params = SamplingParams(temperature=1.0, max_tokens=OWN_PROMPT_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": before}] * count, params, use_tqdm=False)
    texts = [o.outputs[0].text.strip() for o in outputs if o.outputs[0].finish_reason == "stop"]
    return [text for text in texts if text]


def shard_file(folder: Path, start: int) -> Path:
    """Of the chats from ``start`` on."""
    return folder / f"{start:08d}.npz"


def _answer(output: Any, top_k: int) -> Answer:
    completion = output.outputs[0]
    best = [
        sorted(place.items(), key=lambda entry: -entry[1].logprob)[:top_k]
        for place in completion.logprobs or []
    ]
    return Answer(
        np.array([*output.prompt_token_ids, *completion.token_ids], np.int32),
        len(output.prompt_token_ids),
        np.array([[token for token, _ in place] for place in best], np.int32).reshape(-1, top_k),
        np.array([[entry.logprob for _, entry in place] for place in best], np.float32).reshape(-1, top_k),
    )


def write(file: Path, answers: Sequence[Answer]) -> None:
    """A shard, complete or not at all, for this user alone.

    Raises:
        OSError: it cannot be written.
    """
    part = file.with_suffix(".part")
    with _private(part) as stream:
        np.savez_compressed(
            stream,
            tokens=np.concatenate([answer.tokens for answer in answers]),
            num_tokens=[len(answer.tokens) for answer in answers],
            num_prompt_tokens=[answer.num_prompt_tokens for answer in answers],
            top_ids=np.concatenate([answer.top_ids for answer in answers]),
            top_logp=np.concatenate([answer.top_logp for answer in answers]),
        )
    os.replace(part, file)


def _private(file: Path) -> BinaryIO:
    """Open a new file that this user alone can read: what is written there are prompts and answers."""
    file.unlink(missing_ok=True)
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def load(folder: Path) -> list[Answer]:
    """All answers of a folder's shards, also of those in its folders, in the order of the chats.

    Raises:
        ValueError: there are none, or one cannot be read; the message names it.
    """
    files = sorted(folder.rglob("*.npz"))
    if not files:
        raise ValueError(f"{folder} holds no answers; name a folder that does, or have some kept: export_dir")
    return [answer for file in files for answer in read_shard(file)]


def read_shard(file: Path) -> list[Answer]:
    """The answers of one shard.

    Raises:
        ValueError: it cannot be read; the message names it.
    """
    try:
        with file.open("rb") as stream, np.load(stream) as shard:
            ends = np.cumsum(shard["num_tokens"])
            outputs = np.cumsum(shard["num_tokens"] - shard["num_prompt_tokens"])
            parts = (
                np.split(shard["tokens"], ends[:-1]),
                shard["num_prompt_tokens"].tolist(),
                np.split(shard["top_ids"], outputs[:-1]),
                np.split(shard["top_logp"], outputs[:-1]),
            )
            return [Answer(*part) for part in zip(*parts, strict=True)]
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise ValueError(f"{file} cannot be read ({error}); delete it, and run the command again") from None
