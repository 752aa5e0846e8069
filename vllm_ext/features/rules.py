# SPDX-License-Identifier: Apache-2.0
"""Sampling rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_ext import __version__
from vllm_ext.config import refusals, rules, speculative, structured_outputs
from vllm_ext.config.rules import RuleSettings
from vllm_ext.data import steering_artifacts
from vllm_ext.engine import paired_requests
from vllm_ext.engine.models import second_model
from vllm_ext.engine.state import state_file
from vllm_ext.features.base import Asked, Feature, vocabulary

logger = init_logger("vllm.vllm_ext")


class Rules(Feature):
    """A logits processor, and where they need them a worker and a scheduler."""

    def parse(self, args: Any, asked: Asked) -> None:
        ruled = rules.from_config(args)
        if ruled is not None:
            given = {name: getattr(options, "state_dir", None) for name, options in ruled.options.items()}
            folders = {
                name: {"state_dir": str(state_file.prepare_folder(folder, option="--additional-config"))}
                for name, folder in given.items()
                if folder is not None
            }
            asked.rules = ruled.with_options(folders)

    def refuse(self, args: Any, asked: Asked) -> None:
        if asked.rules is not None:
            if asked.method is None:
                refusals.check_rules(args)
            refusals.check_rules_classes(args, asked.rules)
            refusals.check_rules_runner(asked.rules, asked.on_v2)
            if asked.on_v2 and asked.method is None:
                refusals.check_rules_scheduler(args, asked.rules)

    def options(self, args: Any, asked: Asked) -> dict[str, Any]:
        ruled = asked.rules
        if ruled is None:
            return {}
        own = args.logits_processors if asked.processors is None else asked.processors
        processors = [*(own or ()), _processor_of(ruled, asked.on_v2)]
        options: dict[str, Any] = {"logits_processors": processors}
        may_wait = args.scheduler_cls is None and not args.async_scheduling
        if ruled.schedules or (ruled.waits(asked.on_v2) and may_wait):
            options["async_scheduling"] = False  # a token cannot be deferred once the next step is scheduled
        return options

    def worker_parts(self, asked: Asked) -> Sequence[str]:
        if asked.rules is None:
            return ()
        return ("V2Rules" if asked.on_v2 else "Rules", *(("Counts",) if asked.rules.learns else ()))

    def scheduler_parts(self, vllm_config: Any, asked: Asked) -> Sequence[str]:
        ruled = asked.rules
        if ruled is None:
            return ()
        waits = ruled.waits(asked.on_v2) and not vllm_config.scheduler_config.async_scheduling
        if asked.on_v2:
            # There parts of ours may stand before a scheduler of the user's, and recurrent layers read no token again.
            model, own = vllm_config.model_config, vllm_config.scheduler_config.scheduler_cls is not None
            waits = waits and not (own or model.is_hybrid or model.is_attention_free)
        parts = {
            "FaultyRequests": True,
            "RuleReports": ruled.reports,
            "CompanionBlocks": ruled.companion is not None,
            "PairedRequests": ruled.pairs,
            "LookaheadRequests": ruled.looks_ahead is not None,
            "SharedGrammars": asked.on_v2 and bool(ruled.shares_grammars),
            "DeferredTokens": waits,
            "Counts": ruled.learns,
        }
        return [name for name, wanted in parts.items() if wanted]

    def settings(self, asked: Asked) -> dict[str, Any]:
        return {} if asked.rules is None else {speculative.RULES: json.loads(asked.rules.as_json)}

    def check(self, vllm_config: Any, asked: Asked) -> None:
        ruled = asked.rules
        if ruled is None:
            return
        refusals.check_rules_config(vllm_config, ruled, asked.on_v2)
        ruled.check(*vocabulary(vllm_config), vllm_config.model_config.get_total_num_hidden_layers())
        if "close_by_max_tokens" in ruled.options:
            structured_outputs.check_closing(vllm_config)
        for name, options in ruled.options.items():
            if (file := getattr(options, "file", None)) is not None:
                with rules.named(name):
                    steering_artifacts.check("file", file, name, vllm_config.model_config.model)
        if ruled.companion is not None:
            field = f'{rules.FIELD}["rules"]'
            second_model.check_reads_text(vllm_config, field)
            companion = second_model.check(vllm_config, ruled.companion, field)
            ruled.check_companion(companion.get_total_num_hidden_layers())
        if ruled.pairs:
            paired_requests.load_pieces(vllm_config)
        logger.info("vllm-ext %s: sampling rules %s", __version__, ruled.as_json)


def _processor_of(ruled: RuleSettings, on_v2: bool) -> str:
    """What vLLM loads as a logits processor; its runners have different interfaces."""
    if on_v2:
        from vllm_ext.engine.v2 import logits_processor as v2_rules

        return v2_rules.configured.name_of(ruled)
    from vllm_ext.engine.v1 import logits_processor as v1_rules

    return v1_rules.configured.name_of(ruled)
