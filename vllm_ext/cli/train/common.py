# SPDX-License-Identifier: Apache-2.0
"""What the commands of ``vllm-ext train`` have in common: options, and the target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

# Options that commands share.
Target = Annotated[
    str, typer.Option("--model", "--target", help="The model to draft for: folder or Hugging Face id.")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help="JSONL file of prompts, as `vllm-ext bench` takes them; may be given several times."),
]
Answers = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of answers that a server with `export_dir` has kept, instead of prompts; may be given "
        "several times."
    ),
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


def layers_of(folder: Path) -> int:
    """How many layers a model has."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).get_text_config().num_hidden_layers)


def check_layers(option: str, numbers: Sequence[int], folder: Path, least: int, most: int) -> None:
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


def numbers_of(option: str, given: str) -> list[int]:
    """Of an option's value, ascending.

    Raises:
        ValueError: it is no list of numbers.
    """
    try:
        numbers = sorted({int(part) for part in given.split(",")})
    except ValueError:
        raise ValueError(
            f"{option}={given!r} is not allowed; it must be numbers of layers with commas: 4,8"
        ) from None
    return numbers


def causal_model(folder: Path, device: str, dtype: str) -> Any:
    """The target as transformers loads it.

    Raises:
        ValueError: no such dtype.
    """
    import torch
    from transformers import AutoModelForCausalLM

    wanted = dtype_of(folder) if dtype == "auto" else getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"--dtype={dtype!r} is not allowed; allowed: auto, bfloat16, float16, float32")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=wanted).to(device).eval()


def chosen_device(wanted: str) -> str:
    """``--device``, with auto resolved."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def dtype_of(folder: Path) -> Any:
    """The target's, which the draft is served in."""
    import torch

    config = json.loads((folder / "config.json").read_text())
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
