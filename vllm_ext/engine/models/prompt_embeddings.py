# SPDX-License-Identifier: Apache-2.0
"""Embeddings of prompt tokens behind the target's own, so that the model as it is compiled looks them up by id.

A checkpoint is a folder with ``config.json`` and the tensor ``prompt_embeddings`` ``[num_prompt_tokens, hidden_size]``,
rows as the target's table has them. Prompt token ``i`` has the id ``vocab_size + i``. The longer table takes the place
of the target's in the layer that reads it; heads that were tied to the table keep its first rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ext.engine.models.checkpoint import Checkpoint

WAY_OUT = "Name a folder that `vllm-ext train heads --kind ppd` has made for this model."
ARCHITECTURE = "PromptTokens"
WEIGHT = "prompt_embeddings"
# Behind the target's rows, whatever the number of prompt tokens is: compiled graphs are kept by what is configured, and
# know how long the table is.
MORE_ROWS = 64


class PromptShape(NamedTuple):
    """Of a checkpoint's config."""

    num_prompt_tokens: int
    hidden_size: int
    vocab_size: int


def read_shape(name: str) -> tuple[Checkpoint, PromptShape]:
    """The folder of prompt tokens and their shape.

    Raises:
        ValueError: there is no such folder, or its config is not one of prompt tokens.
    """
    checkpoint = Checkpoint(name, WAY_OUT)
    checkpoint.expect(ARCHITECTURE, "prompt tokens")
    return checkpoint, PromptShape(*checkpoint.numbers(PromptShape._fields))


def check(vllm_config: Any, name: str, num_prompt_tokens: int) -> None:
    """Refuse at start-up prompt tokens that do not fit the target, and engines whose embeddings are not one table.

    Args:
        vllm_config: the engine's.
        name: folder or hub name.
        num_prompt_tokens: that are asked for.

    Raises:
        ValueError: naming what does not fit, and the way out.
    """
    checkpoint, shape = read_shape(name)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks > 1:
        raise ValueError(
            f"tensor_parallel_size={ranks} does not work with speculative method 'ppd': it must be 1, as each rank "
            "holds a part of the embeddings. Change it, or choose another method."
        )
    if vllm_config.lora_config is not None:
        raise ValueError(
            "enable_lora=True does not work with speculative method 'ppd': it must be off, as adapters have no rows "
            "for prompt tokens. Leave it out, or choose another method."
        )
    checkpoint.check_sizes(vllm_config, shape.hidden_size, shape.vocab_size)
    if num_prompt_tokens > shape.num_prompt_tokens:
        raise ValueError(
            f"speculative_config.num_prompt_tokens={num_prompt_tokens} is not allowed: {name!r} has "
            f"{shape.num_prompt_tokens}. Lower it, or train more with --prompt-tokens."
        )


def load(name: str) -> torch.Tensor:
    """``[num_prompt_tokens, hidden_size]`` of a checkpoint, on the CPU.

    Raises:
        ValueError: the tensor is missing, has another shape than the config says, or is not finite.
    """
    from safetensors.torch import load_file

    checkpoint, shape = read_shape(name)
    stored = [load_file(file) for file in sorted(checkpoint.folder.glob("*.safetensors"))]
    found = next((tensors[WEIGHT] for tensors in stored if WEIGHT in tensors), None)
    wanted = shape.num_prompt_tokens, shape.hidden_size
    if found is None or tuple(found.shape) != wanted or not bool(torch.isfinite(found).all()):
        there = "missing" if found is None else f"{list(found.shape)}, or not finite"
        raise checkpoint.error(f": {WEIGHT} is {there}; it must be finite {list(wanted)}")
    return found


def extend(model: Any, embeddings: torch.Tensor, vocab_size: int) -> None:
    """Put rows behind those of a model's table of embeddings, from ``vocab_size`` on.

    Args:
        model: vLLM's, loaded.
        embeddings: ``[num_prompt_tokens, hidden_size]``, at most `MORE_ROWS`.
        vocab_size: number of token ids of the model.

    Raises:
        ValueError: the model has no table that can be longer, or several; the message says why not.
    """
    layer = _table_of(model, vocab_size)
    old = layer.weight
    rows = len(old)
    table = old.new_zeros((rows + MORE_ROWS, old.shape[1]))
    table[:rows] = old
    table[vocab_size : vocab_size + len(embeddings)] = embeddings.to(table)
    # A head that is tied to the table has the same parameter, and multiplies by what it had.
    tied = [
        other for other in model.modules() if other is not layer and getattr(other, "weight", None) is old
    ]
    for other in tied:
        other.weight = _like(old, table[:rows])
    layer.weight = _like(old, table)


def only_table(model: Any, method: str) -> tuple[str, Any]:
    """The only layer of a model that looks tokens up, and its name; of one with adapters, what it adapts.

    Args:
        model: vLLM's, loaded.
        method: that needs it.

    Raises:
        ValueError: there is none of vLLM's own kind, or several.
    """
    from vllm.model_executor.layers import vocab_parallel_embedding as layers

    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, layers.VocabParallelEmbedding) and not isinstance(layer, layers.ParallelLMHead)
    }
    if len(found) != 1:
        names = ", ".join(found) or "none of vLLM's own kind"
        raise _unfit(model, method, f"it has {len(found)} tables of embeddings ({names}), not one")
    return next(iter(found.items()))


def _table_of(model: Any, vocab_size: int) -> Any:
    """The only table, if it can be longer.

    Raises:
        ValueError: there is none, several, or one that is quantised or not whole.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    name, layer = only_table(model, "ppd")
    if not isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
        raise _unfit(model, "ppd", f"{name} is quantised ({type(layer.quant_method).__name__})")
    if layer.tp_size != 1 or layer.org_vocab_size != vocab_size or layer.num_embeddings != vocab_size:
        raise _unfit(
            model,
            "ppd",
            f"{name} has {layer.num_embeddings} rows on {layer.tp_size} ranks, not {vocab_size} on one",
        )
    return layer


def _unfit(model: Any, method: str, why: str) -> ValueError:
    return ValueError(
        f"speculative method {method!r} does not work with {type(model).__name__}: {why}. Choose another method."
    )


def _like(old: torch.nn.Parameter, values: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with what vLLM has noted on another one: how it is loaded."""
    made = torch.nn.Parameter(values, requires_grad=False)
    made.__dict__.update(old.__dict__)
    return made
