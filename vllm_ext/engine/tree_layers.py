# SPDX-License-Identifier: Apache-2.0
"""Which models verify trees: those of whose layers all is known that our kernels and movers rely on. For both runners.

By an allow-list. vLLM derives backends, metadata builders and cache specs from those that we extend, and changes what
lies behind the same names: a row of the block table for each chunk of a context, tokens before a request's own, blocks
that are gone. So each part has to be exactly one that was read and tested; what is derived from it drafts chains, but
for chunks (Llama 4), of which all is known too.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

logger = init_logger("vllm.vllm_ext")

WAY_OUT = "pass --attention-backend FLASH_ATTN or TRITON_ATTN for trees"
# Fields of vLLM's spec that may have any value; the others have their defaults, or nobody has looked at them.
FREE = {
    *("block_size", "num_kv_heads", "head_size", "dtype"),
    *("page_size_padded", "block_stride_alignment", "dcp_sharded", "max_tp_shards"),
    # The tree kernels have these from the layer. vLLM keeps the blocks that the text's next token sees, where the
    # tree's root stands; where it keeps all layers' blocks alike, it keeps all.
    *("sliding_window", "attention_chunk_size"),
}
SPECS: dict[type[Any], set[str]] = dict.fromkeys(
    (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec), FREE
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What belongs to a backend of ours."""

    impl: type[Any]
    builder: type[Any]


_KNOWN: dict[type[Any], Parts] = {}  # by backend

_Backend = TypeVar("_Backend", bound=type[Any])


def takes_trees(backend: _Backend) -> _Backend:
    """Decorator of a backend of ours: its layers take trees. Not those of what vLLM derives from it."""
    _KNOWN[backend] = Parts(backend.get_impl_cls(), backend.get_builder_cls())
    return backend


def allow_spec(spec: type[Any], free: Iterable[str]) -> None:
    """A kind of KV cache of ours, some of whose fields may have any value: it goes with trees."""
    SPECS[spec] = FREE | {*free}


def chain_reason(runner: Any, uses_mrope: bool, dcp_size: int, uses_pcp: bool = False) -> str | None:
    """Why a runner's drafts are chains, or None where its model can verify trees.

    Args:
        runner: vLLM's, once the caches are bound.
        uses_mrope: rotary positions of several dimensions.
        dcp_size: ranks that share a context while decoding.
        uses_pcp: ranks share a context while prompts are computed.

    Raises:
        ValueError: chains would be wrong too.
    """
    multimodal = getattr(runner.vllm_config.model_config, "multimodal_config", None)
    if uses_mrope and multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        # The V1 runner works the step's positions out again once it has seen what is left of a video.
        return "M-RoPE over pruned videos (video_pruning_rate) is not supported"
    if dcp_size > 1:
        return f"decode_context_parallel_size={dcp_size} is not supported"
    if uses_pcp:
        return "prefill context parallelism is not supported"
    return model_problem(runner.vllm_config, runner.attn_groups)


def warn_of_chains(reason: str) -> None:
    """Say at start-up why there are no trees."""
    logger.warning(
        "vllm-ext: drafting chains instead of trees: %s. Output is the same; `vllm-ext doctor` lists what trees need.",
        reason,
    )


def is_recurrent(backend: type[Any]) -> bool:
    """Whether layers of a backend have a state instead of keys and values."""
    return bool(backend.is_ssm())


def recurrent_groups(groups: Iterable[Iterable[Any]]) -> list[tuple[int, Any]]:
    """Of a runner's ``attn_groups`` those whose layers have a state, each with its KV group."""
    return [
        (group_id, group)
        for group_id, of_cache in enumerate(groups)
        for group in of_cache
        if is_recurrent(group.backend)
    ]


def layers_of(runner: Any) -> list[Any]:
    """The attention layers of a runner, group after group; those with a state left out."""
    context = runner.compilation_config.static_forward_context
    return [
        context[name]
        for groups in runner.attn_groups
        for group in groups
        if not is_recurrent(group.backend)
        for name in group.layer_names
    ]


def cache_owners(runner: Any, skipped: Container[str] = ()) -> Iterator[tuple[int, list[Any]]]:
    """For each group of layers with caches of their own its KV group and these layers: what KV is moved in.

    Args:
        runner: vLLM's.
        skipped: names of layers whose KV stays where it is.
    """
    context = runner.compilation_config.static_forward_context
    for group_id, groups in enumerate(runner.attn_groups):
        for group in groups:
            if is_recurrent(group.backend):
                continue
            layers = [context[name] for name in group.layer_names if name not in skipped]
            # Another layer's cache is moved with that layer.
            layers = [layer for layer in layers if layer.impl.kv_sharing_target_layer_name is None]
            if layers:
                yield group_id, layers


def model_problem(vllm_config: Any, attn_groups: Iterable[Iterable[Any]]) -> str | None:
    """Why a model drafts chains, with the layer's name and what was seen there, or None.

    Args:
        vllm_config: of the engine; the layers are in its ``static_forward_context``.
        attn_groups: the runner's, by KV group; their metadata builders are made.

    Raises:
        ValueError: chains would be wrong too.
    """
    window = getattr(vllm_config.model_config, "rswa_window", None)
    if window is not None:
        return f"reference sliding window attention (rswa_window={window}) is not supported"
    context = vllm_config.compilation_config.static_forward_context
    found = None
    for groups in attn_groups:
        for group in groups:
            if is_recurrent(group.backend):
                _check_recurrent(group.layer_names[0], context[group.layer_names[0]])
                continue
            for name in group.layer_names:
                _refuse_chains(name, context[name], vllm_config)
                found = found or layer_problem(name, context[name], vllm_config)
            found = found or _group_problem(group, context[group.layer_names[0]])
    return found


def layer_problem(name: str, layer: Any, vllm_config: Any) -> str | None:
    """Why a layer cannot attend over trees, with its name and what was seen, or None."""
    problem = _layer_problem(layer, vllm_config)
    return problem and f"layer {name}: {problem}"


def check_draft(names: Iterable[str], vllm_config: Any, what: str, way_out: str) -> None:
    """Refuse layers that draft and cannot attend over trees.

    Args:
        names: theirs.
        vllm_config: as in `model_problem`.
        what: how errors name the model.
        way_out: what an error says of what to do.

    Raises:
        ValueError: with the layer's name, and what was seen.
    """
    context = vllm_config.compilation_config.static_forward_context
    for name in names:
        if problem := layer_problem(name, context[name], vllm_config):
            raise ValueError(f"{what}: {problem}. {way_out}")


def only_group(names: Collection[str], groups: Iterable[Iterable[str]], what: str, way_out: str) -> int:
    """The KV group of layers that draft.

    Args:
        names: theirs.
        groups: by KV group, the names of its layers.
        what: as in `check_draft`.
        way_out: as in `check_draft`.

    Raises:
        ValueError: they lie in several.
    """
    found = [group_id for group_id, group in enumerate(groups) if not set(names).isdisjoint(group)]
    if len(found) != 1:
        raise ValueError(
            f"{what}: its layers need several KV cache groups, where all must have full attention. {way_out}"
        )
    return found[0]


def _layer_problem(layer: Any, vllm_config: Any) -> str | None:
    impl: Any = getattr(layer, "impl", None)
    if hasattr(impl, "codec"):
        return None  # `encoded_cache` has refused what it cannot do
    backend = layer.get_attn_backend()
    parts = _parts_of(backend, layer)
    if parts is None:
        return _of_unknown_backend(impl, backend)
    if type(impl) is not parts.impl:
        return (
            f"its implementation {type(impl).__name__} is not {parts.impl.__name__}, which has tree attention"
        )
    features: dict[str, Any] = {
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "quantised KV cache": getattr(impl, "kv_cache_dtype", "auto") not in ("auto", "float16", "bfloat16"),
        "attention that is not a decoder's": impl.attn_type != AttentionType.DECODER,
        "attention both ways over images": bool(getattr(layer, "use_mm_prefix", False)),
        "a sliding window in chunks": window_of(impl) > 0 and chunk_of(layer) > 0,
        # How keys are shared out depends on the batch. At its source: only some implementations keep a copy.
        "VLLM_BATCH_INVARIANT": bool(envs.VLLM_BATCH_INVARIANT),
    }
    problem = next((feature for feature, present in features.items() if present), None)
    if problem is None:
        problem = impl.layout_problem(layer)
    if problem is not None:
        return f"{problem} is not supported by the tree attention kernel"
    most_rows = 1 + (vllm_config.num_speculative_tokens or 0)
    for what, tokens in (("sliding window", window_of(impl)), ("chunk", chunk_of(layer))):
        if 0 < tokens < most_rows:
            return f"its {what} of {tokens} tokens is smaller than a tree of {most_rows} rows"
    return _spec_problem(layer.get_kv_cache_spec(vllm_config), layer)


def window_of(impl: Any) -> int:
    """The tokens that a row of an attention implementation sees, itself included; 0: all."""
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, tuple):  # how many before the row
        window = window[0] + 1
    return 0 if window is None else max(window, 0)


def chunk_of(layer: Any) -> int:
    """The tokens of the chunks of the text of which a layer sees the row's own; 0: it has none."""
    return getattr(layer, "attention_chunk_size", None) or 0


def _parts_of(backend: type[Any], layer: Any) -> Parts | None:
    """What belongs to a backend of ours, or to the one that vLLM makes of it for chunks, which it makes but once."""
    chunk = chunk_of(layer)
    if not chunk:
        return _KNOWN.get(backend)
    for base in backend.__bases__:
        if base in _KNOWN and create_chunked_local_attention_backend(base, chunk) is backend:
            return Parts(_KNOWN[base].impl, backend.get_builder_cls())
    return None


def _of_unknown_backend(impl: Any, backend: type[Any]) -> str:
    derived = next((base for base in backend.__mro__ if base in _KNOWN), None)
    if derived is not None:
        return (
            f"its attention backend {backend.__name__} is derived from {derived.__name__}, and may lay out block "
            "tables or rows in a way of its own"
        )
    problem = f"its attention backend {backend.get_name()} has no tree attention"
    if impl is None or backend.is_mla():
        return problem
    return f"{problem} (on CUDA, {WAY_OUT})"


def _spec_problem(spec: Any, layer: Any) -> str | None:
    """What of a layer's KV cache spec, or its group's, is not plain causal attention's, or None."""
    if type(spec) not in SPECS:
        return (
            f"its KV cache has {type(spec).__name__}, where trees need one of "
            f"{', '.join(known.__name__ for known in SPECS)} itself"
        )
    if type(spec) is ChunkedLocalAttentionSpec and spec.attention_chunk_size != chunk_of(layer):
        return (
            f"its KV cache has ChunkedLocalAttentionSpec with attention_chunk_size={spec.attention_chunk_size}, "
            f"where the layer's is {chunk_of(layer)}"
        )
    free = SPECS[type(spec)]
    plain = type(spec)(**{name: getattr(spec, name) for name in free if hasattr(spec, name)})
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value != getattr(plain, field.name):
            return (
                f"its KV cache has {type(spec).__name__} with {field.name}={value!r}, which trees do not know"
            )
    return None


def _group_problem(group: Any, layer: Any) -> str | None:
    """What vLLM has made of a group of layers for the runner: it may derive a backend of its own from theirs."""
    if hasattr(getattr(layer, "impl", None), "codec"):
        return None
    parts = _parts_of(group.backend, layer)
    if parts is None:
        problem: str | None = _of_unknown_backend(getattr(layer, "impl", None), group.backend)
    else:
        builders = [
            type(made).__name__ for made in group.metadata_builders if type(made) is not parts.builder
        ]
        problem = (
            f"its metadata builder {builders[0]} is not {parts.builder.__name__}, which trees are marked with"
            if builders
            else _spec_problem(group.kv_cache_spec, layer)
        )
        if problem is None and getattr(group, "kernel_block_size", None) is not None:
            problem = f"its block table addresses kernel blocks of {group.kernel_block_size} tokens"
    return problem and f"layer {group.layer_names[0]}: {problem}"


def _check_recurrent(name: str, layer: Any) -> None:
    """Refuse a state that cannot be taken back: no draft would be right, not even a chain's."""
    problem = getattr(
        layer,
        "problem",
        "has a recurrent state, and only those of Mamba-2 and of Qwen's gated delta nets can be drafted with",
    )
    if problem is not None:
        raise ValueError(
            f"speculative methods do not work with layer {name}: its {type(layer).__name__} {problem}. Remove "
            "--speculative-config."
        )


def _refuse_chains(name: str, layer: Any, vllm_config: Any) -> None:
    if getattr(layer, "attn_type", None) != AttentionType.DECODER:
        return
    if getattr(layer.get_kv_cache_spec(vllm_config), "non_causal", False):
        raise ValueError(
            f"speculative methods do not work with layer {name}: its attention is not causal (non_causal=True), so "
            "that the rows of a draft would see those behind them. Remove --speculative-config for this model."
        )
