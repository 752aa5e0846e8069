# SPDX-License-Identifier: Apache-2.0
"""The kinds of heads that ``vllm-ext train heads`` trains, each by the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.cli.train.common import check_layers, dtype_of, layers_of, numbers_of

if TYPE_CHECKING:
    from vllm_ext.data.answers import Answer
    from vllm_ext.data.atomic_files import Progress
    from vllm_ext.kernels.sparse import Int32
    from vllm_ext.training.figures.common import HeadFigures
    from vllm_ext.training.medusa import Texts


@dataclass(frozen=True)
class Given:
    """What a kind makes its heads of."""

    model: Any  # the target, of transformers
    shape: dict[str, Any]  # of `Kind.shape`
    folder: Path  # of the target
    learnt: Sequence[Answer]
    held_out: Sequence[Answer]
    tokens: int  # of answers, at most
    report: Progress


@dataclass(frozen=True)
class Trainable:
    """Heads, and the answers that the target has read for them."""

    num_parameters: int
    num_tokens: int  # of answers, to learn from
    has_test: bool  # whether greedy answers are held out
    # Of a recipe, the work folder, progress, a log, and what they are worth; gives by tokens seen what they were worth.
    train: Callable[..., tuple[Any, list[tuple[int, float]]]]
    figures: Callable[..., HeadFigures]  # of sizes of trees, and of how many tokens
    save: Callable[[Path], None]


@dataclass(frozen=True)
class Kind:
    """One kind of heads. Options of `defaults` belong to it alone."""

    method: str  # that serves them
    defaults: Mapping[str, Any]
    batch_tokens: int
    learning_rate: float
    # Of the target's folder, the vocabulary and the options: the shape, of JSON's types.
    shape: Callable[[Path, int, dict[str, Any]], dict[str, Any]]
    prepare: Callable[[Given], Trainable]


def kind_of(name: str, options: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """A kind, and its own options: those that are None have their defaults.

    Raises:
        ValueError: no such kind, or an option of another one.
    """
    if name not in KINDS:
        raise ValueError(f"--kind={name!r} is not allowed; allowed: {', '.join(KINDS)}")
    own = KINDS[name].defaults
    for option, value in options.items():
        if value is not None and option not in own:
            of = ", ".join(kind for kind in KINDS if option in KINDS[kind].defaults)
            raise ValueError(
                f"--{option.replace('_', '-')}={value} is not allowed with --kind={name}; it belongs to "
                f"--kind={of}: leave one of them out"
            )
    return KINDS[name], {
        option: default if options[option] is None else options[option] for option, default in own.items()
    }


def _rows_shape(folder: Path, vocabulary: int, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "num_rows": vocabulary}


@dataclass(frozen=True)
class _LastStates:
    """Answers by the target's last hidden states, and the tokens that heads are to say."""

    learnt: Texts
    test: Texts
    token_map: Int32

    @property
    def numbers(self) -> tuple[int, bool]:
        """Tokens to learn from, and whether there are greedy answers to test with."""
        return len(self.learnt.hidden), bool(self.test.greedy.any())


def _last_states(given: Given) -> _LastStates:
    from vllm_ext.training import medusa

    model, num_rows = given.model, given.shape["num_rows"]
    texts = medusa.read(model, given.learnt, given.tokens, given.report)
    test = medusa.read(model, given.held_out, given.tokens, given.report)
    vocab_size = model.config.get_text_config().vocab_size
    return _LastStates(texts, test, medusa.frequent(texts.top_ids, texts.top_logp, vocab_size, num_rows))


def _medusa(given: Given) -> Trainable:
    from vllm_ext.training import medusa
    from vllm_ext.training.figures.medusa import figures

    model, read = given.model, _last_states(given)
    vocab_size = model.config.get_text_config().vocab_size
    weight = model.get_output_embeddings().weight.detach()[read.token_map].float()
    heads = medusa.Heads(medusa.MedusaShape(**given.shape), weight).to(weight.device)
    return Trainable(
        sum(parameter.numel() for parameter in heads.parameters()),
        *read.numbers,
        partial(medusa.train, heads, read.learnt, read.token_map),
        partial(figures, heads, read.test, read.token_map),
        partial(medusa.save, heads, read.token_map, vocab_size, dtype_of(given.folder)),
    )


def _clover(given: Given) -> Trainable:
    from vllm_ext.training import clover, medusa
    from vllm_ext.training.figures.clover import figures

    read = _last_states(given)
    heads = clover.begun(given.model, clover.Sizes(**given.shape), read.token_map, read.learnt)
    return Trainable(
        sum(parameter.numel() for parameter in heads.parameters()),
        *read.numbers,
        partial(medusa.train, heads, read.learnt, read.token_map),
        partial(figures, heads, read.test),
        partial(clover.save, heads, dtype_of(given.folder)),
    )


def _eagle_shape(folder: Path, vocabulary: int, options: dict[str, Any]) -> dict[str, Any]:
    num_layers = layers_of(folder)
    if options["aux_layers"]:
        layers = numbers_of("--aux-layers", options["aux_layers"])
        check_layers("--aux-layers", layers, folder, 1, num_layers)
    else:
        from vllm_ext.training.eagle import default_layers

        layers = list(default_layers(num_layers))
    return {**options, "aux_layers": layers, "num_rows": vocabulary}


def _eagle(name: str, given: Given) -> Trainable:
    from vllm_ext.training import eagle, eagle_texts, eagle_training
    from vllm_ext.training.eagle_relatives import chimera, falcon, fspad
    from vllm_ext.training.figures.eagle import figures

    kinds: dict[str, type[eagle.Head]] = {
        "eagle": eagle.Head,
        "chimera": chimera.ChimeraHead,
        "falcon": falcon.FalconHead,
        "fspad": fspad.FspadHead,
    }
    own = {name: value for name, value in given.shape.items() if name != "num_passes"}
    texts = eagle_texts.read(given.model, own["aux_layers"], given.learnt, given.tokens, given.report)
    test = eagle_texts.read(given.model, own["aux_layers"], given.held_out, given.tokens, given.report)
    dtype = dtype_of(given.folder)
    head = eagle.begun(given.model, eagle.EagleShape(**own), texts.frequent, dtype, kinds[name])
    return Trainable(
        sum(parameter.numel() for parameter in head.parameters()),
        len(texts.top_ids),
        bool(test.greedy.any()),
        partial(eagle_training.train, head, texts, given.shape["num_passes"]),
        partial(figures, head, test),
        partial(eagle.save, head),
    )


def _ppd_shape(folder: Path, vocabulary: int, options: dict[str, Any]) -> dict[str, Any]:
    return dict(options)


def _ppd(given: Given) -> Trainable:
    from vllm_ext.training import ppd
    from vllm_ext.training.draft_model import Recipe
    from vllm_ext.training.figures.common import MOST_TOKENS
    from vllm_ext.training.figures.ppd import figures

    model, held_out = given.model, given.held_out
    texts = ppd.readable(given.learnt, given.tokens)
    prompts = ppd.Prompts(model, given.shape["prompt_tokens"], Recipe().seed)

    def worth(sizes: Sequence[int], most: int = MOST_TOKENS) -> HeadFigures:
        return figures(model, prompts, held_out, sizes, Recipe().max_length, most)

    return Trainable(
        prompts.embeddings.numel(),
        sum(len(answer.top_ids) for answer in texts),
        any(answer.is_greedy for answer in held_out),
        partial(ppd.train, model, prompts, texts),
        worth,
        partial(ppd.save, prompts, model.get_output_embeddings().weight.shape[0], dtype_of(given.folder)),
    )


_OF_EAGLE = {"aux_layers": "", "num_passes": 4, "intermediate_size": 0}

KINDS = {
    "medusa": Kind("medusa_tree", {"num_heads": 4, "num_layers": 1}, 512, 1e-3, _rows_shape, _medusa),
    "clover": Kind("clover_tree", {"num_heads": 5, "intermediate_size": 0}, 512, 2e-3, _rows_shape, _clover),
    **{
        name: Kind("eagle_tree", _OF_EAGLE, 512, 2e-3, _eagle_shape, partial(_eagle, name))
        for name in ("eagle", "chimera", "falcon", "fspad")
    },
    "ppd": Kind("ppd", {"prompt_tokens": 3}, 192, 1e-2, _ppd_shape, _ppd),
}
