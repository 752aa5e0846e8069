# SPDX-License-Identifier: Apache-2.0
"""The trainer of live distillation: follows a server's answers, and writes versions of its draft's weights.

A process of its own (``python -m vllm_ext.training.online``) of the lowest priority, started by the server's worker
(`engine.draft_model.online`); it ends when its parent does. What it has learnt from is deleted.

Source: "Online Speculative Decoding", arXiv 2310.07177, algorithm 1: at the places where the draft was wrong, and there
alone, the cross-entropy between the target's distribution and the draft's; a constant learning rate of 1e-4; the buffer
is cleared. Deviations: what is wrong is judged by the weights as they are in training, so that it is known where
nothing was drafted too; at all places, if it is told so; several steps a buffer; the target's likeliest tokens and the
rest as one; a sampled softmax.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ext.data import answers, model_files, weight_versions
from vllm_ext.data.answers import Answer
from vllm_ext.data.weight_versions import ANSWERS, VERSIONS
from vllm_ext.training.draft_model import (
    Batches,
    Recipe,
    candidates,
    load_model,
    loss_of,
    multiplies_bfloat16,
)

IDLE_SECONDS = 0.25  # between looks at the folder
BETAS = (0.9, 0.95)


def wrong_positions(logits: torch.Tensor, emitted: torch.Tensor) -> torch.Tensor:
    """Where the draft's likeliest token is not the one that was put out.

    Args:
        logits: ``[num_tokens, vocab]`` the draft's.
        emitted: int64 ``[num_tokens]``.

    Returns:
        bool ``[num_tokens]``.
    """
    return logits.argmax(1) != emitted


@dataclass
class Report:
    """Of some answers, the first time they were read: how good the draft was before it learnt from them."""

    tokens: int = 0
    wrong: int = 0
    loss: float = 0.0  # mean of the steps' losses times their tokens
    steps: int = 0


class Learner:
    """A draft that learns.

    Args:
        model: transformers' causal language model, in float32; its embeddings and its head stay as they are.
        learning_rate: constant.
        recipe: of the batches.
        everywhere: whether it learns where it was right, too.
        seed: of the tokens that stand for those that are not among the target's likeliest.
    """

    def __init__(
        self, model: Any, learning_rate: float, recipe: Recipe, everywhere: bool = False, seed: int = 0
    ) -> None:
        self.model, self._recipe, self._everywhere = model, recipe, everywhere
        for frozen in (model.get_input_embeddings(), model.get_output_embeddings()):
            frozen.weight.requires_grad_(False)
        self.device = str(next(model.parameters()).device)
        self._optimizer = torch.optim.AdamW(
            list(self.learning.values()), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True
        )
        self._noise = torch.Generator().manual_seed(seed)

    @property
    def learning(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name."""
        return {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

    def learn(self, given: Sequence[Answer], passes: int) -> Report:
        """Some steps over answers, so many times."""
        given = [answer for answer in given if len(answer.top_ids)]
        report = Report()
        if not given:
            return report
        batches = Batches(given, self._recipe, self.device)
        for number in range(passes):
            for part in batches.parts:
                tokens, wrong, loss = self._step(batches, [given[i] for i in part])
                report.steps += loss > 0.0
                if number == 0:
                    report.tokens += tokens
                    report.wrong += wrong
                    report.loss += loss * tokens
        return report

    def _step(self, batches: Batches, part: list[Answer]) -> tuple[int, int, float]:
        """One step; how many tokens there were, at how many the draft was wrong, and the mean loss it learnt from."""
        ids, mask, top_ids, top_logp = batches.tensors(part)
        kept = mask.sum(1).tolist()
        emitted = torch.cat(
            [torch.from_numpy(answer.tokens[-n:]) for answer, n in zip(part, kept, strict=True)]
        ).to(self.device, torch.int64)
        dtype = torch.bfloat16
        with torch.autocast(torch.device(self.device).type, dtype, enabled=multiplies_bfloat16(self.device)):
            hidden = self.model.model(input_ids=ids).last_hidden_state[mask]
            head = self.model.get_output_embeddings().weight
            with torch.no_grad():
                wrong = wrong_positions(hidden @ head.T, emitted)
            learnt = torch.ones_like(wrong) if self._everywhere else wrong
            if not learnt.any():
                return len(wrong), 0, 0.0
            logits, places = candidates(head, hidden[learnt], top_ids[learnt], self._noise)
        loss = loss_of(logits, places, top_logp[learnt])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.learning.values()), 1.0)
        self._optimizer.step()
        return len(wrong), int(wrong.sum()), loss.item()


def take(folder: Path) -> Iterator[list[Answer]]:
    """A folder's shards, the oldest first, each deleted before it is learnt from. Who writes them bounds them."""
    for file in sorted(folder.glob("*.npz")):
        try:
            given = answers.read_shard(file)
        except ValueError as error:  # the server has deleted it, or it is damaged
            print(error, flush=True)
            given = []
        file.unlink(missing_ok=True)
        yield given


class Trainer:
    """A folder, the draft that learns from it, and its versions.

    Args:
        folder: of an engine: `ANSWERS` and `VERSIONS` are in it.
        draft: the draft's folder.
        options: of `vllm_ext.proposers.online.OnlineOptions`.
        max_length: most tokens of an answer that are read, the last ones.
    """

    def __init__(self, folder: Path, draft: Path, options: dict[str, Any], max_length: int) -> None:
        self._answers, self._versions = folder / ANSWERS, folder / VERSIONS
        self._options = options
        self._draft = model_files.fingerprint(draft)
        recipe = Recipe(batch_tokens=options["batch_tokens"], max_length=max_length)
        model = load_model(draft, options["device"])
        self.learner = Learner(model, options["learning_rate"], recipe, options["positions"] == "all")
        self._dtype = _dtype_of(draft)
        self._go_on()
        self._unpublished = 0  # steps
        self._published = time.monotonic() - options["version_seconds"]

    def _go_on(self) -> None:
        """From the newest version of this draft, if there is one."""
        for number in reversed(weight_versions.numbers(self._versions)):
            try:
                found = weight_versions.read(weight_versions.path(self._versions, number), self._draft)
            except ValueError as error:
                print(error, flush=True)
                continue
            learning = self.learner.learning
            if found.keys() == learning.keys():
                with torch.no_grad():
                    for name, parameter in learning.items():
                        parameter.copy_(found[name])
                print(json.dumps({"goes_on_from": number}), flush=True)
                return

    def turn(self) -> bool:
        """Learn from what waits, and write a version if it is time; whether there was anything to do."""
        worked = False
        for given in take(self._answers):
            began = time.monotonic()
            report = self.learner.learn(given, self._options["passes"])
            self._unpublished += report.steps
            seconds = round(time.monotonic() - began, 2)
            print(json.dumps({"seconds": seconds, **vars(report)}), flush=True)
            self._publish()
            worked = True
        return self._publish() or worked

    def _publish(self) -> bool:
        waited = time.monotonic() - self._published
        if not self._unpublished or waited < self._options["version_seconds"]:
            return False
        weights = {
            name: parameter.detach().to("cpu", self._dtype)
            for name, parameter in self.learner.learning.items()
        }
        kept = self._options["kept_versions"]
        number = weight_versions.publish(self._versions, weights, self._draft, kept)
        print(json.dumps({"version": number, "steps": self._unpublished}), flush=True)
        self._unpublished, self._published = 0, time.monotonic()
        return True


def _dtype_of(draft: Path) -> torch.dtype:
    """That its checkpoint has."""
    name = json.loads((draft / "config.json").read_text())
    found = getattr(torch, str(name.get("dtype", name.get("torch_dtype"))), torch.float32)
    assert isinstance(found, torch.dtype)
    return found


def stand_back(cores: Sequence[int], threads: int) -> None:
    """Run where nobody else wants to: the lowest priority there is, on the server's cores."""
    torch.set_num_threads(threads)
    os.nice(19)
    try:
        os.sched_setaffinity(0, cores)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        print(f"without SCHED_IDLE on cores {list(cores)}: {error}", flush=True)


def end_with(parent: int, seconds: float = 1.0) -> None:
    """End this process when its parent is gone, also without a word.

    Args:
        parent: its id.
        seconds: between two looks.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os._exit(0)

    threading.Thread(target=look, name="vllm-ext-parent", daemon=True).start()


def main() -> None:
    """Learn until the parent is gone, or asks to end."""
    given = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(given["parent"])
    stand_back(given["cores"], given["options"]["threads"])
    trainer = Trainer(Path(given["folder"]), Path(given["draft"]), given["options"], given["max_length"])
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if not trainer.turn():
            time.sleep(IDLE_SECONDS)


if __name__ == "__main__":
    main()
