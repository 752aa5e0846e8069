# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext train draft``: distil a small draft model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    check_layers,
    chosen_device,
    dtype_of,
    layers_of,
    numbers_of,
)
from vllm_ext.training.sources import Source, same_settings

if TYPE_CHECKING:
    from vllm_ext.training.draft_model import Estimate

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")

# Below these a draft's passes cost more than its tokens bring, on any target that is worth a draft.
LEAST_ACCEPTED, LEAST_CHAIN = 0.1, 1.15
LEARNT_BY_HEART = 2.0  # times better on what it learnt from


def draft_command(
    target: Target,
    output: Annotated[
        Path, typer.Option(help="Folder of the draft model. Its `work` holds answers and checkpoint.")
    ],
    prompts: Prompts = None,
    answers: Answers = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Draft model to go on from, instead of a new one; its shape is kept."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of the target to begin as, instead of a new model: 0,1,2,29. Its width, embeddings and "
            "head are the target's: larger, and right from far fewer tokens."
        ),
    ] = None,
    search_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Of --layers so many, which a search before training finds."),
    ] = None,
    search_minutes: Annotated[float, typer.Option(min=0.01, help="Of that search.")] = 10.0,
    hidden_size: Annotated[int, typer.Option(min=32)] = 192,
    num_layers: Annotated[int, typer.Option(min=1)] = 4,
    num_heads: Annotated[int, typer.Option(min=1, help="Divides the hidden size.")] = 3,
    intermediate_size: Annotated[int, typer.Option(min=32)] = 512,
    own_prompts: OwnPrompts = 0,
    samples: Samples = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 256,
    top_k: TopK = 16,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of training, answers left out.")] = 25.0,
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="At its highest; not given: 3e-3, of layers 1e-3.")
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of answers in a step, about; not given: 2048, of layers 512."),
    ] = None,
    max_num_seqs: MaxNumSeqs = 128,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Distil a small Llama from the target's answers; run again, it goes on where it was interrupted."""
    console, errors = Console(), Console(stderr=True)
    with errors_of(errors):
        from vllm_ext.data.model_files import snapshot
        from vllm_ext.training.draft_model import (
            OF_LAYERS,
            Recipe,
            Shape,
            estimate,
            from_layers,
            has_embeddings_of,
            keep_embeddings,
            load_model,
            make_model,
            split,
            train,
        )
        from vllm_ext.training.drafts.layer_search import found_layers

        if hidden_size % num_heads:
            raise ValueError(
                f"--hidden-size={hidden_size} is not allowed with --num-heads={num_heads}; it must be a multiple"
            )
        begins = {"--search-layers": search_layers, "--layers": layers, "--start": start}
        if len(named := [f"{option}={value}" for option, value in begins.items() if value is not None]) > 1:
            raise ValueError(f"{' and '.join(named)} are not allowed together; a model begins as one of them")
        kept = None if layers is None else numbers_of("--layers", layers)
        folder = snapshot(target)
        if kept is not None:
            check_layers("--layers", kept, folder, 0, layers_of(folder) - 1)
        if search_layers is not None and search_layers >= layers_of(folder):
            raise ValueError(
                f"--search-layers={search_layers} is not allowed for {folder}: 1 to {layers_of(folder) - 1}"
            )
        of_layers = search_layers is not None or kept is not None
        of_layers = of_layers or (start is not None and has_embeddings_of(start, folder))
        usual = OF_LAYERS if of_layers else Recipe()
        source = Source(folder, prompts, answers, own_prompts, samples, max_tokens, top_k)
        shape = Shape(hidden_size, num_layers, num_heads, intermediate_size)
        recipe = Recipe(
            minutes=minutes,
            batch_tokens=usual.batch_tokens if batch_tokens is None else batch_tokens,
            learning_rate=usual.learning_rate if learning_rate is None else learning_rate,
            seed=seed,
        )
        work = output / "work"
        same_settings(
            work,
            {
                **source.settings(),
                "start": str(start and start.resolve()),
                "layers": kept if search_layers is None else f"{search_layers} searched",
                "shape": vars(shape),
            },
        )
        started = time.perf_counter()
        with progress_on(errors) as report:
            given = source.answers(work, {"max_num_seqs": max_num_seqs, "dtype": dtype}, report, verbose)
            learnt, held_out = split(given, recipe)
            tokens = sum(len(answer.top_ids) for answer in learnt)
            if search_layers is not None:
                kept = found_layers(
                    folder,
                    learnt,
                    search_layers,
                    recipe,
                    search_minutes,
                    work,
                    chosen_device(device),
                    lambda line: say(errors, line),
                )
                say(console, f"layers {','.join(map(str, kept))} of {layers_of(folder)} are kept")
            if start is not None:
                model = load_model(start, chosen_device(device))
                model = keep_embeddings(model) if of_layers else model
            elif kept is not None:
                model = from_layers(folder, kept, chosen_device(device))
            else:
                model = make_model(folder, shape, chosen_device(device))
            train(model, learnt, recipe, work, report, lambda line: say(errors, line))
        found = estimate(model, held_out, recipe)
        seen = estimate(model, learnt[:: max(len(learnt) // len(held_out), 1)][: len(held_out)], recipe)
        model.to(dtype_of(folder)).save_pretrained(output)
        for pattern in TOKENIZER_FILES:
            for file in folder.glob(pattern):
                (output / file.name).write_bytes(file.read_bytes())
    size = sum(parameter.numel() for parameter in model.parameters())
    say(console, f"{output}: {size / 1e6:.1f} million parameters, {tokens:,} tokens of answers learnt from")
    say(
        console,
        f"on {len(held_out)} answers held out: accepted {found.sampled_acceptance:.3f} when both sample at "
        f"temperature 1, {found.greedy_acceptance:.3f} when greedy ({seen.greedy_acceptance:.3f} on as many that it "
        f"learnt from; {found.on_greedy_answers:.3f} on greedy answers held out); {found.chain_of_4:.2f} tokens a step "
        f"with four drafts in a row; {(time.perf_counter() - started) / 60:.0f} minutes in all",
    )
    if warning := _not_to_be_served(found, seen):
        say(console, warning)
        return
    config = json.dumps({"method": "dyspec", "model": str(output.resolve())})
    say(console, f"serve with: --speculative-config '{config}'")


def _not_to_be_served(found: Estimate, seen: Estimate) -> str | None:
    """What is to be said of a draft that would slow its target down; None of one that may pay.

    Args:
        found: on answers held out.
        seen: on as many that it learnt from.
    """
    if found.chain_of_4 >= LEAST_CHAIN and found.greedy_acceptance >= LEAST_ACCEPTED:
        return None
    by_heart = seen.greedy_acceptance > LEARNT_BY_HEART * max(found.greedy_acceptance, 0.01)
    raise_what = (
        "more prompts: --own-prompts 1600 has the target write them, or give more --prompts"
        if by_heart and seen.greedy_acceptance >= LEAST_ACCEPTED
        else "--minutes first, then --own-prompts; --layers, the target's own, learn from far fewer tokens"
    )
    return (
        f"do not serve this: {found.chain_of_4:.2f} tokens a step cost more than they bring, and answers would come "
        f"slower than without it. Raise {raise_what}. Run again, it goes on from here"
    )
