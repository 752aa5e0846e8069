# SPDX-License-Identifier: Apache-2.0
"""Methods for the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_ext import __version__
from vllm_ext.config import kv_cache
from vllm_ext.features.base import Asked, Feature

logger = init_logger("vllm.vllm_ext")


class KVCache(Feature):
    """Codecs of blocks, and codecs that choose blocks."""

    def parse(self, args: Any, asked: Asked) -> None:
        asked.kv = kv_cache.from_config(args)

    def refuse(self, args: Any, asked: Asked) -> None:
        if asked.kv is not None:
            companion = asked.rules is not None and asked.rules.companion is not None
            kv_cache.check_engine_args(args, asked.kv, companion, asked.method, asked.runner)

    def options(self, args: Any, asked: Asked) -> dict[str, Any]:
        if asked.kv is None:
            return {}
        options: dict[str, Any] = {}
        if asked.kv.answers_read_less:
            options["async_scheduling"] = False  # blocks that a step scheduled ahead reads cannot be freed
        if args.block_size is None:
            options["block_size"] = asked.kv.block_size
        if not asked.kv.caches_prefixes:
            options["enable_prefix_caching"] = False
            logger.info(
                "vllm-ext: no prefix caching: KV method %s changes blocks that are full", asked.kv.method
            )
        return options

    def worker_parts(self, asked: Asked) -> Sequence[str]:
        if asked.kv is None:
            return ()
        return ("V2KeptBlocks",) if asked.on_v2 else ("EncodedCache",)

    def scheduler_parts(self, vllm_config: Any, asked: Asked) -> Sequence[str]:
        return ("EvictedBlocks",) if asked.kv is not None and asked.kv.answers_read_less else ()

    def check(self, vllm_config: Any, asked: Asked) -> None:
        if asked.kv is not None:
            kv_cache.check_vllm_config(vllm_config, asked.kv, asked.runner)
            if asked.on_v2 and asked.kv.chooses_again:
                keep_attention_out_of_graphs(vllm_config.compilation_config)
            logger.info("vllm-ext %s: KV cache by %s", __version__, asked.kv)


def keep_attention_out_of_graphs(compilation_config: Any) -> None:
    """Of steps that decode too: which of their rows are asked what they attend to is another one each time."""
    from vllm.config.compilation import CUDAGraphMode

    mode = compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return
    piecewise = mode.requires_piecewise_compilation() or compilation_config.splitting_ops_contain_attention()
    compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE
    logger.info(
        "vllm-ext: cudagraph_mode=%s instead of %s: the KV method asks rows that decode what they attend to",
        compilation_config.cudagraph_mode.name,
        mode.name,
    )
