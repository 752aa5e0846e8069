# SPDX-License-Identifier: Apache-2.0
"""Drafts of some of the target's layers, each trained for the same time: how often they are right, before and after.

    .venv/bin/python scripts/bench_layers.py --answers ANSWERS --search 8 --search-minutes 8
    .venv/bin/python scripts/bench_layers.py --answers ANSWERS --layers 0,1,2,9,16,22,28,29 --minutes 5

Answers are those of `vllm-ext train draft` (its folder `work/answers`), or of a server with ``export_dir``. The first
says which layers a search finds; it reads none of the answers that the second is judged by. Run them on a core of their
own.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from vllm_ext.data.answers import load
from vllm_ext.demo import embedded_model
from vllm_ext.training.draft_model import OF_LAYERS, Recipe, estimate, from_layers, split, train
from vllm_ext.training.drafts.layer_search import found_layers, spread

JUDGED = 40  # answers


def show(*parts: Any) -> None:
    """A line, at once."""
    print(*parts, flush=True)


def main() -> None:
    """Read the arguments and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="the target; none: the demo's")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--search", type=int, help="so many layers")
    parser.add_argument("--search-minutes", type=float, default=8.0)
    parser.add_argument("--layers", help="train these; 'spread8': eight, spread evenly")
    parser.add_argument("--minutes", type=float, default=5.0, help="0: not at all")
    arguments = parser.parse_args()
    target = arguments.model or embedded_model.ensure_model()
    recipe = Recipe(
        minutes=arguments.minutes,
        batch_tokens=OF_LAYERS.batch_tokens,
        learning_rate=OF_LAYERS.learning_rate,
        checkpoint_seconds=1e9,
    )
    learnt, held_out = split(load(arguments.answers), recipe)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.search is not None:
            minutes = arguments.search_minutes
            found = found_layers(target, learnt, arguments.search, recipe, minutes, Path(folder), "cpu", show)
            show("found:", ",".join(map(str, found)))
            return
        if arguments.layers.startswith("spread"):
            num_layers = AutoConfig.from_pretrained(target).num_hidden_layers
            layers = spread(num_layers, int(arguments.layers.removeprefix("spread")))
        else:
            layers = tuple(map(int, arguments.layers.split(",")))
        model = from_layers(target, layers, "cpu")
        show("layers", layers, "judged on", sum(len(a.top_ids) for a in held_out[:JUDGED]), "tokens")
        show("before training:", estimate(model, held_out[:JUDGED], recipe))
        if arguments.minutes > 0:
            train(model, learnt, recipe, Path(folder), lambda *_: None, show)
            show("after", arguments.minutes, "minutes:", estimate(model, held_out[:JUDGED], recipe))


if __name__ == "__main__":
    main()
