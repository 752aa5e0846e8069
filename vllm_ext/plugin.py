# SPDX-License-Identifier: Apache-2.0
"""The entry point vLLM calls in every process, and the one wrapper it installs.

``register()`` wraps ``EngineArgs.create_engine_config`` and does nothing else. vLLM's ``method`` is a closed
Literal and its registries start behind it, so this is the one place where our method names can enter; the
wrapper turns them into official options: a ``worker_cls``, and a method of vLLM's own, which is ``custom_class`` for
its V1 runner and for V2, which has no such, the smallest that it drafts with itself.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ext import __version__
from vllm_ext.engine import startup_log

if TYPE_CHECKING:
    from vllm_ext.config.rules import RuleSettings
    from vllm_ext.config.runners import Choice
    from vllm_ext.config.speculative import Settings

# What vLLM loads as its custom_class drafter, and what drives it.
DRAFTER_CLASS = "vllm_ext.engine.v1.drafter.Drafter"
WORKER_CLASS = "vllm_ext.engine.v1.worker.Worker"
# V2's: names no file; it tells an engine of ours from one with vLLM's n-gram method.
MANY_REQUESTS = 1 << 20  # where the engine has not been told how many
DEVICE_METHOD, DEVICE_DRAFTER = "ngram_gpu", "vllm_ext.engine.v2.speculator.TreeSpeculator"
# Of the goodput budget; vLLM's class for steps that are scheduled ahead is another.
V2_SCHEDULER_CLASS = "vllm_ext.engine.v2.scheduler.BudgetScheduler"
V2_ASYNC_SCHEDULER_CLASS = "vllm_ext.engine.v2.scheduler.AsyncBudgetScheduler"
V2_WORKER_CLASS = "vllm_ext.engine.v2.worker.Worker"
EXECUTOR_CLASS = "vllm_ext.engine.v1.v1_executor.Executor"
LEAVING_EXECUTOR_CLASS = "vllm_ext.engine.executor.LeavingExecutor"  # where nothing else of ours is in it
SCHEDULER_CLASS = "vllm_ext.engine.v1.scheduler.Scheduler"  # of methods that draft with a model
# Of rules, where no method of ours runs.
RULES_WORKER_CLASS = "vllm_ext.engine.v1.worker.RulesWorker"
V2_RULES_WORKER_CLASS = "vllm_ext.engine.v2.worker.RulesWorker"
# Of rules, where no scheduler of ours does more; it ends requests whose rule fails.
ENDING_SCHEDULER_CLASS = "vllm_ext.engine.ended_requests.Scheduler"
ENDING_ASYNC_SCHEDULER_CLASS = "vllm_ext.engine.ended_requests.AsyncScheduler"
KV_WORKER_CLASS = "vllm_ext.engine.v1.worker.KVWorker"  # of encoded caches, where neither is
RULES_SCHEDULER_CLASS = "vllm_ext.engine.v1.scheduler.RulesScheduler"


_wrapper: Any = None


def register() -> None:
    """Make our method names valid in ``speculative_config``, and rules in ``additional_config``. Idempotent, silent."""
    global _wrapper
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    startup_log.admit_our_variables(envs.environment_variables)
    startup_log.trust_our_schedulers()

    original = EngineArgs.create_engine_config
    if original is _wrapper:
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _create_engine_config(original, self, *args, **kwargs)

    _wrapper = create_engine_config
    EngineArgs.create_engine_config = create_engine_config


def _create_engine_config(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's ``create_engine_config``, with our methods and rules rewritten to options it knows.

    Raises:
        ValueError: an unknown method, rule or option, or a feature that does not go with them.
    """
    from vllm_ext.config import speculative

    speculative.check_spelling(engine_args)
    speculates = speculative.is_ours(engine_args.speculative_config)
    if engine_args.speculative_config and not speculates:
        speculative.check_known(engine_args.speculative_config)
    if not speculates and not speculative.ours(engine_args):
        return original(engine_args, *args, **kwargs)

    from vllm.logger import init_logger

    from vllm_ext import patches
    from vllm_ext.compat import compilers, hooks
    from vllm_ext.config import kv_cache, refusals, rules, runners, structured_outputs
    from vllm_ext.engine.state import state_file

    hooks.check_version()
    logger = init_logger("vllm.vllm_ext")
    rewritten: dict[str, Any] = {}
    ruled = rules.from_config(engine_args)
    if ruled is not None:
        ruled = _with_folders(ruled)
        rewritten["additional_config"] = {
            **engine_args.additional_config,
            speculative.ADDITIONAL_CONFIG_KEY: {
                **speculative.ours(engine_args),
                speculative.RULES: json.loads(ruled.as_json),
            },
        }

        if not speculates:
            refusals.check_rules(engine_args)
        refusals.check_rules_classes(engine_args, ruled)
        rewritten |= _for_rules(engine_args, ruled)
    strict = structured_outputs.is_strict(engine_args)
    settings = choice = None
    kv = kv_cache.from_config(engine_args)
    if speculates:
        settings = _settings(engine_args)
        choice = runners.choose(engine_args, settings, ruled, encoded_kv=kv is not None)
        refusals.check_runner(engine_args, settings.method, choice)
        if choice.runner == "V2":
            settings = _with_default_nodes(settings)
            rewritten |= _as_device_method(engine_args, settings, ruled)
        else:
            rewritten |= _as_custom_class(engine_args, settings, ruled)
    on_v2 = (choice or runners.vllms_own()).runner == "V2"
    if ruled is not None:
        refusals.check_rules_runner(ruled, on_v2)
        processors = [*(engine_args.logits_processors or ()), _processor_of(ruled, on_v2)]
        rewritten["logits_processors"] = processors
        if engine_args.worker_cls == "auto":
            rewritten.setdefault("worker_cls", V2_RULES_WORKER_CLASS if on_v2 else RULES_WORKER_CLASS)
        if (
            ruled.waits
            and not on_v2
            and engine_args.scheduler_cls is None
            and not engine_args.async_scheduling
        ):
            rewritten.setdefault("scheduler_cls", RULES_SCHEDULER_CLASS)
            rewritten["async_scheduling"] = False  # vLLM's scheduler for that is another
    if kv is not None:
        companion = ruled is not None and ruled.companion is not None
        kv_cache.check_engine_args(engine_args, kv, companion, settings)
        rewritten.setdefault("worker_cls", KV_WORKER_CLASS)
        if kv.answers_read_less:
            rewritten.setdefault("scheduler_cls", RULES_SCHEDULER_CLASS)
            rewritten["async_scheduling"] = False  # vLLM's scheduler for that is another
        if engine_args.block_size is None:
            rewritten["block_size"] = kv.block_size
        if not kv.caches_prefixes:
            rewritten["enable_prefix_caching"] = False
            logger.info("vllm-ext: no prefix caching: KV method %s changes blocks that are full", kv.method)
    # The caller's EngineArgs keep what the user wrote, so that a second call sees the same.
    saved = {name: getattr(engine_args, name) for name in rewritten}
    for name, value in rewritten.items():
        setattr(engine_args, name, value)
    try:
        with startup_log.without(*([startup_log.CUSTOM_CLASS] if speculates else [])):
            vllm_config = original(engine_args, *args, **kwargs)
    finally:
        for name, value in saved.items():
            setattr(engine_args, name, value)
    if ruled is not None:
        _check_rules(vllm_config, ruled, on_v2)
        if ruled.twins:
            from vllm_ext.engine import paired_requests

            patches.read_requests()
            paired_requests.load_pieces(vllm_config)
        logger.info("vllm-ext %s: sampling rules %s", __version__, ruled.as_json)
    if kv is not None:
        kv_cache.check_vllm_config(vllm_config, kv)
        logger.info("vllm-ext %s: KV cache by %s", __version__, kv)
    if strict:
        if warning := structured_outputs.check_vllm_config(vllm_config):
            logger.warning("vllm-ext: %s", warning)
        patches.read_requests()
        logger.info("vllm-ext %s: structured output is strict", __version__)
    if settings is not None and choice is not None:
        _check_method(vllm_config, settings, choice)
        patches.allow_all_sampling_parameters(DRAFTER_CLASS, DEVICE_DRAFTER)
        # Not before: vLLM chooses one itself, and knows its own by name while it does.
        if choice.runner == "V1" and vllm_config.parallel_config.distributed_executor_backend == "mp":
            vllm_config.parallel_config.distributed_executor_backend = EXECUTOR_CLASS
        if vllm_config.speculative_config.num_speculative_tokens_per_batch_size is not None:
            ahead = vllm_config.scheduler_config.async_scheduling
            scheduler_class = V2_ASYNC_SCHEDULER_CLASS if ahead else V2_SCHEDULER_CLASS
            vllm_config.scheduler_config.scheduler_cls = scheduler_class
        elif choice.runner == "V2" and settings.options.budget != "fixed":
            logger.warning(
                "vllm-ext: budget=%r has no effect with data_parallel_size=%d on the V2 model runner: ranks must have "
                "equally many drafts. Each step verifies num_speculative_tokens=%d.",
                settings.options.budget,
                vllm_config.parallel_config.data_parallel_size,
                settings.options.num_speculative_tokens,
            )
        logger.info("vllm-ext %s: speculative method %s", __version__, settings)
        logger.info("vllm-ext: model runner %s: %s", choice.runner, choice.reason)
        if choice.runner == "V2" and not runners.is_on_device(settings):
            logger.info("vllm-ext: %s: %s", settings.method, runners.WAITS)
    if vllm_config.use_v2_model_runner and (settings is not None or ruled is not None):
        patches.read_requests()
    if settings is not None or (ruled is not None and ruled.learns):
        # Our counters are a file named after the instance; vLLM's own five hex digits could meet on a busy host.
        vllm_config.instance_id = uuid.uuid4().hex
        patches.show_counters()
    if ruled is not None and vllm_config.scheduler_config.scheduler_cls is None:
        ahead = vllm_config.scheduler_config.async_scheduling
        vllm_config.scheduler_config.scheduler_cls = (
            ENDING_ASYNC_SCHEDULER_CLASS if ahead else ENDING_SCHEDULER_CLASS
        )
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "mp" and "worker_cls" in rewritten:
        parallel.distributed_executor_backend = LEAVING_EXECUTOR_CLASS
    patches.let_engines_end(state_file.SHUTDOWN_SECONDS)
    from vllm.platforms import current_platform

    if missing := compilers.warning(vllm_config, current_platform.device_type):
        logger.warning("vllm-ext: %s", missing)
    return vllm_config


def _settings(engine_args: Any) -> Settings:
    """The method that was asked for, its folders made."""
    from vllm_ext.config import refusals, speculative
    from vllm_ext.engine.state import state_file
    from vllm_ext.proposers.draft_model import PassOptions

    requested = dict(engine_args.speculative_config)
    if engine_args.spec_tokens is not None:
        if "num_speculative_tokens" in requested:
            raise ValueError(
                f"--spec-tokens={engine_args.spec_tokens} and speculative_config.num_speculative_tokens="
                f"{requested['num_speculative_tokens']!r} are the same option; give one of them."
            )
        requested["num_speculative_tokens"] = engine_args.spec_tokens
    settings = speculative.parse(requested)
    refusals.check_engine_args(engine_args, settings.method)
    if isinstance(settings.options, PassOptions):
        refusals.check_scheduler(engine_args, settings.method)
    folders = {name: getattr(settings.options, name, None) for name in ("state_dir", "export_dir")}
    if given := {name: folder for name, folder in folders.items() if folder is not None}:
        # Absolute: a worker may have another working directory.
        settings = settings.with_options(
            **{name: str(state_file.prepare_folder(folder, name)) for name, folder in given.items()}
        )
    return settings


def _with_default_nodes(settings: Settings) -> Settings:
    """Of V2, where the user has not said how many: a tree whose rows with the root are a power of two."""
    from vllm_ext.proposers import level_budget

    if "num_speculative_tokens" in settings.options.model_fields_set:
        return settings
    return settings.with_options(num_speculative_tokens=level_budget.DEFAULT_NODES)


def _as_device_method(engine_args: Any, settings: Settings, ruled: RuleSettings | None) -> dict[str, Any]:
    """The engine's own options that make its V2 runner run a method of ours."""
    from vllm_ext.config import speculative
    from vllm_ext.proposers import level_budget

    nodes = settings.options.num_speculative_tokens
    speculative_config = {
        "method": DEVICE_METHOD,
        "model": DEVICE_DRAFTER,
        "num_speculative_tokens": nodes,
    }
    if settings.options.budget != "fixed":
        most = engine_args.max_num_seqs or MANY_REQUESTS
        speculative_config["num_speculative_tokens_per_batch_size"] = level_budget.by_batch_size(nodes, most)
    return {
        "speculative_config": speculative_config,
        "spec_tokens": None,
        "additional_config": {
            **(engine_args.additional_config or {}),
            speculative.ADDITIONAL_CONFIG_KEY: {
                **speculative.ours(engine_args),
                **({} if ruled is None else {speculative.RULES: json.loads(ruled.as_json)}),
                speculative.SPECULATION: settings.to_additional_config(),
            },
        },
        "worker_cls": V2_WORKER_CLASS,
    }


def _as_custom_class(engine_args: Any, settings: Settings, ruled: RuleSettings | None) -> dict[str, Any]:
    """The engine's own options that make its V1 runner run a method of ours."""
    from vllm_ext.config import speculative
    from vllm_ext.engine import grammar
    from vllm_ext.proposers.draft_model import PassOptions

    options = {
        "speculative_config": {
            "method": "custom_class",
            "model": DRAFTER_CLASS,
            "num_speculative_tokens": settings.options.num_speculative_tokens,
        },
        "spec_tokens": None,
        "additional_config": {
            **(engine_args.additional_config or {}),
            speculative.ADDITIONAL_CONFIG_KEY: {
                **speculative.ours(engine_args),
                **({} if ruled is None else {speculative.RULES: json.loads(ruled.as_json)}),
                speculative.SPECULATION: settings.to_additional_config(),
            },
        },
        "worker_cls": WORKER_CLASS,
        # custom_class rules it out; set, it spares the user vLLM's warning about a method they did not name.
        "async_scheduling": False,
    }
    if isinstance(settings.options, PassOptions):
        options["scheduler_cls"] = SCHEDULER_CLASS
    elif engine_args.scheduler_cls is None:
        options["scheduler_cls"] = grammar.SCHEDULER_CLASS
    return options


def _processor_of(ruled: RuleSettings, on_v2: bool) -> str:
    """What vLLM loads as a logits processor; its runners have different interfaces."""
    if on_v2:
        from vllm_ext.engine.v2 import logits_processor as v2_rules

        return v2_rules.configured.name_of(ruled)
    from vllm_ext.engine.v1 import logits_processor as v1_rules

    return v1_rules.configured.name_of(ruled)


def _with_folders(ruled: RuleSettings) -> RuleSettings:
    """The rules that were asked for, their folders made."""
    from vllm_ext.engine.state import state_file

    given = {name: getattr(options, "state_dir", None) for name, options in ruled.options.items()}
    folders = {
        name: str(state_file.prepare_folder(folder, option="--additional-config"))
        for name, folder in given.items()
        if folder is not None
    }
    return ruled.with_options({name: {"state_dir": folder} for name, folder in folders.items()})


def _for_rules(engine_args: Any, ruled: RuleSettings) -> dict[str, Any]:
    """The engine's own options that rules need which do more than read logits; those of a method have them too."""
    options: dict[str, Any] = {}
    if ruled.reports or ruled.learns or ruled.steers:
        options["worker_cls"] = RULES_WORKER_CLASS
    if ruled.schedules:
        options["scheduler_cls"] = RULES_SCHEDULER_CLASS
        options["async_scheduling"] = False  # vLLM's scheduler for that is another
    return options


def _check_method(vllm_config: Any, settings: Settings, choice: Choice) -> None:
    """What only the finished configuration tells of a method."""
    from vllm_ext.config import refusals
    from vllm_ext.proposers.draft_model import DraftModelOptions
    from vllm_ext.proposers.self_draft import SelfDraftOptions

    refusals.check_vllm_config(vllm_config, settings.method, choice)
    settings.proposer_class.check(settings.options, *_vocabulary(vllm_config))
    if isinstance(settings.options, DraftModelOptions):
        from vllm_ext.engine.models import second_model

        second_model.check(vllm_config, settings.options)
    if isinstance(settings.options, SelfDraftOptions):
        from vllm_ext.engine.models import layer_slices

        layer_slices.check(vllm_config, settings)


def _check_rules(vllm_config: Any, ruled: RuleSettings, on_v2: bool) -> None:
    """What only the finished configuration tells of rules."""
    from vllm_ext.config import refusals, rules

    refusals.check_rules_config(vllm_config, ruled, on_v2)
    ruled.check(*_vocabulary(vllm_config), vllm_config.model_config.get_total_num_hidden_layers())
    for name, options in ruled.options.items():
        if (file := getattr(options, "file", None)) is not None:
            from vllm_ext.data import steering_artifacts

            with rules.named(name):
                steering_artifacts.check("file", file, name, vllm_config.model_config.model)
    if ruled.companion is not None:
        from vllm_ext.engine.models import second_model

        field = f'{rules.FIELD}["rules"]'
        second_model.check_reads_text(vllm_config, field)
        companion = second_model.check(vllm_config, ruled.companion, field)
        ruled.check_companion(companion.get_total_num_hidden_layers())


def _vocabulary(vllm_config: Any) -> tuple[int, Callable[[], str]]:
    """The target's number of token ids, and what hashes its tokenizer."""
    from vllm_ext.data import model_files

    model = vllm_config.model_config
    return (
        model.get_vocab_size(),
        functools.partial(model_files.hash_of, model.tokenizer, model.tokenizer_revision),
    )
