# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext train heads --kind ppd``: embeddings of prompt tokens, at which the target guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vllm_ext.cli.output.console import progress_on, say
from vllm_ext.cli.train.common import causal_model, dtype_of
from vllm_ext.training.sources import Source, same_settings

QUICK = 600  # tokens of the figures that are asked for while it trains
MOST = 4000  # of those at the end


class Trained(NamedTuple):
    """What there is to say of them."""

    num_tokens: int  # of answers learnt from
    figures: Any  # `vllm_ext.training.head_figures.HeadFigures`
    points: list[tuple[int, float]]  # by prompt tokens learnt from, tokens a step with the largest tree


def train_prompt_tokens(
    folder: Path,
    output: Path,
    source: Source,
    count: int,
    tokens: int,
    sizes: tuple[int, ...],
    recipe: Any,
    engine_options: dict[str, Any],
    device: str,
    errors: Console,
    verbose: bool,
) -> Trained:
    """Train prompt tokens and write their checkpoint.

    Args:
        folder: of the target.
        output: folder of the checkpoint; its ``work`` holds answers and what a run goes on from.
        source: of the answers.
        count: prompt tokens.
        tokens: most tokens of answers to learn from.
        sizes: rows of trees in the figures.
        recipe: of `vllm_ext.training.draft_model.Recipe`.
        engine_options: of the engine that answers; ``dtype`` is that of the target, which is learnt from.
        device: that trains.
        errors: takes progress.
        verbose: whether vLLM's log is shown.
    """
    from vllm_ext.training import ppd
    from vllm_ext.training.draft_model import split
    from vllm_ext.training.early_exits import shuffled
    from vllm_ext.training.ppd_figures import figures

    work = output / "work"
    same_settings(work, {**source.settings(), "kind": "ppd", "prompt_tokens": count, "tokens": tokens})
    with progress_on(errors) as report:
        given, each = source.answers(work, engine_options, report, verbose)
        learnt, held_out = split(given, each, recipe)
        learnt = ppd.readable(shuffled(learnt, recipe.seed), tokens)
        model = causal_model(folder, device, engine_options["dtype"])
        prompts = ppd.Prompts(model, count, recipe.seed)

        def worth(most: int = QUICK, asked: tuple[int, ...] = sizes[-1:]) -> Any:
            return figures(model, prompts, held_out, asked, recipe.max_length, most)

        def quick() -> float:
            return float(worth().tokens_per_step[sizes[-1]][0])

        told = quick if worth(1).num_tokens else None
        _, points = ppd.train(
            model, prompts, learnt, recipe, work, report, lambda line: say(errors, line), told
        )
        found = worth(MOST, sizes)
    ppd.save(prompts, model.get_output_embeddings().weight.shape[0], dtype_of(folder), output)
    return Trained(sum(len(answer.top_ids) for answer in learnt), found, points)
