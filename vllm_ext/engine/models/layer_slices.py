# SPDX-License-Identifier: Apache-2.0
"""Some of the target's layers as a model of their own: the same weights, the same caches, compiled apart.

No adapter for each family is needed: vLLM's Llama-like models run the layers from ``start_layer`` to ``end_layer``, for
pipeline parallelism, begin with ``inputs_embeds`` where these are given, and hand out hidden states between layers, for
EAGLE-3. A shallow copy of the model with another list of layers does all of that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from vllm_ext.data import model_files
from vllm_ext.engine.models import exit_heads
from vllm_ext.proposers.base import Proposer
from vllm_ext.proposers.dynamic_exit import DynamicExit
from vllm_ext.proposers.layerskip import LayerSkip
from vllm_ext.proposers.unified_skip import UnifiedSkipOptions, kept_layers

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check(vllm_config: Any, method: str, proposer_class: type[Proposer], options: Any) -> None:
    """Refuse at start-up a target whose layers cannot be run apart, or exits that it does not have.

    Args:
        vllm_config: the engine's.
        method: whose layers draft, alone or among others.
        proposer_class: of the method.
        options: its own.

    Raises:
        ValueError: naming what cannot, and the way out.
    """
    model = vllm_config.model_config
    problem = None
    if vllm_config.lora_config is not None:
        problem = "LoRA, whose adapters change the layers of a step by request"
    elif model.architecture not in ARCHITECTURES:
        problem = f"{model.architecture}, the architecture of {model.model} (with {', '.join(ARCHITECTURES)} it does)"
    if problem:
        raise ValueError(
            f"speculative method {method!r} does not work with {problem}. Change it, or choose a method that "
            "needs only the model's output: `vllm-ext methods`."
        )
    if isinstance(options, UnifiedSkipOptions):
        kept_layers(options, model.get_total_num_hidden_layers())
    if not issubclass(proposer_class, LayerSkip | DynamicExit):
        return
    proposer = proposer_class(options)
    num_layers = model.get_total_num_hidden_layers()
    exits = proposer.exits(num_layers)
    if exits[-1] >= num_layers:
        raise ValueError(
            f"speculative_config: an exit after {exits[-1]} layers is not allowed; allowed: 1 to {num_layers - 1}, "
            f"some of the {num_layers} of {model.model}."
        )
    if options.heads is not None:
        exit_heads.check(options.heads, exits, model_files.snapshot(model.model))


class LayerSlice:
    """A stretch, or any choice, of the target's layers. Call it where vLLM's forward context is set.

    Args:
        vllm_config: the target's.
        target: vLLM's model, loaded.
        layers: which of them, ascending.
        hand_out: whether the hidden states behind the last of them are wanted too.
    """

    def __init__(self, vllm_config: Any, target: Any, layers: Sequence[int], hand_out: bool) -> None:
        inner = copy.copy(target.model)
        inner._modules = dict(inner._modules)
        inner.layers = torch.nn.ModuleList(target.model.layers[index] for index in layers)
        inner.start_layer, inner.end_layer = 0, len(layers)
        inner.aux_hidden_state_layers = (len(layers),) if hand_out else ()
        self._inner, self._hands_out = inner, hand_out
        if not inner.do_not_compile:
            _compile_apart(inner, vllm_config, layers)

    def __call__(
        self, positions: torch.Tensor, tokens: torch.Tensor | None = None, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One pass.

        Args:
            positions: int64 ``[num_rows]``.
            tokens: int32 ``[num_rows]``, where the slice begins with the first layer; or
            hidden: ``[num_rows, hidden_size]``, what another slice has handed out. Always the same one of the two.

        Returns:
            ``[num_rows, hidden_size]`` both: behind the target's final norm, as its head wants it, and before, for the
            next slice; None where that is not wanted.
        """
        result = self._inner(tokens, positions, None, hidden)
        if self._hands_out:
            normed, (stream,) = result
            return normed, stream
        return result, None


def _compile_apart(inner: Any, vllm_config: Any, layers: Sequence[int]) -> None:
    """A copy shares what vLLM has compiled, or would compile, for the whole model."""
    from vllm.compilation.backends import set_model_tag
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    inner.__dict__.pop("aot_compiled_fn", None)
    # Part of the hash by which vLLM finds compiled code on disk.
    named = copy.copy(vllm_config)
    named.additional_config = {**vllm_config.additional_config, "vllm_ext_layers": list(layers)}
    with set_current_vllm_config(named), set_model_tag(f"layers_{layers[0]}_{layers[-1]}_of_{len(layers)}"):
        TorchCompileWithNoGuardsWrapper.__init__(inner)
