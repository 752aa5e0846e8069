# SPDX-License-Identifier: Apache-2.0
"""Training for so many minutes, with a checkpoint to go on from and a curve of the loss."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_ext.data.atomic_files import Progress

if TYPE_CHECKING:
    from vllm_ext.training.draft_model import Recipe

WARM_UP = 0.05  # of the steps
ASKED = (0.125, 0.25, 0.5)  # of the minutes, when it is asked what a model is worth; and at their end
CHECKPOINT = "checkpoint.pt"
CURVE = "training.json"


def train_for(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_at: Callable[[int, float], torch.Tensor],
    recipe: Recipe,
    folder: Path,
    report: Progress,
    log: Callable[[str], None],
    worth: Callable[[], float] | None = None,
) -> tuple[list[dict[str, float]], list[tuple[int, float]]]:
    """Train in place, from the folder's checkpoint where there is one.

    Args:
        model: what is learnt by ``optimizer`` is all of it, or a part.
        optimizer: its learning rate is set here.
        loss_at: of a step, by its number and the share of the time that is spent.
        recipe: how long, how fast.
        folder: of the checkpoint and the curve.
        report: progress in seconds of training.
        log: takes a line with the loss at each checkpoint.
        worth: of the model as it is; asked now and then, in no time of training.

    Returns:
        the loss curve, and by steps what the model was worth then.
    """
    learning = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    step, spent = 0, 0.0
    curve: list[dict[str, float]] = []
    points: list[tuple[int, float]] = []
    file = folder / CHECKPOINT
    if file.exists():
        saved = torch.load(file, map_location=learning[0].device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent, curve = saved["step"], saved["spent"], saved["curve"]
        points = saved.get("points", [])

    def save() -> None:
        part = file.with_suffix(".part")
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step, "spent": spent, "curve": curve, "points": points}, part)
        os.replace(part, file)

    budget = 60.0 * recipe.minutes
    began, saved_at = time.perf_counter() - spent, time.perf_counter()
    asked = [share for share in ASKED if share * budget > spent]
    running: list[float] = []
    while (spent := time.perf_counter() - began) < budget:
        if worth is not None and asked and spent > asked[0] * budget:
            asked.pop(0)
            points.append((step, worth()))
            began = time.perf_counter() - spent
        share = spent / budget
        rate = recipe.learning_rate * min(share / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_at(step, share)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        step += 1
        running.append(loss.item())
        if len(running) == 20:
            curve.append({"step": step, "seconds": spent, "loss": sum(running) / len(running)})
            running.clear()
        report("training", int(spent), int(budget))
        if time.perf_counter() - saved_at > recipe.checkpoint_seconds:
            save()
            loss_now = curve[-1]["loss"] if curve else running[-1]
            log(f"step {step}, {spent / 60:.1f} minutes: loss {loss_now:.3f}")
            saved_at = time.perf_counter()
    save()
    (folder / CURVE).write_text(json.dumps({"recipe": asdict(recipe), "curve": curve}, indent=1))
    if worth is not None:
        points.append((step, worth()))
    return curve, points
