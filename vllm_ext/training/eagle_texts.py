# SPDX-License-Identifier: Apache-2.0
"""What a head of EAGLE-3 learns from: the target's features over its answers, and its distributions.

Answers stay whole, prompts included: the head attends to all that precedes. Only rows of outputs are learnt from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_ext.data.answers import Answer, leading
from vllm_ext.data.atomic_files import Progress
from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.draft_model import Recipe
from vllm_ext.training.medusa import frequent

READ_TOKENS = 2048  # that the target reads at once, padding counted
SORTED = 8  # batches whose answers are sorted by length, so that little is padded


@dataclass(frozen=True)
class EagleTexts:
    """Rows of all answers, one after the other, and of each answer those that learn.

    Row ``i`` of an answer is its token ``i``: the head reads it together with token ``i + 1`` and says token ``i + 2``.
    The first that learns is the prompt's last.
    """

    aux: (
        torch.Tensor
    )  # bfloat16 [num_rows, num_layers * hidden_size] the target's hidden states, layer after layer
    tokens: torch.Tensor  # int64 [num_rows] the token after each
    positions: torch.Tensor  # int64 [num_rows]
    starts: torch.Tensor  # int64 [num_answers + 1] of rows
    top_ids: torch.Tensor  # int64 [num_learning, top_k] alternatives for the token after the next, best first
    top_logp: torch.Tensor  # float32 [num_learning, top_k]
    learn_starts: torch.Tensor  # int64 [num_answers + 1] of those; each answer's are its last rows
    greedy: torch.Tensor  # bool [num_answers] whether the answer is the target's first choice throughout

    def frequent(self, vocab_size: int, num_rows: int) -> Int32:
        """See `medusa.frequent`."""
        return frequent(self.top_ids, self.top_logp, vocab_size, num_rows)


class Batch(NamedTuple):
    """Some answers: flat rows, and where these stand when answers are padded to one length."""

    rows: torch.Tensor  # int64 [num_rows] of the texts
    row_places: torch.Tensor  # int64 [num_rows] in [num_answers, row_length]
    row_length: int
    queries: torch.Tensor  # int64 [num_queries] places among `rows` of those that learn
    query_places: torch.Tensor  # int64 [num_queries] in [num_answers, query_length]
    query_length: int
    first: torch.Tensor  # int64 [num_answers] the first of an answer's rows that learns
    labels: torch.Tensor  # int64 [num_queries] of the texts' `top_ids`
    starts: torch.Tensor  # int64 [num_rows] where each row's answer begins among `rows`

    @property
    def depths(self) -> torch.Tensor:
        """int64 ``[num_queries]`` how many rows of the same answer that learn come before."""
        return self.query_places % self.query_length


def batch_of(texts: EagleTexts, answers: Sequence[int]) -> Batch:
    """The batch of these answers."""
    index = torch.as_tensor(answers)
    lengths = texts.starts[index + 1] - texts.starts[index]
    learning = texts.learn_starts[index + 1] - texts.learn_starts[index]
    first = lengths - learning
    rows, row_answers, row_offsets = _ranges(texts.starts[index], lengths)
    labels, query_answers, query_offsets = _ranges(texts.learn_starts[index], learning)
    row_length, query_length = int(lengths.max()), int(learning.max())
    before = torch.cumsum(lengths, 0) - lengths
    return Batch(
        rows,
        row_answers * row_length + row_offsets,
        row_length,
        (before + first)[query_answers] + query_offsets,
        query_answers * query_length + query_offsets,
        query_length,
        first,
        labels,
        before[row_answers],
    )


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of ranges one after the other the values, the numbers of their ranges, and the offsets within these."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    offsets = torch.arange(len(numbers)) - (torch.cumsum(lengths, 0) - lengths)[numbers]
    return starts[numbers] + offsets, numbers, offsets


def windows(tokens: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """The last tokens at each place.

    Args:
        tokens: int64 ``[num_rows]`` of several answers.
        starts: int64 ``[num_rows]`` the place where each one's answer begins.
        count: how many.

    Returns:
        int64 ``[num_rows, count]``, the row's own last; before an answer's first token, that one.
    """
    back = torch.arange(count - 1, -1, -1, device=tokens.device)
    at = torch.arange(len(tokens), device=tokens.device)[:, None] - back
    return tokens[torch.maximum(at, starts[:, None])]


def batches_of(texts: EagleTexts, batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Answers in an order of the seed, in batches with about so many rows that learn."""
    learning = torch.diff(texts.learn_starts).tolist()
    order = np.random.default_rng(seed).permutation(len(learning)).tolist()
    per_batch = max(round(batch_tokens * len(learning) / max(sum(learning), 1)), 1)
    for start in range(0, len(order), SORTED * per_batch):
        some = sorted(order[start : start + SORTED * per_batch], key=learning.__getitem__)
        parts = [some[place : place + per_batch] for place in range(0, len(some), per_batch)]
        yield from (parts[place] for place in np.random.default_rng([seed, start]).permutation(len(parts)))


@torch.no_grad()
def read(
    model: Any,
    layers: Sequence[int],
    answers: Sequence[Answer],
    most_tokens: int,
    report: Progress,
    max_length: int = Recipe.max_length,
) -> EagleTexts:
    """Run the target over answers, so many tokens of outputs at most.

    Args:
        model: a causal model of transformers.
        layers: after how many of its layers a hidden state is kept.
        answers: shuffled, if there are more.
        most_tokens: of outputs.
        report: progress in tokens.
        max_length: rows of an answer that are kept, the last ones.
    """
    device = next(model.parameters()).device
    kept, _ = leading([answer for answer in answers if len(answer.top_ids) > 1], most_tokens)
    # The token before the last is the last that says something about a token to come.
    sizes = [min(len(answer.tokens) - 2, max_length) for answer in kept]
    learning = [min(len(answer.top_ids) - 1, size) for answer, size in zip(kept, sizes, strict=True)]
    starts, learn_starts = (torch.tensor([0, *np.cumsum(each)]) for each in (sizes, learning))
    aux: torch.Tensor | None = None
    done = 0
    with hidden_states(model, layers) as found:
        for part in _by_length([len(answer.tokens) for answer in kept], READ_TOKENS):
            length = max(len(kept[index].tokens) for index in part)
            ids = torch.zeros(len(part), length, dtype=torch.long)
            for row, index in enumerate(part):
                ids[row, : len(kept[index].tokens)] = torch.from_numpy(kept[index].tokens)
            model.model(input_ids=ids.to(device), use_cache=False)
            states = torch.cat([found[layer] for layer in layers], -1).to("cpu", torch.bfloat16)
            if aux is None:
                aux = torch.empty(int(starts[-1]), states.shape[-1], dtype=torch.bfloat16)
            for row, index in enumerate(part):
                end = len(kept[index].tokens) - 2
                aux[starts[index] : starts[index + 1]] = states[row, end - sizes[index] : end]
                done += sizes[index]
            report("hidden states", done, int(starts[-1]))
    if aux is None:
        raise ValueError("no answer has two tokens of output; raise --max-tokens, or give other prompts")
    ends = [len(answer.tokens) - 2 for answer in kept]
    spans = list(zip(kept, ends, sizes, strict=True))
    tops = list(zip(kept, learning, strict=True))
    return EagleTexts(
        aux,
        torch.cat([torch.from_numpy(a.tokens[end - size + 1 : end + 1]).long() for a, end, size in spans]),
        torch.cat([torch.arange(end - size, end) for _, end, size in spans]),
        starts,
        torch.from_numpy(np.concatenate([a.top_ids[-many:] for a, many in tops]).astype(np.int64)),
        torch.from_numpy(np.concatenate([a.top_logp[-many:] for a, many in tops])),
        learn_starts,
        torch.tensor([answer.is_greedy for answer in kept]),
    )


def _by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches that hold no more than so much when padded, or one."""
    part: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and (len(part) + 1) * lengths[index] > budget:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


@contextmanager
def hidden_states(model: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """By layer, what the model's last pass put out after so many layers, before any norm.

    Raises:
        ValueError: it is not made of ``model.layers`` and ``model.norm``.
    """
    inner = getattr(model, "model", None)
    parts, norm = getattr(inner, "layers", None), getattr(inner, "norm", None)
    if parts is None or norm is None:
        raise ValueError(
            f"{type(model).__name__} has no model.layers and model.norm; --kind=eagle reads a model's layers: "
            "use --kind=medusa"
        )
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [
        (parts[layer] if layer < len(parts) else norm).register_forward_pre_hook(
            keep(layer), with_kwargs=True
        )
        for layer in layers
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
