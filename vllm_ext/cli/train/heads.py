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
    dtype_of,
)
from vllm_ext.cli.train.prompt_tokens import train_prompt_tokens
from vllm_ext.training.sources import Source, same_settings

METHODS = {"medusa": "medusa_tree", "ppd": "ppd"}  # by kind
RATES = {"medusa": 1e-3, "ppd": 1e-2}  # of learning, at its highest
BATCHES = {"medusa": 512, "ppd": 192}  # tokens of a step
SIZES = (4, 8, 16)  # nodes of trees in the figures
QUICK = 1000  # tokens of the figures that are asked for while it trains
LEAST_TOKENS = 1.2  # a step; with less heads cost more than they bring


def heads_command(
    target: Target,
    output: Annotated[
        Path, typer.Option(help="Folder of the heads. Its `work` holds answers and checkpoint.")
    ],
    kind: Annotated[str, typer.Option(help="medusa, or ppd: prompt tokens instead of heads.")] = "medusa",
    prompts: Prompts = None,
    answers: Answers = None,
    num_heads: Annotated[int, typer.Option(min=1, max=16, help="Depths of the tree.")] = 4,
    num_layers: Annotated[int, typer.Option(min=1, max=8, help="Of each head.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=8, help="Of ppd: depths of the tree.")] = 3,
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
        float | None, typer.Option(min=0.0, help="At its highest; none: 0.001, of ppd 0.01.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a step; none: 512, of ppd 192 prompt tokens.")
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
        if kind not in METHODS:
            raise ValueError(f"--kind={kind!r} is not allowed; allowed: {', '.join(METHODS)}")
        from vllm_ext.data.model_files import snapshot
        from vllm_ext.training import medusa
        from vllm_ext.training.draft_model import Recipe, split
        from vllm_ext.training.early_exits import shuffled
        from vllm_ext.training.head_figures import figures

        folder = snapshot(target)
        source = Source(folder, prompts, answers, own_prompts, samples, max_tokens, top_k)
        recipe = Recipe(minutes, batch_tokens or BATCHES[kind], learning_rate or RATES[kind], seed=seed)
        started = time.perf_counter()
        if kind == "ppd":
            engine_options = {"max_num_seqs": max_num_seqs, "dtype": dtype}
            trained = train_prompt_tokens(
                folder,
                output,
                source,
                prompt_tokens,
                tokens,
                SIZES,
                recipe,
                engine_options,
                chosen_device(device),
                errors,
                verbose,
            )
            say(
                console, f"{output}: {prompt_tokens} prompt tokens, {trained.num_tokens:,} tokens learnt from"
            )
            _say_results(console, kind, trained.figures, trained.points, minutes, started, output)
            return
        shape = medusa.MedusaShape(num_heads, num_layers, vocabulary)
        work = output / "work"
        same_settings(work, {**source.settings(), "kind": kind, "shape": vars(shape), "tokens": tokens})
        with progress_on(errors) as report:
            given, each = source.answers(
                work, {"max_num_seqs": max_num_seqs, "dtype": dtype}, report, verbose
            )
            learnt, held_out = split(given, each, recipe)
            model = causal_model(folder, chosen_device(device), dtype)
            texts = medusa.read(model, shuffled(learnt, seed), tokens, report)
            test = medusa.read(model, held_out, tokens, report)
            vocab_size = model.config.get_text_config().vocab_size
            token_map = medusa.frequent(texts, vocab_size, vocabulary)
            weight = model.get_output_embeddings().weight.detach()[token_map].float()
            del model
            heads = medusa.Heads(shape, weight).to(weight.device)

            def worth() -> float:
                return figures(heads, test, token_map, SIZES[-1:], QUICK).tokens_per_step[SIZES[-1]][0]

            told = worth if test.greedy.any() else None
            _, points = medusa.train(
                heads, texts, token_map, recipe, work, report, lambda line: say(errors, line), told
            )
            found = figures(heads, test, token_map, SIZES)
        medusa.save(heads, token_map, vocab_size, dtype_of(folder), output)
    size = sum(parameter.numel() for parameter in heads.parameters())
    say(
        console,
        f"{output}: {size / 1e6:.1f} million parameters, {len(texts.hidden):,} tokens of answers learnt from",
    )
    _say_results(console, kind, found, points, minutes, started, output)


def _say_results(
    console: Console,
    kind: str,
    found: Any,
    points: list[tuple[int, float]],
    minutes: float,
    started: float,
    output: Path,
) -> None:
    """What they are worth, and how to serve them."""
    from vllm_ext.training.head_figures import per_doubling

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
    config = json.dumps({"method": METHODS[kind], "model": str(output.resolve())})
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
