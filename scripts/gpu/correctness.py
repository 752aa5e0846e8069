# SPDX-License-Identifier: Apache-2.0
"""Do trees put out plain's tokens: in captured graphs, in batches and alone, with what sampling has to offer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from engines import Engine

SEED = 7  # of the weights
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0, "presence_penalty": 0.4},
    {"temperature": 0},
    {"temperature": 0.7, "seed": 5, "min_p": 0.02},
)
# Words of the prompts and how often they are repeated: blocks are crossed at other places.
PROMPTS = ((7, 5), (33, 2), (5, 1), (90, 1)) * 2
ALONE = 0, 1, 6
SECOND_TURNS = 3  # on blocks that the first turn has written


def compared(engines: Mapping[str, Engine], vocab_size: int, tokens: int) -> Iterator[dict[str, Any]]:
    """One result for each engine; ``plain`` is among them.

    Args:
        engines: by name, all with the same random weights in the end.
        vocab_size: of their model.
        tokens: of each answer.
    """
    draw = random.Random(1)
    texts = [[draw.randrange(vocab_size) for _ in range(words)] * repeats for words, repeats in PROMPTS]
    params = [{"max_tokens": tokens, "ignore_eos": True, "logprobs": 2, **kind} for kind in KINDS]
    runs = {"batch": (texts, params)}
    runs |= {f"alone, {i}": (texts[i : i + 1], params[i : i + 1]) for i in ALONE}
    weights = {name: engine.call("probe_random_weights", SEED) for name, engine in engines.items()}
    outputs: dict[str, list[Any]] = {}
    for name in ["plain", *(name for name in engines if name != "plain")]:
        engine = engines[name]
        engine.call("probe_watch")
        outputs[name] = [engine.ask("generate", texts=t, params=p) for t, p in runs.values()]
        answers = outputs["plain"][0]["tokens"]
        again = [text + answer + [1, 2, 3] for text, answer in zip(texts, answers, strict=True)][
            :SECOND_TURNS
        ]
        outputs[name].append(engine.ask("generate", texts=again, params=params[:1] * SECOND_TURNS))
        yield {
            "engine": name,
            "weights": weights[name],
            "runs": [*runs, "second turn"],
            "compared": [compare(a, b) for a, b in zip(outputs["plain"], outputs[name], strict=True)],
            "steps": engine.call("probe_steps"),
        }


def compare(expected: Any, actual: Any) -> dict[str, Any]:
    """Answers of one run next to plain's: where they part, and how far plain's two best tokens are apart there."""
    parted, largest = [], 0.0
    for place, (want, got) in enumerate(zip(expected["tokens"], actual["tokens"], strict=True)):
        same = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
        plains, ours = expected["logprobs"][place], actual["logprobs"][place]
        for a, b in list(zip(plains, ours, strict=False))[:same]:
            largest = max([largest, *(abs(a[token] - b[token]) for token in a.keys() & b.keys())])
        if same is not None:
            best = sorted(plains[same].values(), reverse=True)
            parted.append([place, same, best[0] - best[1]])
    return {"answers": len(expected["tokens"]), "parted": parted, "largest_logprob_difference": largest}
