# SPDX-License-Identifier: Apache-2.0
"""Making what rules caad and svdecode go by, of annotated examples: a model reads each answer behind its prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_ext.data import model_files
from vllm_ext.data.prompts import PROMPT_FIELDS, load_prompts
from vllm_ext.samplers import artifact_file, caad, svdecode
from vllm_ext.samplers.artifact_file import Header

if TYPE_CHECKING:
    from vllm_ext.data.atomic_files import Progress


@dataclass(frozen=True)
class Example:
    """A chat and the answer that it should have."""

    messages: list[dict[str, Any]]
    answer: str


def read_examples(files: Sequence[Path], field: str) -> list[Example]:
    """Of JSON-lines files, whose prompts are as `vllm-ext bench` takes them.

    Args:
        files: their names.
        field: of each record, the answer's.

    Raises:
        ValueError: a file cannot be read, or a record has no prompt or no answer; as file:line.
    """
    examples = []
    for prompt in load_prompts(files):
        file, _, line = prompt.source.rpartition(":")
        record = json.loads(Path(file).read_text().splitlines()[int(line) - 1])
        answer = record.get(field)
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(
                f"{prompt.source}: it has no text in {field!r}; give each record one of "
                f"{', '.join(PROMPT_FIELDS)} and its answer, or say with --field where that is"
            )
        examples.append(Example(prompt.messages, answer))
    return examples


def make_caad(model: str, examples: Sequence[Example], top_k: int, report: Progress, output: Path) -> Header:
    """The store of rule caad: hidden states of contexts, and the likeliest tokens behind them.

    Args:
        model: folder or Hugging Face id.
        examples: true answers; about ten are enough.
        top_k: tokens kept of each distribution.
        report: told how many were read.
        output: the file to make.
    """
    folder = model_files.snapshot(model)
    contexts, ids, gains = [], [], []
    for hidden, logits, _ in _read(folder, examples, report):
        kept = logits.log_softmax(1).topk(min(top_k, logits.shape[1]), 1)
        contexts.append(torch.nn.functional.normalize(hidden, dim=1))
        ids.append(kept.indices.int())
        gains.append(kept.values - kept.values[:, -1:])
    arrays = {"contexts": torch.cat(contexts), "ids": torch.cat(ids), "gains": torch.cat(gains)}
    return _write(output, arrays, caad.CaadRule.name, model, folder, len(arrays["ids"]))


def make_svdecode(
    model: str, original: str, examples: Sequence[Example], alpha: float, report: Progress, output: Path
) -> tuple[Header, float]:
    """The direction of rule svdecode, and its best strength.

    Args:
        model: the tuned model, that will be served: folder or Hugging Face id.
        original: the one that it was tuned from.
        examples: the task's.
        alpha: tokens that the tuned model finds implausible by this have no part.
        report: told how many were read.
        output: the file to make.

    Raises:
        ValueError: the two models have different tokenizers.
    """
    folder, before = model_files.snapshot(model), model_files.snapshot(original)
    hashes = {model_files.hash_of(str(each)) for each in (folder, before)}
    if len(hashes) > 1:
        raise ValueError(
            f"--original={original!r}: its tokenizer is not that of {model}; name the model it was tuned from"
        )
    total: torch.Tensor | None = None
    read: list[tuple[torch.Tensor, torch.Tensor]] = []
    pairs = zip(_read(folder, examples, report), _read(before, examples, report), strict=True)
    for (_, tuned, tokens), (_, others, _) in pairs:
        found = svdecode.direction(tuned, others, alpha).sum(0)
        total = found if total is None else total + found
        read.append((tuned, tokens))
    assert total is not None
    rows = sum(len(tokens) for _, tokens in read)
    delta = total / rows
    mu = svdecode.best_strength(torch.cat([z for z, _ in read]), delta, torch.cat([t for _, t in read]))
    arrays = {"delta": delta.float(), "mu": torch.tensor(mu)}
    return _write(output, arrays, svdecode.SvdecodeRule.name, model, folder, rows), mu


def check(field: str, file: str, rule: str, model: str) -> None:
    """Refuse a file that was made for another model.

    Args:
        field: the option that names it.
        file: its name.
        rule: whose it must be.
        model: the one that is served.

    Raises:
        ValueError: naming the field, the file, and the way out.
    """
    _, header = artifact_file.read(field, file, rule)
    if header.fingerprint != model_files.fingerprint(model_files.snapshot(model)):
        raise ValueError(
            f"{field}={file!r} was made for {header.model}, whose weights are not those of {model}; make it again with "
            f"`vllm-ext {rule} build`"
        )


def _read(
    folder: Path, examples: Sequence[Example], report: Progress
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each answer's tokens: what the head reads, float32 ``[num_tokens, hidden]``, the logits, and the tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for done, example in enumerate(examples):
        prompt = tokenizer.apply_chat_template(
            example.messages, add_generation_prompt=True, return_dict=False
        )
        answer = tokenizer.encode(example.answer, add_special_tokens=False)
        tokens = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        with torch.inference_mode():
            result = model(tokens[None, :-1], output_hidden_states=True)
        rows = slice(len(prompt) - 1, None)
        yield result.hidden_states[-1][0, rows], result.logits[0, rows].float(), tokens[len(prompt) :]
        report("answers", done + 1, len(examples))


def _write(
    output: Path, arrays: Mapping[str, torch.Tensor], rule: str, model: str, folder: Path, made_of: int
) -> Header:
    header = Header(
        rule=rule,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model,
        fingerprint=model_files.fingerprint(folder),
        made_of=made_of,
    )
    artifact_file.write(output, {name: array.contiguous() for name, array in arrays.items()}, header)
    return header
