# SPDX-License-Identifier: Apache-2.0
"""Linear layers of bfloat16 on CPUs, by `kernels.linear`: a dozen rows of a draft tree in the time of one.

vLLM keeps how a layer multiplies on the layer, as ``cpu_linear``, which its ``quant_method`` sets once the weights are
there. Its registry of layer classes takes others instead of its own: ours give layers that are not quantised a method
that packs the weights for our product. Those that it does not take are left to vLLM, which then packs them its own way:
no weight is held twice.

Models and heads that draft hold their weights in 8 bits (`kernels.linear8`): they are small, so that reading them is
most of their time, and no output depends on their last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor import custom_op
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.platforms import current_platform

from vllm_ext.config import speculative
from vllm_ext.kernels import linear as kernel
from vllm_ext.kernels.linear8 import MOST_INPUTS, pack8

logger = init_logger("vllm.vllm_ext")

LAYERS = (
    linear.ReplicatedLinear,
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.RowParallelLinear,
    vocab_parallel_embedding.VocabParallelEmbedding,
    vocab_parallel_embedding.ParallelLMHead,
)

_BITS: ContextVar[int] = ContextVar("bits of the weights of layers that are made", default=16)


def register() -> None:
    """Have vLLM make layers of ours, in this process, for engines that want them. Idempotent."""
    for layer in LAYERS:
        there = custom_op.op_registry_oot.get(layer.__name__)
        if there is None:
            of_ours = type(layer.__name__, (_Layer, layer), {})
            custom_op.PluggableLayer.register_oot(of_ours, name=layer.__name__)
        elif not issubclass(there, _Layer):
            logger.warning(
                "vllm-ext: another package has registered its own %s (%s): such layers multiply as it says, not by our "
                "product for few rows.",
                layer.__name__,
                there,
            )


class _Layer:
    """Mixin in front of a layer class of vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        config = get_current_vllm_config_or_none()
        if config is not None and wanted(config):
            method = layer.quant_method
            if type(method) is linear.UnquantizedLinearMethod:
                layer.quant_method = _Linear()
            elif type(method) is vocab_parallel_embedding.UnquantizedEmbeddingMethod:
                layer.quant_method = _Embedding()
            if isinstance(layer.quant_method, _Linear | _Embedding):
                layer.quant_method.bits = _BITS.get()


class _Linear(linear.UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM is untyped to us
    bits = 16

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """vLLM's, of layers that our product does not take."""
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) or not take_over(layer, True, self.bits):
            super().process_weights_after_loading(layer)


class _Embedding(vocab_parallel_embedding.UnquantizedEmbeddingMethod):  # type: ignore[misc]
    bits = 16

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Likewise. The rows of an embedding are read as they are."""
        if not take_over(layer, False, self.bits):
            super().process_weights_after_loading(layer)


def wanted(vllm_config: Any) -> bool:
    """Whether an engine's layers are to be taken over."""
    settings = speculative.from_vllm_config(vllm_config)
    if settings is None or settings.options.linear_layers == "vllm" or not current_platform.is_cpu():
        return False
    return reason_against(vllm_config.model_config.dtype) is None


def bits_of_drafts(vllm_config: Any) -> int:
    """Of the weights of models and heads that draft, where `wanted`: 8 or 16."""
    settings = speculative.from_vllm_config(vllm_config)
    return 8 if settings is not None and settings.options.linear_layers == "auto" else 16


@contextmanager
def drafts(vllm_config: Any) -> Iterator[None]:
    """Layers that are made meanwhile draft.

    Args:
        vllm_config: the engine's.
    """
    token = _BITS.set(bits_of_drafts(vllm_config))
    try:
        yield
    finally:
        _BITS.reset(token)


def reason_against(dtype: torch.dtype) -> str | None:
    """Why vLLM's own products serve better here; None: ours do."""
    if dtype != torch.bfloat16:
        return f"the model runs in {str(dtype).removeprefix('torch.')}"
    if current_platform.is_zen_cpu():
        return "vLLM's platform for AMD Zen brings its own (zentorch)"
    return kernel.machine_problem()


def take_over(layer: Any, remove_weight: bool, bits: int = 16) -> bool:
    """Pack a layer's weights and let it multiply by them; False where vLLM is to do it.

    Args:
        layer: a module with a ``weight``.
        remove_weight: whether nothing else reads the weights as they are.
        bits: of the packed weights, 8 or 16.
    """
    weight = layer.weight
    if weight.is_meta or kernel.problem(weight) is not None:
        return False
    packed: tuple[torch.Tensor, ...]
    if bits == 8 and weight.shape[1] <= MOST_INPUTS:
        op, packed = _ops()[1], pack8(weight.detach())
    else:
        op, packed = _ops()[0], (kernel.pack(weight.detach()),)
    nothing = torch.zeros(weight.shape[0], dtype=torch.float32)

    def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = op(x, *packed, nothing if bias is None else bias.float())
        return result

    layer.packed = packed  # others may be copied into them: `draft_weights`
    layer.packed_bytes = sum(part.nbytes for part in packed)

    layer.cpu_linear = cpu_linear
    if remove_weight:
        empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
        layer.weight = torch.nn.Parameter(empty, requires_grad=False)
    return True


@functools.cache
def _ops() -> tuple[Any, Any]:
    """The products as ops, which vLLM's compiled graphs call and do not look into: of weights in 16 bits, and in 8."""
    library: Any = torch.library.Library("vllm_ext", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("linear(Tensor x, Tensor packed, Tensor bias) -> Tensor")
    library.define("linear8(Tensor x, Tensor codes, Tensor scale, Tensor bias) -> Tensor")

    def shape_only(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], others[-1].shape[0]))

    from vllm_ext.kernels.linear8_numba import linear8_numba
    from vllm_ext.kernels.linear_numba import linear_numba

    for name, function in (("linear", linear_numba), ("linear8", linear8_numba)):
        library.impl(name, function, "CPU")
        library._register_fake(name, shape_only)
    _ops.library = library  # type: ignore[attr-defined]  # what it has defined goes with it
    return torch.ops.vllm_ext.linear.default, torch.ops.vllm_ext.linear8.default
