# SPDX-License-Identifier: Apache-2.0
"""What a model would get, by its config alone: trees, chains or nothing, and why.

vLLM's own classes are built of the config, with parameters that have shapes and no memory, and the layers are then
asked what the engine asks of them: no rule is written down twice. No weights are read, no engine starts. For a process
without engines of its own: our attention backends stay registered.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from vllm_ext.doctor.check import Check

Got = Literal["trees", "chains", "refused"]

METHOD = "token_recycling"
DTYPES = ("auto", "bfloat16", "float16", "float32")
MANY_BYTES = 1 << 50  # of a cache that is planned and never made
# No config says these: an engine's other options, and the weights.
NOT_TOLD = (
    "whether the weights are there and fit; LoRA, parallelism, a quantised KV cache, --attention-backend and "
    "VLLM_BATCH_INVARIANT, which may turn trees into chains; a draft model's own layers"
)


@dataclass(frozen=True)
class Answer:
    """What a model would get."""

    model: str
    architecture: str
    got: Got | None  # None: the config does not tell
    reason: str | None  # why not trees, or why it is not told
    runner: str
    layers: str  # in words; empty: none were built
    early_exits: bool
    needs: str = ""  # of the command line

    @property
    def verdict(self) -> str:
        """In a line."""
        if self.got is None:
            return f"cannot be told from the config of {self.model}"
        return f"{self.architecture}: {self.got}"


@dataclass(frozen=True)
class Built:
    """What `tree_layers.chain_reason` reads of a runner."""

    vllm_config: Any
    attn_groups: Any


def answer(model: str, nodes: int | None = None, dtype: str = "auto") -> Answer:
    """What methods that draft without a model would do for one.

    Args:
        model: a folder, or a hub name whose config is at hand.
        nodes: most of a tree; None: the default.
        dtype: vLLM's option.

    Raises:
        ValueError: there is no such config, or vLLM does not take it without us either.
    """
    try:
        from vllm_ext import plugin
        from vllm_ext.config import speculative
        from vllm_ext.engine.models import layer_slices
    except ImportError as error:
        raise ValueError(f"--model needs vLLM, and {error}: `vllm-ext doctor` says what to do.") from error

    method = {"method": METHOD} if nodes is None else {"method": METHOD, "num_speculative_tokens": nodes}
    speculative.parse(method)
    plugin.register()
    plain = _plain_model_config(model, dtype)
    known = {
        "model": model,
        "architecture": plain.architecture,
        "early_exits": plain.architecture in layer_slices.ARCHITECTURES,
    }
    recurrent = plain.is_hybrid or plain.is_attention_free
    if recurrent:
        known["needs"] = "--no-enable-prefix-caching"
    try:
        config = _engine_args(model, dtype, method, recurrent).create_engine_config()
    except ValueError as error:
        return Answer(got="refused", reason=str(error), runner="", layers="", **known)
    runner = "V2" if config.use_v2_model_runner else "V1"
    if reason := _chain_reason(Built(config, ())):  # whatever its layers are
        return Answer(got="chains", reason=reason, runner=runner, layers="", **known)
    try:
        built = _build(config)
    except Exception as error:
        why = (
            f"vLLM's classes are not to be built without weights: {type(error).__name__}: {str(error)[:300]}"
        )
        return Answer(got=None, reason=why, runner=runner, layers="", **known)
    layers = _in_words(built)
    if problem := _head_problem(built):
        return Answer(got=None, reason=problem, runner=runner, layers=layers, **known)
    try:
        reason = _chain_reason(built)
    except ValueError as error:
        return Answer(got="refused", reason=str(error), runner=runner, layers=layers, **known)
    return Answer(
        got="trees" if reason is None else "chains", reason=reason, runner=runner, layers=layers, **known
    )


def checks(found: Answer) -> Iterator[Check]:
    """The lines of a report."""
    yield Check("ok", "model", f"{found.model}, {found.architecture}", short=found.architecture)
    if found.layers:
        yield Check("ok", "layers", found.layers, short=found.layers)
    where = f"on the {found.runner} runner" + (f" with {found.needs}" if found.needs else "")
    if found.got == "trees":
        line = f"trees, {where}"
        yield Check("ok", "drafts", line, short=line)
    elif found.got == "chains":
        yield Check(
            "warn",
            "drafts",
            f"chains instead of trees, {where}: {found.reason}",
            "nothing: output is the same",
        )
    elif found.got == "refused":
        yield Check("fail", "drafts", f"refused: {found.reason}", "serve it without --speculative-config")
    else:
        way_out = "start it, and read the log's line `vllm-ext is ready`; report this"
        yield Check("warn", "drafts", str(found.reason), way_out)
    if found.got in ("trees", "chains"):
        exits = "can draft with its first layers" if found.early_exits else "not of this architecture"
        yield Check("ok", "layerskip, del, unified_skip", exits, short=exits)
    yield Check("ok", "not told", NOT_TOLD, short=NOT_TOLD)


def _engine_args(
    model: str, dtype: str, method: dict[str, Any] | None, without_prefixes: bool = False
) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        dtype=dtype,
        speculative_config=method,
        load_format="dummy",
        enable_prefix_caching=False if without_prefixes else None,
    )


def _plain_model_config(model: str, dtype: str) -> Any:
    """vLLM's ModelConfig, of an engine without us.

    Raises:
        ValueError: naming the option, its value, what is allowed and the way out.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"--dtype {dtype!r} is not allowed; allowed: {', '.join(DTYPES)}. Leave it out for 'auto'."
        )
    try:
        return _engine_args(model, dtype, None).create_engine_config().model_config
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {model!r}: vLLM makes no configuration of it, with our methods or without. Allowed: a folder "
            "with a config.json of an architecture that vLLM knows, or the name of one on the hub (in the local cache, "
            f"where HF_HUB_OFFLINE is set). What it says: {str(error)[:600]}"
        ) from error


def _build(config: Any) -> Built:
    """The model's layers, without memory, and the groups that the runner makes of them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend
    from vllm.v1.worker.worker_base import WorkerBase

    from vllm_ext.engine.attention import tree_backend, v2_backends
    from vllm_ext.engine.recurrent import registry

    registry.register(config.model_config)
    (v2_backends if config.use_v2_model_runner else tree_backend).register()
    with set_current_vllm_config(config), _one_process():
        with set_default_torch_dtype(config.model_config.dtype), _without_weights():
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
        layouts = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
        resolve_kv_cache_layout(config, [layouts], specs.values())
        (cache,) = get_kv_cache_configs(config, [specs], [MANY_BYTES])
        groups, *_ = init_attn_backend(cache, config, torch.device(current_platform.device_type))
    return Built(config, groups)


def _without_weights() -> Any:
    """Where tensors that are yet to be filled, which weights are, take no memory; those that are computed do."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutWeights(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.empty:
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return WithoutWeights()


@contextmanager
def _one_process() -> Iterator[None]:
    """vLLM's process groups, of this process alone, where there are none yet."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="vllm-ext-doctor-") as folder:
        try:
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _chain_reason(built: Built) -> str | None:
    from vllm_ext.engine import tree_layers

    config = built.vllm_config
    return tree_layers.chain_reason(
        built, config.model_config.uses_mrope, config.parallel_config.decode_context_parallel_size
    )


def _head_problem(built: Built) -> str | None:
    """Heads that vLLM's own backend has no kernel for: on CPUs it finds that out in the first step."""
    for groups in built.attn_groups:
        for group in groups:
            size = getattr(group.kv_cache_spec, "head_size", None)
            if size is not None and not group.backend.supports_head_size(size):
                allowed = ", ".join(map(str, group.backend.get_supported_head_sizes()))
                return f"vLLM's backend {group.backend.get_name()} has heads of {allowed} elements, not of {size}"
    return None


def _in_words(built: Built) -> str:
    """How many layers there are of each kind: backend, what is kept of a text, head size."""
    kinds = Counter(
        (group.backend.get_name(), type(spec).__name__, _reach(spec), getattr(spec, "head_size", None))
        for groups in built.attn_groups
        for group in groups
        for spec in [group.kv_cache_spec] * len(group.layer_names)
    )
    return "; ".join(
        f"{count} of {backend} with {spec}{reach}{f', head size {head}' if head else ''}"
        for (backend, spec, reach, head), count in kinds.items()
    )


def _reach(spec: Any) -> str:
    window, chunk = (getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
    parts = [f"a window of {window}"] if window else []
    parts += [f"chunks of {chunk}"] if chunk else []
    return "".join(f", {part}" for part in parts)
