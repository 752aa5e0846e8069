# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext train exits``: heads of early exits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_ext.cli.output.console import errors_of, progress_on, say
from vllm_ext.cli.train.common import (
    Device,
    Dtype,
    MaxNumSeqs,
    OwnPrompts,
    Prompts,
    Samples,
    Seed,
    TopK,
    Verbose,
    causal_model,
    check_layers,
    chosen_device,
    layers_of,
    numbers_of,
)
from vllm_ext.training.sources import Source, same_settings


def exits_command(
    target: Annotated[str, typer.Option("--model", "--target", help="The model: folder or Hugging Face id.")],
    output: Annotated[
        Path, typer.Option(help="File of the heads (.safetensors). The folder OUTPUT.work holds answers.")
    ],
    exits: Annotated[str, typer.Option(help="After how many layers, separated by commas: 4,8,12.")],
    prompts: Prompts = None,
    answers: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of answers that are kept, instead of prompts; several times."),
    ] = None,
    own_prompts: OwnPrompts = 0,
    samples: Samples = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 128,
    top_k: TopK = 16,
    tokens: Annotated[int, typer.Option(min=100, help="Most tokens of answers to learn from.")] = 40_000,
    epochs: Annotated[int, typer.Option(min=0, help="Over them; 0: least squares alone.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 5e-4,
    max_num_seqs: MaxNumSeqs = 128,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Train heads of early exits, for the methods layerskip and del, by the model's own answers."""
    console, errors = Console(), Console(stderr=True)
    with errors_of(errors):
        from vllm_ext.data.model_files import snapshot
        from vllm_ext.engine.models import exit_heads
        from vllm_ext.training.draft_model import Recipe, split
        from vllm_ext.training.early_exits import agreement, distil, features, shuffled

        folder = snapshot(target)
        numbers = numbers_of("--exits", exits)
        check_layers("--exits", numbers, folder, 1, layers_of(folder) - 1)
        source = Source(folder, prompts, answers, own_prompts, samples, max_tokens, top_k)
        work = output.with_name(output.name + ".work")
        same_settings(work, source.settings())
        started = time.perf_counter()
        heads, rows = {}, []
        with progress_on(errors) as report:
            given = source.answers(work, {"max_num_seqs": max_num_seqs, "dtype": dtype}, report, verbose)
            learnt, held_out = split(given, Recipe(seed=seed))
            model = causal_model(folder, chosen_device(device), dtype)
            of = features(model, shuffled(learnt, seed), numbers, tokens, report)
            test = features(model, held_out, numbers, tokens, report)
            for number in numbers:
                heads[number] = distil(model, of, number, epochs, learning_rate, seed, report)
                before, after = (agreement(model, test, number, head) for head in (None, heads[number]))
                rows.append((number, before, after))
        exit_heads.save(output, heads, folder)
        size = sum(part.numel() for head in heads.values() for part in head)
    say(
        console,
        f"{output}: {size / 1e6:.1f} million parameters, {len(of.last):,} tokens of answers learnt from",
    )
    say(console, f"on {len(test.last):,} tokens held out, accepted without and with its head:")
    for number, before, after in rows:
        say(
            console,
            f"  exit after layer {number:2}: greedy {before.greedy:.3f} and {after.greedy:.3f}, "
            f"at temperature 1 {before.sampled:.3f} and {after.sampled:.3f}",
        )
    say(console, f"{(time.perf_counter() - started) / 60:.0f} minutes in all")
    config = json.dumps({"method": "layerskip", "exit_layer": numbers[0], "heads": str(output.resolve())})
    say(console, f"serve with: --speculative-config '{config}'")
