# SPDX-License-Identifier: Apache-2.0
"""Methods of speculative decoding.

vLLM's ``method`` is a closed Literal. A method of ours turns into a worker class, and into a method of vLLM's own: for
its V1 runner ``custom_class``; for V2, which has no such, the smallest that it drafts with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_ext import __version__, patches
from vllm_ext.config import processors, refusals, runners, schedulers, speculative
from vllm_ext.config.speculative import Settings
from vllm_ext.engine.draft_model import online, vllm_proposer
from vllm_ext.engine.models import (
    clover_heads,
    eagle_head,
    layer_slices,
    medusa_heads,
    prompt_embeddings,
    second_model,
)
from vllm_ext.engine.processors import v1_interface
from vllm_ext.engine.state import state_file
from vllm_ext.features import class_paths
from vllm_ext.features.base import Asked, Feature, vocabulary
from vllm_ext.proposers import level_budget
from vllm_ext.proposers.clover import CloverOptions
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.eagle import EagleOptions
from vllm_ext.proposers.hybrid import chains_of, draft_of, reads_nodes
from vllm_ext.proposers.layerskip import LayerSkip, LayerSkipOptions
from vllm_ext.proposers.medusa import MedusaOptions
from vllm_ext.proposers.ppd import PpdOptions
from vllm_ext.proposers.self_draft import SelfDraftOptions

logger = init_logger("vllm.vllm_ext")

CHECKS = {  # of heads, by their options
    EagleOptions: eagle_head.check,
    MedusaOptions: medusa_heads.check,
    CloverOptions: clover_heads.check,
}
MANY_REQUESTS = 1 << 20  # where the engine has not been told how many


class Speculation(Feature):
    """A proposer, driven by the worker of either runner."""

    def parse(self, args: Any, asked: Asked) -> None:
        if not speculative.is_ours(args.speculative_config):
            return
        requested = dict(args.speculative_config)
        if args.spec_tokens is not None:
            if "num_speculative_tokens" in requested:
                raise ValueError(
                    f"--spec-tokens={args.spec_tokens} and speculative_config.num_speculative_tokens="
                    f"{requested['num_speculative_tokens']!r} are the same option; give one of them."
                )
            requested["num_speculative_tokens"] = args.spec_tokens
        settings = speculative.parse(requested)
        refusals.check_engine_args(args, settings.method)
        folders = {name: getattr(settings.options, name, None) for name in ("state_dir", "export_dir")}
        if given := {name: folder for name, folder in folders.items() if folder is not None}:
            # Absolute: a worker may have another working directory.
            settings = settings.with_options(
                **{name: str(state_file.prepare_folder(folder, name)) for name, folder in given.items()}
            )
        if (learning := getattr(settings.options, "online", None)) is not None:
            folder = str(state_file.prepare_folder(learning.dir, "online.dir"))
            settings = settings.with_options(online=learning.model_copy(update={"dir": folder}))
        kv_why_v1 = "" if asked.kv is None else asked.kv.why_v1
        asked.runner = runners.choose(args, settings, asked.rules, kv_why_v1=kv_why_v1)
        asked.method = _with_default_nodes(settings) if asked.on_v2 else settings
        if asked.on_v2 and (adapted := processors.of(args)).adapted:
            adapter = v1_interface.name_of(adapted.adapted)
            asked.processors = adapted.entries(args.logits_processors, adapter)

    def refuse(self, args: Any, asked: Asked) -> None:
        if asked.method is None:
            return
        refusals.check_runner(args, asked.method.method, asked.runner)
        if args.scheduler_cls is not None and asked.on_v2:
            refusals.check_scheduling_ahead(args, asked.method.method)
        elif reads_nodes(asked.method.options):
            refusals.check_scheduler(args, asked.method.method)

    def options(self, args: Any, asked: Asked) -> dict[str, Any]:
        if asked.method is None:
            return {}
        if not asked.on_v2:
            return _custom_class(asked.method)
        options = _on_device(args, asked.method)
        if asked.processors is not None and asked.rules is None:  # rules add themselves to them
            options["logits_processors"] = asked.processors
        return options

    def worker_parts(self, asked: Asked) -> Sequence[str]:
        if asked.method is None:
            return ()
        return ("V2Speculation" if asked.on_v2 else "Speculation", "Counts")

    def scheduler_parts(self, vllm_config: Any, asked: Asked) -> Sequence[str]:
        if asked.method is None:
            return ()
        slots = ("DraftSlots",) if reads_nodes(asked.method.options) else ()
        if asked.on_v2:
            levels = ("Budget",) if _has_levels(vllm_config) else ()
            return (*slots, "StructuredDrafts", *levels, "DraftBlocks", "Counts")
        parts = "DraftCounts", *slots, "DraftBlocks", "Counts"
        if issubclass(asked.method.proposer_class, DraftModelProposer):
            return parts
        return (*parts, "StructuredDrafts")

    def settings(self, asked: Asked) -> dict[str, Any]:
        return {} if asked.method is None else {speculative.SPECULATION: asked.method.to_additional_config()}

    def check(self, vllm_config: Any, asked: Asked) -> None:
        settings = asked.method
        if settings is None:
            return
        refusals.check_vllm_config(vllm_config, settings.method, asked.runner, reads_nodes(settings.options))
        settings.proposer_class.check(settings.options, *vocabulary(vllm_config))
        drafting = draft_of(settings.options)
        if isinstance(drafting, DraftModelOptions):
            online.check(vllm_config, drafting, second_model.check(vllm_config, drafting))
        elif isinstance(drafting, LayerSkipOptions):
            layer_slices.check(vllm_config, "layerskip", LayerSkip, drafting)
        elif drafting is not None:
            CHECKS[type(drafting)](vllm_config, drafting.model)
        elif isinstance(settings.options, SelfDraftOptions):
            layer_slices.check(vllm_config, settings.method, settings.proposer_class, settings.options)
        for chain in chains_of(settings.options):
            vllm_proposer.check(vllm_config, chain, settings.options.num_speculative_tokens)
        if isinstance(settings.options, PpdOptions):
            prompt_embeddings.check(vllm_config, settings.options.model, settings.options.num_prompt_tokens)
        patches.read_requests()
        # Not before: vLLM chooses one itself, and knows its own by name while it does.
        parallel = vllm_config.parallel_config
        if not asked.on_v2 and parallel.distributed_executor_backend == "mp":
            parallel.distributed_executor_backend = class_paths.EXECUTOR
        if asked.on_v2 and settings.options.budget != "fixed" and not _has_levels(vllm_config):
            logger.warning(
                "vllm-ext: budget=%r has no effect with data_parallel_size=%d on the V2 model runner: ranks must have "
                "equally many drafts. Each step verifies num_speculative_tokens=%d.",
                settings.options.budget,
                parallel.data_parallel_size,
                settings.options.num_speculative_tokens,
            )
        logger.info("vllm-ext %s: speculative method %s", __version__, settings)
        logger.info("vllm-ext: model runner %s: %s", asked.runner.runner, asked.runner.reason)
        if asked.on_v2 and not runners.is_on_device(settings):
            logger.info("vllm-ext: %s: %s", settings.method, runners.WAITS)
        if asked.processors is not None:
            _log_adapted(asked.processors)


def _log_adapted(entries: Sequence[Any]) -> None:
    """Say what logits processors of V1's interface cost on V2."""
    for name in v1_interface.names_in(entries):
        everybody = v1_interface.concerns_all(v1_interface.load(name))
        logger.info(
            "vllm-ext: logits processor %s has the V1 runner's interface: on V2 %s are sampled depth by depth, and "
            "wait for their tokens",
            name,
            "all requests" if everybody else "requests that it is for",
        )


def _has_levels(vllm_config: Any) -> bool:
    """Whether steps on V2 may have fewer nodes than there are."""
    return vllm_config.speculative_config.num_speculative_tokens_per_batch_size is not None


def _with_default_nodes(settings: Settings) -> Settings:
    """Of V2, where the user has not said how many: a tree whose rows with the root are a power of two."""
    if "num_speculative_tokens" in settings.options.model_fields_set:
        return settings
    return settings.with_options(num_speculative_tokens=level_budget.DEFAULT_NODES)


def _on_device(args: Any, settings: Settings) -> dict[str, Any]:
    """The engine's own options that make its V2 runner run a method of ours."""
    nodes = settings.options.num_speculative_tokens
    speculative_config = {
        "method": class_paths.DEVICE_METHOD,
        "model": class_paths.DEVICE_DRAFTER,
        "num_speculative_tokens": nodes,
    }
    if settings.options.budget != "fixed":
        most = args.max_num_seqs or MANY_REQUESTS
        speculative_config["num_speculative_tokens_per_batch_size"] = level_budget.by_batch_size(nodes, most)
    options: dict[str, Any] = {"speculative_config": speculative_config, "spec_tokens": None}
    if args.scheduler_cls is not None and not schedulers.is_ahead(args.scheduler_cls):
        # Else vLLM keeps the drafts from a scheduler that has no place for them.
        options["async_scheduling"] = False
    return options


def _custom_class(settings: Settings) -> dict[str, Any]:
    """The engine's own options that make its V1 runner run a method of ours."""
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": class_paths.DRAFTER,
            "num_speculative_tokens": settings.options.num_speculative_tokens,
        },
        "spec_tokens": None,
        # custom_class rules it out; set, it spares the user vLLM's warning about a method they did not name.
        "async_scheduling": False,
    }
