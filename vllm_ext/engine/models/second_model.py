# SPDX-License-Identifier: Apache-2.0
"""A second model beside the target, for drafts or for sampling rules: its config, its weights, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from vllm.config import ModelConfig, SpeculativeConfig, set_current_vllm_config
from vllm.config.utils import replace
from vllm.logger import init_logger

from vllm_ext.data import model_files
from vllm_ext.proposers.draft_model import SELF

logger = init_logger("vllm.vllm_ext")

SPECULATION = "speculative_config"


class Chosen(Protocol):
    """Options that say which model it is."""

    @property
    def model(self) -> str:
        """A folder, a hub name, or 'self': the target's own first layers."""

    @property
    def self_layers(self) -> int | None:
        """How many of those; None: a quarter."""


def load(vllm_config: Any, options: Chosen, target: Any, prefix: str) -> tuple[Any, Any, list[str]]:
    """Build the model and load its weights; its layers then take part in vLLM's sizing of the caches.

    Args:
        vllm_config: the target's.
        options: which model.
        target: vLLM's model, loaded.
        prefix: of the names of its layers.

    Returns:
        its own VllmConfig, the model, and the names of its attention layers.
    """
    from vllm.compilation.backends import set_model_tag
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader import get_model

    config = replace(vllm_config, model_config=second_model_config(vllm_config, options), quant_config=None)
    context = vllm_config.compilation_config.static_forward_context
    before = set(context)
    with set_current_vllm_config(vllm_config), set_model_tag(prefix):
        if options.model == SELF:
            model = _first_layers(config, target, prefix)
        else:
            model = get_model(vllm_config=config, prefix=prefix)
    # Experts are among vLLM's layers too.
    own = [
        name
        for name, layer in context.items()
        if name not in before and isinstance(layer, AttentionLayerBase)
    ]
    return config, model, own


def with_speculation(vllm_config: Any, **given: Any) -> Any:
    """The target's VllmConfig, with vLLM's own speculation in it; layers are found by what both share.

    Args:
        vllm_config: the target's; it is left as it is.
        given: as ``--speculative-config`` takes it.

    Raises:
        ValueError: vLLM's own, for what it does not take.
    """
    made = copy.copy(vllm_config)
    made.speculative_config = SpeculativeConfig(
        **given,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )
    return made


def log_draft(options: Chosen, model: Any, layers: Sequence[str]) -> None:
    """Say at start-up what a draft model holds.

    Args:
        options: which model.
        model: it.
        layers: names of its attention layers.
    """
    own, shared = weight_bytes(model), 0
    if options.model == SELF:
        shared, own = own, 0
    logger.info(
        "vllm-ext: draft model %s: %d layers, %.1f MB of weights of its own (%.1f MB are the target's); its KV is "
        "counted with the target's",
        options.model,
        len(layers),
        own / 1e6,
        shared / 1e6,
    )


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights, also of those that layers on CPUs have packed for their products and let go of."""
    from vllm.model_executor.layers.linear import LinearBase

    total: int = sum(parameter.nbytes for parameter in model.parameters())
    for layer in model.modules():
        weight = getattr(layer, "weight", None)  # of a quantised target's layers there is none
        if weight is None or weight.numel():
            continue
        if hasattr(layer, "packed_bytes"):
            total += layer.packed_bytes
        elif isinstance(layer, LinearBase):
            inputs = getattr(layer, "input_size_per_partition", layer.input_size)
            outputs = getattr(layer, "output_size_per_partition", layer.output_size)
            total += inputs * outputs * weight.element_size()
    return total


def second_model_config(vllm_config: Any, options: Chosen, field: str = SPECULATION) -> Any:
    """vLLM's ModelConfig of it.

    Args:
        vllm_config: the target's.
        options: which model.
        field: what errors call the options.

    Raises:
        ValueError: vLLM's own for a model it does not know or cannot load; or of a target whose layers cannot be taken.
    """
    target = vllm_config.model_config
    overrides: dict[str, Any] = {}
    name, revision = options.model, None
    if options.model == SELF:
        name, revision = target.model, target.revision
        overrides = _slice_of(target, options, vllm_config.lora_config, field)
    return ModelConfig(
        model=name,
        revision=revision,
        tokenizer=target.tokenizer,
        tokenizer_revision=target.tokenizer_revision,
        tokenizer_mode=target.tokenizer_mode,
        trust_remote_code=target.trust_remote_code,
        dtype=target.dtype,
        seed=target.seed,
        max_model_len=target.max_model_len,
        enforce_eager=target.enforce_eager,
        hf_overrides=overrides,
    )


def _slice_of(target: Any, options: Chosen, lora_config: Any, field: str) -> dict[str, Any]:
    text = target.hf_text_config
    whole: int = text.num_hidden_layers
    layers = options.self_layers or max(whole // 4, 1)
    if layers > whole:
        raise ValueError(
            f"{field}.self_layers={layers} is not allowed; allowed: 1 to {whole}, the layers of "
            f"{target.model}."
        )
    if lora_config is not None or target.is_multimodal_model:
        raise ValueError(
            f"{field}.model='self' does not work with "
            f"{'LoRA' if lora_config is not None else 'a multimodal model'}; name one."
        )
    if _is_recurrent(target):
        raise ValueError(
            f"{field}.model='self' does not work with a model that has recurrent layers; name one."
        )
    types = getattr(text, "layer_types", None)
    return {"num_hidden_layers": layers, **({"layer_types": types[:layers]} if types else {})}


def _is_recurrent(model_config: Any) -> bool:
    return bool(model_config.is_hybrid or model_config.is_attention_free)


def _first_layers(config: Any, target: Any, prefix: str) -> Any:
    """The target's first layers, norm and head as a model: the same weights, attention layers of its own."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(config.model_config.dtype), torch.device(config.device_config.device):
        model = initialize_model(config, prefix=prefix)
    _share(model, target)
    return model.eval()


def _share(module: Any, source: Any) -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    for name, child in list(module.named_children()):
        if not any(isinstance(part, AttentionLayerBase) for part in child.modules()):
            setattr(module, name, getattr(source, name))
        elif not isinstance(child, AttentionLayerBase):
            _share(child, getattr(source, name))


def check_reads_text(vllm_config: Any, field: str) -> None:
    """Refuse at start-up a target that may be shown what a second model, which reads tokens beside it, cannot see.

    Raises:
        ValueError: with the way out.
    """
    target = vllm_config.model_config
    if target.supports_multimodal_inputs:
        raise ValueError(
            f"{field}: a companion model reads text, and {target.model} takes images, audio or video too; switch "
            "these off with --limit-mm-per-prompt, 0 of each, or leave the rule out."
        )


def check(vllm_config: Any, options: Chosen, field: str = SPECULATION) -> Any:
    """Refuse at start-up a model that does not fit the target; ``field`` is what errors call the options.

    Returns:
        vLLM's ModelConfig of it.

    Raises:
        ValueError: naming it, what does not fit, and the way out.
    """
    target = vllm_config.model_config
    ranks = vllm_config.parallel_config.data_parallel_size
    if ranks > 1 and target.is_moe:
        # Ranks of such a target take every forward pass together; the second model's passes are one rank's own.
        raise ValueError(
            f"data_parallel_size={ranks}: {field}.model works beside {target.model}, whose experts are shared by the "
            "ranks, with 1 only; serve each rank on its own, or leave it out."
        )
    try:
        model_config = second_model_config(vllm_config, options, field)
    except (OSError, ValueError) as error:
        if str(error).startswith(f"{field}."):
            raise
        raise ValueError(
            f"{field}.model={options.model!r} cannot be used beside {target.model} with "
            f"max_model_len={target.max_model_len}: {error}"
        ) from error
    if _is_recurrent(model_config):
        raise ValueError(
            f"{field}.model={options.model!r} has recurrent layers, whose state its passes could not take back; choose "
            "one of attention alone."
        )
    if options.model == SELF:
        return model_config
    theirs, ours = (
        model_files.load_tokenizer(name, revision)
        for name, revision in ((target.tokenizer, target.tokenizer_revision), (options.model, None))
    )
    if model_files.vocabulary_hash(theirs) != model_files.vocabulary_hash(ours):
        raise ValueError(
            f"{field}.model={options.model!r}: its tokenizer is not {target.tokenizer}'s; it "
            "must be the target's, id for id. Choose another."
        )
    if (rows := model_config.get_vocab_size()) < (needed := model_files.vocab_size(theirs)):
        raise ValueError(
            f"{field}.model={options.model!r}: its vocabulary has {rows} rows, the tokenizer {needed} "
            "tokens; there may be more rows, not fewer. Choose another."
        )
    return model_config
