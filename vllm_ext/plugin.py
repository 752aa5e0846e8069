# SPDX-License-Identifier: Apache-2.0
"""The entry point vLLM calls in every process, and the one wrapper it installs.

``register()`` wraps ``EngineArgs.create_engine_config`` and does nothing else. vLLM's ``method`` is a closed
Literal and its registries start behind it, so this is the one place where our method names can enter; the
wrapper turns them into vLLM's own ``custom_class`` and a ``worker_cls``, both official options.
"""

from __future__ import annotations

import functools
import uuid
from typing import Any

from vllm_ext import __version__

# What vLLM loads as its custom_class drafter, and what drives it.
DRAFTER_CLASS = "vllm_ext.v1_drafter.Drafter"
WORKER_CLASS = "vllm_ext.v1_worker.Worker"
SCHEDULER_CLASS = "vllm_ext.v1_scheduler.Scheduler"  # of methods that draft with a model


_wrapper: Any = None


def register() -> None:
    """Make our method names valid in ``speculative_config``. Idempotent and silent."""
    global _wrapper
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if original is _wrapper:
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _create_engine_config(original, self, *args, **kwargs)

    _wrapper = create_engine_config
    EngineArgs.create_engine_config = create_engine_config


def _create_engine_config(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's ``create_engine_config``, with our methods rewritten to options it knows.

    Raises:
        ValueError: an unknown method or option, or a feature our methods do not support.
    """
    if not engine_args.speculative_config:
        return original(engine_args, *args, **kwargs)

    from vllm_ext import config

    if not config.is_ours(engine_args.speculative_config):
        config.check_known(engine_args.speculative_config)
        return original(engine_args, *args, **kwargs)

    from vllm.logger import init_logger

    from vllm_ext import compat, grammars, patches, state, vocabulary
    from vllm_ext.proposers.draft_model import DraftModelOptions, PassOptions
    from vllm_ext.proposers.self_draft import SelfDraftOptions

    compat.check_version()
    requested = dict(engine_args.speculative_config)
    if engine_args.spec_tokens is not None:
        if "num_speculative_tokens" in requested:
            raise ValueError(
                f"--spec-tokens={engine_args.spec_tokens} and speculative_config.num_speculative_tokens="
                f"{requested['num_speculative_tokens']!r} are the same option; give one of them."
            )
        requested["num_speculative_tokens"] = engine_args.spec_tokens
    settings = config.parse(requested)
    compat.check_engine_args(engine_args, settings.method)
    if isinstance(settings.options, PassOptions):
        compat.check_scheduler(engine_args, settings.method)
    folders = {name: getattr(settings.options, name, None) for name in ("state_dir", "export_dir")}
    if given := {name: folder for name, folder in folders.items() if folder is not None}:
        # Absolute: a worker may have another working directory.
        settings = settings.with_options(
            **{name: str(state.prepare_folder(folder, name)) for name, folder in given.items()}
        )
        patches.let_engines_save(state.SHUTDOWN_SECONDS)

    rewritten = {
        "speculative_config": {
            "method": "custom_class",
            "model": DRAFTER_CLASS,
            "num_speculative_tokens": settings.options.num_speculative_tokens,
        },
        "spec_tokens": None,
        "additional_config": {
            **(engine_args.additional_config or {}),
            config.ADDITIONAL_CONFIG_KEY: settings.to_additional_config(),
        },
        "worker_cls": WORKER_CLASS,
        # custom_class rules it out; set, it spares the user vLLM's warning about a method they did not name.
        "async_scheduling": False,
    }
    if isinstance(settings.options, PassOptions):
        rewritten["scheduler_cls"] = SCHEDULER_CLASS
    elif engine_args.scheduler_cls is None:
        rewritten["scheduler_cls"] = grammars.SCHEDULER_CLASS
    # The caller's EngineArgs keep what the user wrote, so that a second call sees the same.
    saved = {name: getattr(engine_args, name) for name in rewritten}
    for name, value in rewritten.items():
        setattr(engine_args, name, value)
    try:
        vllm_config = original(engine_args, *args, **kwargs)
    finally:
        for name, value in saved.items():
            setattr(engine_args, name, value)
    compat.check_vllm_config(vllm_config, settings.method)
    model = vllm_config.model_config
    settings.proposer_class.check(
        settings.options,
        model.get_vocab_size(),
        functools.partial(vocabulary.hash_of, model.tokenizer, model.tokenizer_revision),
    )
    if isinstance(settings.options, DraftModelOptions):
        from vllm_ext import companion_load

        companion_load.check(vllm_config, settings.options)
    if isinstance(settings.options, SelfDraftOptions):
        from vllm_ext import layer_slices

        layer_slices.check(vllm_config, settings)
    patches.allow_all_sampling_parameters(DRAFTER_CLASS)
    # Our counters are a file named after the instance; vLLM's own five hex digits could meet on a busy host.
    vllm_config.instance_id = uuid.uuid4().hex
    init_logger("vllm.vllm_ext").info("vllm-ext %s: speculative method %s", __version__, settings)
    return vllm_config
