# SPDX-License-Identifier: Apache-2.0
"""How a server keeps its KV cache: ``additional_config["vllm_ext"]["kv"]``, and what does not go with it.

Nothing of vLLM's but the names of some fields of its configuration; `engine.kv_cache` is the adapter, with
`engine.v2.kept_blocks` on the V2 runner.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vllm_ext.codecs.base import CodecOptions, KVCodec
from vllm_ext.codecs.registry import CODECS, load_codec
from vllm_ext.config import speculative
from vllm_ext.config.runners import RunnerChoice
from vllm_ext.proposers.hybrid import reads_nodes
from vllm_ext.samplers.messages import quoted

ON_V1 = RunnerChoice("V1", "V2 needs Triton, which finds no driver for this platform")
FIELD = f'{speculative.FIELD}["{speculative.KV}"]'


@dataclass(frozen=True)
class KVSettings:
    """The validated choice of a server."""

    method: str
    options: CodecOptions

    def to_additional_config(self) -> dict[str, Any]:
        """What travels to the workers."""
        return {"method": self.method, **self.options.model_dump()}

    @property
    def block_size(self) -> int:
        """Of the cache, where the user has not said."""
        return load_codec(self.method).BLOCK_SIZE

    @property
    def caches_prefixes(self) -> bool:
        """See `KVCodec.CACHES_PREFIXES`."""
        return load_codec(self.method).CACHES_PREFIXES

    @property
    def answers_read_less(self) -> bool:
        """See `KVCodec.ANSWERS_READ_LESS`."""
        return load_codec(self.method).ANSWERS_READ_LESS

    @property
    def chooses_again(self) -> bool:
        """See `KVCodec.CHOOSES_AGAIN`."""
        return load_codec(self.method).CHOOSES_AGAIN

    @property
    def why_v1(self) -> str:
        """See `KVCodec.WHY_V1`."""
        return load_codec(self.method).WHY_V1

    @functools.lru_cache(maxsize=8)  # noqa: B019  # a server has one of these
    def codec(self, block_size: int, head_size: int) -> KVCodec:
        """For blocks and heads of these sizes.

        Raises:
            ValueError: they do not go with the options.
        """
        return load_codec(self.method)(self.options, block_size, head_size)

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.model_dump().items())
        return f"{self.method} ({options})"


def parse(given: Any) -> KVSettings:
    """Validate what the user wrote.

    Raises:
        ValueError: the message names the field, the value, what is allowed and the way out.
    """
    if not isinstance(given, Mapping) or "method" not in given:
        raise ValueError(
            f"{FIELD}={quoted(given)} is not allowed; allowed: an object with a method, "
            '{"method": "kivi", "bits": 4} say'
        )
    options = {key: value for key, value in given.items() if key != "method"}
    try:
        codec = load_codec(given["method"])
    except ValueError as error:
        raise ValueError(f"{FIELD}: {error}") from None
    try:
        return KVSettings(given["method"], codec.Options.model_validate(options))
    except ValidationError as error:
        explained = speculative.explain(codec.Options, error, f"Options of {given['method']}")
        raise ValueError(
            f"{FIELD}: method {given['method']!r}: {explained} Correct or remove it in --additional-config."
        ) from None


def from_config(carrier: Any) -> KVSettings | None:
    """The settings in the ``additional_config`` of a VllmConfig or of EngineArgs; None where there are none."""
    ours = speculative.ours(carrier)
    return parse(ours[speculative.KV]) if speculative.KV in ours else None


def check_engine_args(
    args: Any,
    kv: KVSettings,
    companion: bool,
    settings: speculative.Settings | None,
    runner: RunnerChoice = ON_V1,
) -> None:
    """Refuse options that a KV method does not work with, before vLLM looks at the model.

    Args:
        args: vLLM's EngineArgs.
        kv: of the cache.
        companion: whether a sampling rule reads a second model.
        settings: the method of ours that drafts, if one does.
        runner: of the engine.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    import vllm.envs as envs
    from vllm.platforms import current_platform

    *some, last = (name for name in CODECS if not load_codec(name).WHY_V1)
    others = f"{', '.join(some)} or {last}"
    on_v2, platform = runner.runner == "V2", f"the platform {current_platform.device_type!r}"
    method = (args.speculative_config or {}).get("method")
    refusals = (
        (
            not current_platform.is_cpu() and bool(kv.why_v1),
            platform,
            f"method {kv.method!r} {kv.why_v1}. Use {others}, or a CPU",
        ),
        (
            not current_platform.is_cpu() and not on_v2,
            f"{platform} and vLLM's V1 model runner",
            f"there {kv.method!r} runs on V2, and V1 was chosen as {runner.reason}. Leave that out",
        ),
        (
            on_v2 and bool(kv.why_v1),
            "vLLM's V2 model runner",
            f"method {kv.method!r} {kv.why_v1}. Set VLLM_USE_V2_MODEL_RUNNER=0, or use {others}",
        ),
        (
            bool(args.speculative_config) and settings is None,
            f"speculative_config.method={method!r}",
            "vLLM's own drafts may go over the end of a block. Use one of vllm-ext's, token_recycling say",
        ),
        (
            settings is not None and reads_nodes(settings.options),
            f"speculative_config.method={method!r}",
            "a method that drafts with a model, or with the target's layers, does not read an encoded cache. Use "
            "another, token_recycling say",
        ),
        (
            companion,
            "a sampling rule with a second model",
            "its KV is not encoded; leave one of them out",
        ),
        (
            args.enable_prefix_caching is True and not kv.caches_prefixes,
            "enable_prefix_caching=True",
            f"method {kv.method!r} changes blocks that are full. Leave it out, or take another method",
        ),
        (
            args.kv_cache_dtype != "auto",
            f"kv_cache_dtype={args.kv_cache_dtype!r}",
            "must be 'auto': the cache has a form of its own",
        ),
        (
            args.kv_transfer_config is not None,
            "kv_transfer_config",
            "must be unset: a connector does not know which blocks hold tokens as they are",
        ),
        (
            args.decode_context_parallel_size > 1,
            f"decode_context_parallel_size={args.decode_context_parallel_size}",
            "must be 1: a block has all its tokens on one rank",
        ),
        (
            kv.answers_read_less and args.scheduler_cls is not None,
            f"scheduler_cls={args.scheduler_cls!r}",
            f"must be unset: method {kv.method!r} brings its own, which frees blocks that are read no more",
        ),
        (
            kv.answers_read_less and args.pipeline_parallel_size > 1,
            f"pipeline_parallel_size={args.pipeline_parallel_size}",
            f"must be 1: method {kv.method!r} chooses blocks by what all layers attend to",
        ),
        (
            args.worker_cls != "auto",
            f"worker_cls={args.worker_cls!r}",
            "must be 'auto': the cache is set up by a worker class of its own",
        ),
        (
            not on_v2 and bool(envs.VLLM_USE_V2_MODEL_RUNNER),
            "VLLM_USE_V2_MODEL_RUNNER=1",
            "must be unset or 0",
        ),
        (
            on_v2 and bool(getattr(args, "enable_dbo", False)),
            "enable_dbo=True",
            "must be False: the blocks that rows read are laid out once a step",
        ),
        (
            on_v2 and getattr(args, "prefill_context_parallel_size", 1) > 1,
            f"prefill_context_parallel_size={getattr(args, 'prefill_context_parallel_size', 1)}",
            "must be 1: a prompt's rows are cut where its window slides",
        ),
    )
    for refused, what, rule in refusals:
        if refused:
            raise ValueError(f"{FIELD} does not work with {what}: {rule}.")


def check_vllm_config(vllm_config: Any, settings: KVSettings, runner: RunnerChoice = ON_V1) -> None:
    """What only the finished configuration tells.

    Raises:
        ValueError: the model's heads, or its kind, do not go with the settings; or vLLM runs it on another runner.
    """
    if vllm_config.use_v2_model_runner != (runner.runner == "V2"):
        raise ValueError(
            f"{FIELD} was to run on vLLM's {runner.runner} model runner ({runner.reason}), and vLLM has chosen the "
            f"other for {vllm_config.model_config.model!r}. Set VLLM_USE_V2_MODEL_RUNNER=0 on a CPU, or remove {FIELD}."
        )
    model, block_size = vllm_config.model_config, vllm_config.cache_config.block_size
    problems = {
        "a model with latent attention (MLA)": model.use_mla,
        "an encoder-decoder model": model.is_encoder_decoder,
        "a model with state-space layers": model.is_hybrid,
        "a pooling model": model.runner_type == "pooling",
    }
    if problem := next((what for what, present in problems.items() if present), None):
        raise ValueError(f"{FIELD} does not work with {problem}: {model.model!r}. Remove it.")
    try:
        settings.codec(block_size, model.get_head_size())
    except ValueError as error:
        raise ValueError(
            f"{FIELD}: {error}. Set it there, or the block size by --block-size; {model.model!r} has heads of "
            f"{model.get_head_size()}."
        ) from None
