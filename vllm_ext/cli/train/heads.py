# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext train heads``: heads that draft from the target's own hidden states, and prompt tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_ext.cli.output.console import errors_of, progress_on, say
from vllm_ext.cli.train.common import (
    Answers,
    Device,
    Dtype,
    MaxNumSeqs,
    OwnPrompts,
    Prompts,
    Samples,
    Seed,
    Target,
    TopK,
    Verbose,
    causal_model,
    chosen_device,
)
from vllm_ext.cli.train.head_kinds import Given, kind_of
from vllm_ext.training.sources import Source, same_settings

SIZES = (4, 8, 16)  # nodes of trees in the figures
QUICK = 1000  # tokens of the figures that are asked for while it trains
LEAST_TOKENS = 1.2  # a step; with less heads cost more than they bring


def heads_command(
    target: Target,
    output: Annotated[
        Path, typer.Option(help="Folder of the heads. Its `work` holds answers and checkpoint.")
    ],
    kind: Annotated[
        str,
        typer.Option(
            help="medusa, clover, eagle, its relatives chimera, falcon and fspad, or ppd: prompt tokens and no heads."
        ),
    ] = "medusa",
    prompts: Prompts = None,
    answers: Answers = None,
    num_heads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help="Of medusa: depths of the tree; 4. Of clover: depths that training unrolls to; 5.",
        ),
    ] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, max=8, help="Of medusa: of each head; 1.")] = None,
    aux_layers: Annotated[
        str | None,
        typer.Option(
            help="Of eagle and its relatives: the target's hidden states after so many of its layers are read, as "
            "2,15,27: an early, a middle and a late one, if not given."
        ),
    ] = None,
    num_passes: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Of eagle and its relatives: depths that training unrolls to; 4."),
    ] = None,
    intermediate_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Width of the MLP. Of eagle and its relatives: the target's, if not given. Of clover: twice the "
            "target's hidden size.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, max=8, help="Of ppd: depths of the tree; 3.")
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=32, help="Tokens that heads can say: the most frequent ones of the answers.")
    ] = 8192,
    own_prompts: OwnPrompts = 0,
    samples: Samples = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 256,
    top_k: TopK = 16,
    tokens: Annotated[int, typer.Option(min=100, help="Most tokens of answers to learn from.")] = 1_000_000,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of training, answers left out.")] = 25.0,
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="At its highest; the kind's, if not given.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a step; the kind's, if not given.")
    ] = None,
    max_num_seqs: MaxNumSeqs = 128,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Train heads on the target's answers; run again, it goes on where it was interrupted."""
    console, errors = Console(), Console(stderr=True)
    with errors_of(errors):
        own = {
            "num_heads": num_heads,
            "num_layers": num_layers,
            "aux_layers": aux_layers,
            "num_passes": num_passes,
            "intermediate_size": intermediate_size,
            "prompt_tokens": prompt_tokens,
        }
        chosen, options = kind_of(kind, own)
        from vllm_ext.data.model_files import snapshot
        from vllm_ext.training.draft_model import Recipe, split
        from vllm_ext.training.early_exits import shuffled
        from vllm_ext.training.figures.common import MOST_TOKENS

        folder = snapshot(target)
        source = Source(folder, prompts, answers, own_prompts, samples, max_tokens, top_k)
        shape = chosen.shape(folder, vocabulary, options)
        rate = chosen.learning_rate if learning_rate is None else learning_rate
        recipe = Recipe(minutes, batch_tokens or chosen.batch_tokens, rate, seed=seed)
        work = output / "work"
        same_settings(work, {**source.settings(), "kind": kind, "shape": shape, "tokens": tokens})
        started = time.perf_counter()
        with progress_on(errors) as report:
            given = source.answers(work, {"max_num_seqs": max_num_seqs, "dtype": dtype}, report, verbose)
            learnt, held_out = split(given, recipe)
            model = causal_model(folder, chosen_device(device), dtype)
            heads = chosen.prepare(
                Given(model, shape, folder, shuffled(learnt, seed), held_out, tokens, report)
            )
            del model

            def worth() -> float:
                return heads.figures(SIZES[-1:], QUICK).tokens_per_step[SIZES[-1]][0]

            told = worth if heads.has_test else None
            _, points = heads.train(recipe, work, report, lambda line: say(errors, line), told)
            found = heads.figures(SIZES, MOST_TOKENS)
        heads.save(output)
    say(
        console,
        f"{output}: {heads.num_parameters:,} parameters, {heads.num_tokens:,} tokens of answers learnt from",
    )
    _say_results(console, chosen.method, found, points, minutes, started, output)


def _say_results(
    console: Console,
    method: str,
    found: Any,
    points: list[tuple[int, float]],
    minutes: float,
    started: float,
    output: Path,
) -> None:
    """What they are worth, and how to serve them."""
    from vllm_ext.training.figures.common import per_doubling

    _say_figures(console, found)
    if (more := per_doubling(points)) is not None:
        say(
            console,
            f"{minutes:g} more minutes would bring about {max(more, 0.0):.2f} tokens a step with {SIZES[-1]}",
        )
    say(console, f"{(time.perf_counter() - started) / 60:.0f} minutes in all")
    if found.num_tokens and max(mean for mean, _ in found.tokens_per_step.values()) < LEAST_TOKENS:
        say(
            console,
            "do not serve this: raise --minutes, or give more prompts. Run again, it goes on from here",
        )
        return
    config = json.dumps({"method": method, "model": str(output.resolve())})
    say(console, f"serve with: --speculative-config '{config}'")


def _say_figures(console: Console, found: Any) -> None:
    if not found.num_tokens:
        say(console, "no greedy answer is among those held out: how good the heads are is not known")
        return
    say(
        console,
        f"on {found.num_tokens:,} tokens of greedy answers held out, right with the first 1, 2 and 4 choices:",
    )
    for depth, ranks in enumerate(found.right, 1):
        shares = ", ".join(f"{ranks[:many].sum():.3f}" for many in (1, 2, 4))
        say(console, f"  depth {depth}: {shares}")
    rates = ", ".join(
        f"{mean:.2f} ± {half:.2f} with {size}" for size, (mean, half) in found.tokens_per_step.items()
    )
    say(console, f"tokens a step with trees of so many nodes: {rates}")
