# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext train``: draft models, and heads of early exits."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_ext.cli.console import errors_of, progress_on, say
from vllm_ext.training.sources import Source, same_settings

if TYPE_CHECKING:
    from vllm_ext.training.draft_model import Estimate

train_app = typer.Typer(help="Train draft models and exit heads.", no_args_is_help=True)

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")

# Options that both commands have.
Prompts = Annotated[
    list[str] | None,
    typer.Option(help="JSONL file of prompts, as `vllm-ext bench` takes them; may be given several times."),
]
OwnPrompts = Annotated[
    int,
    typer.Option(
        min=0, help="Prompts that the target, a chat model, writes itself, beside those that are given."
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Answers of each prompt: one greedy, the others sampled.")]
TopK = Annotated[int, typer.Option(min=1, max=256, help="Alternatives kept of each of its tokens.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Prompts answered at once.")]
Dtype = Annotated[
    str, typer.Option(help="Of the target that is learnt from. float32 is faster on a CPU without AVX-512.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda; auto: cuda where there is one.")]
Seed = Annotated[int, typer.Option(min=0)]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")]

# Below these a draft's passes cost more than its tokens bring, on any target that is worth a draft.
LEAST_ACCEPTED, LEAST_CHAIN = 0.1, 1.15
LEARNT_BY_HEART = 2.0  # times better on what it learnt from


@train_app.command("draft", short_help="Distil a small draft model from the target's answers.")
def draft_command(
    target: Annotated[
        str, typer.Option("--model", "--target", help="The model to draft for: folder or Hugging Face id.")
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of the draft model. Its `work` holds answers and checkpoint.")
    ],
    prompts: Prompts = None,
    answers: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of answers that a server with `export_dir` has kept, instead of prompts; may be given "
            "several times."
        ),
    ] = None,
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

        if hidden_size % num_heads:
            raise ValueError(
                f"--hidden-size={hidden_size} is not allowed with --num-heads={num_heads}; it must be a multiple"
            )
        if layers is not None and start is not None:
            raise ValueError(
                f"--layers={layers} and --start={start} are not allowed together; a model begins as one of them"
            )
        kept = None if layers is None else _numbers("--layers", layers)
        folder = snapshot(target)
        if kept is not None:
            _check_layers("--layers", kept, folder, 0, _num_layers(folder) - 1)
        of_layers = kept is not None or (start is not None and has_embeddings_of(start, folder))
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
                "layers": kept,
                "shape": vars(shape),
            },
        )
        started = time.perf_counter()
        with progress_on(errors) as report:
            given, each = source.answers(
                work, {"max_num_seqs": max_num_seqs, "dtype": dtype}, report, verbose
            )
            learnt, held_out = split(given, each, recipe)
            tokens = sum(len(answer.top_ids) for answer in learnt)
            if start is not None:
                model = load_model(start, _device(device))
                model = keep_embeddings(model) if of_layers else model
            elif kept is not None:
                model = from_layers(folder, kept, _device(device))
            else:
                model = make_model(folder, shape, _device(device))
            train(model, learnt, recipe, work, report, lambda line: say(errors, line))
        found = estimate(model, held_out, recipe)
        seen = estimate(model, learnt[:: max(len(learnt) // len(held_out), 1)][: len(held_out)], recipe)
        model.to(_dtype_of(folder)).save_pretrained(output)
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


@train_app.command("exits", short_help="Train heads of early exits, for layerskip and del.")
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
        numbers = _numbers("--exits", exits)
        _check_layers("--exits", numbers, folder, 1, _num_layers(folder) - 1)
        source = Source(folder, prompts, answers, own_prompts, samples, max_tokens, top_k)
        work = output.with_name(output.name + ".work")
        same_settings(work, source.settings())
        started = time.perf_counter()
        heads, rows = {}, []
        with progress_on(errors) as report:
            given, each = source.answers(
                work, {"max_num_seqs": max_num_seqs, "dtype": dtype}, report, verbose
            )
            learnt, held_out = split(given, each, Recipe(seed=seed))
            model = _causal_model(folder, _device(device), dtype)
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


def _num_layers(folder: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).get_text_config().num_hidden_layers)


def _check_layers(option: str, numbers: Sequence[int], folder: Path, least: int, most: int) -> None:
    """Refuse layers that the target does not have, before it is loaded.

    Raises:
        ValueError: naming the option.
    """
    if wrong := [number for number in numbers if not least <= number <= most]:
        given = ",".join(map(str, numbers))
        raise ValueError(
            f"{option}={given} is not allowed; allowed for {folder}: {least} to {most}, and not "
            f"{', '.join(map(str, wrong))}"
        )


def _numbers(option: str, given: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in given.split(",")})
    except ValueError:
        raise ValueError(
            f"{option}={given!r} is not allowed; it must be numbers of layers with commas: 4,8"
        ) from None
    return numbers


def _causal_model(folder: Path, device: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    wanted = _dtype_of(folder) if dtype == "auto" else getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"--dtype={dtype!r} is not allowed; allowed: auto, bfloat16, float16, float32")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=wanted).to(device).eval()


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def _dtype_of(folder: Path) -> Any:
    """The target's, which the draft is served in."""
    import torch

    config = json.loads((folder / "config.json").read_text())
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
