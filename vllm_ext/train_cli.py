# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext train``: draft models."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_ext.console import errors_of, progress_on, say

train_app = typer.Typer(help="Train what drafts.", no_args_is_help=True)

SETTINGS = "settings.json"  # of the work folder: what its answers and its checkpoint belong to
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")


@train_app.callback()
def _root() -> None:
    """Keeps ``draft`` a command of its own."""


@train_app.command("draft")
def draft_command(
    target: Annotated[str, typer.Option(help="The model to draft for: folder or Hugging Face id.")],
    output: Annotated[
        Path, typer.Option(help="Folder of the draft model. Its `work` holds answers and checkpoint.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL file of prompts, as `vllm-ext bench` takes them; may be given several times."
        ),
    ] = None,
    answers: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of answers that a server with `export_dir` has kept, in the place of prompts; may be given "
            "several times."
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Draft model to go on from, in the place of a new one; its shape is kept."),
    ] = None,
    hidden_size: Annotated[int, typer.Option(min=32)] = 192,
    num_layers: Annotated[int, typer.Option(min=1)] = 4,
    num_heads: Annotated[int, typer.Option(min=1, help="Divides the hidden size.")] = 3,
    intermediate_size: Annotated[int, typer.Option(min=32)] = 512,
    samples: Annotated[
        int, typer.Option(min=1, help="Answers of each prompt: one greedy, the others sampled.")
    ] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 256,
    top_k: Annotated[int, typer.Option(min=1, max=256, help="Alternatives kept of each of its tokens.")] = 16,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of training, answers left out.")] = 25.0,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 3e-3,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Prompts answered at once.")] = 32,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto: cuda where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Distil a small Llama from the target's answers; run again, it goes on where it was interrupted."""
    console, errors = Console(), Console(stderr=True)
    with errors_of(errors):
        from vllm_ext.bench_prompts import load_prompts
        from vllm_ext.draft_data import generate, load
        from vllm_ext.draft_training import Recipe, Shape, estimate, load_model, make_model, split, train
        from vllm_ext.vocabulary import snapshot

        if hidden_size % num_heads:
            raise ValueError(
                f"--hidden-size={hidden_size} is not allowed with --num-heads={num_heads}; it must be a multiple"
            )
        if bool(prompts) == bool(answers):
            raise ValueError(
                f"--prompts={prompts or []} and --answers={[*map(str, answers or [])]} are not allowed; one of them "
                "must be given, and not both"
            )
        folder = snapshot(target)
        chats = [prompt.messages for prompt in load_prompts([Path(file) for file in prompts or []])]
        shape = Shape(hidden_size, num_layers, num_heads, intermediate_size)
        recipe = Recipe(minutes=minutes, learning_rate=learning_rate, seed=seed)
        work = output / "work"
        _same_settings(
            work,
            {
                "target": str(folder),
                "chats": len(chats),
                "answers": [str(given.resolve()) for given in answers or []],
                "start": str(start and start.resolve()),
                "samples": samples,
                "max_tokens": max_tokens,
                "top_k": top_k,
                "shape": vars(shape),
            },
        )
        started = time.perf_counter()
        options = {"max_num_seqs": max_num_seqs, "enforce_eager": True}
        with progress_on(errors) as report:
            if answers:
                given, each = [answer for kept in answers for answer in load(kept)], 1
            else:
                generate(str(folder), chats, work / "answers", samples, max_tokens, top_k, options, report)
                given, each = load(work / "answers"), samples
            learnt, held_out = split(given, each, recipe)
            tokens = sum(len(answer.top_ids) for answer in learnt)
            model = (
                load_model(start, _device(device)) if start else make_model(folder, shape, _device(device))
            )
            train(model, learnt, recipe, work, report, lambda line: say(errors, line))
        found = estimate(model, held_out, recipe)
        model.to(_dtype_of(folder)).save_pretrained(output)
        for pattern in TOKENIZER_FILES:
            for file in folder.glob(pattern):
                (output / file.name).write_bytes(file.read_bytes())
    size = sum(parameter.numel() for parameter in model.parameters())
    say(console, f"{output}: {size / 1e6:.1f} million parameters, {tokens:,} tokens of answers learnt from")
    say(
        console,
        f"on {len(held_out)} answers held out: accepted {found.sampled_acceptance:.3f} when both sample at "
        f"temperature 1, {found.greedy_acceptance:.3f} when greedy; {found.chain_of_4:.2f} tokens a "
        f"step with four drafts in a row; {(time.perf_counter() - started) / 60:.0f} minutes in all",
    )
    config = json.dumps({"method": "dyspec", "model": str(output.resolve())})
    say(console, f"serve with: --speculative-config '{config}'")


def _same_settings(work: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on with what other settings began."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / SETTINGS
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1))
    elif (before := json.loads(file.read_text())) != settings:
        changed = ", ".join(
            f"{name}={settings[name]!r}, was {before.get(name)!r}"
            for name in settings
            if settings[name] != before.get(name)
        )
        raise ValueError(
            f"{work} was begun with other settings ({changed}); use those, another --output, or delete it"
        )


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
