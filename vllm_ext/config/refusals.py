# SPDX-License-Identifier: Apache-2.0
"""Options of the engine that our methods and rules do not work with: refused at start-up, with the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ext.config import schedulers
from vllm_ext.samplers.registry import load_rule

if TYPE_CHECKING:
    from vllm_ext.config.rules import RuleSettings
    from vllm_ext.config.runners import RunnerChoice


# vLLM's connectors that may stand beside trees. What they save: the first, blocks of prompts, which have no drafts; the
# second, also blocks whose tokens were all committed when the step was scheduled; the third, which another engine reads
# from, those of a request that is done, up to its prompt's end. The accepted path is moved in the step that verifies
# it, so the slots of such tokens are final.
CONNECTORS = ("ExampleConnector", "OffloadingConnector", "NixlConnector")


def check_engine_args(args: Any, method: str) -> None:
    """Refuse options our methods do not work with, before vLLM looks at the model.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    refusals = (
        (
            args.pipeline_parallel_size > 1,
            f"pipeline_parallel_size={args.pipeline_parallel_size}",
            "must be 1: only the last stage sees the logits that drafts are made of. Use tensor parallelism.",
        ),
        (
            args.worker_cls != "auto",
            f"worker_cls={args.worker_cls!r}",
            "must be 'auto': the method installs its own worker class.",
        ),
    )
    for refused, what, rule in refusals:
        if refused:
            raise ValueError(_refusal(method, what, rule))


def check_runner(args: Any, method: str, choice: RunnerChoice) -> None:
    """Refuse what the V1 runner cannot do, where the method runs on that.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    import vllm.envs as envs

    if choice.runner == "V2":
        return
    refusals = (
        (
            args.async_scheduling is True,
            "async_scheduling=True",
            "must be unset or False: drafts are made on the host from the tokens of the step before.",
        ),
        (
            bool(envs.VLLM_USE_V2_MODEL_RUNNER),
            "VLLM_USE_V2_MODEL_RUNNER=1",
            f"must be unset or 0: the method runs on vLLM's V1 model runner ({choice.reason}).",
        ),
        (
            args.watermark_config is not None,
            "watermark_config",
            f"must be unset: it needs the V2 model runner, and the method runs on V1 ({choice.reason}).",
        ),
    )
    for refused, what, rule in refusals:
        if refused:
            raise ValueError(_refusal(method, what, rule))


def check_rules(args: Any) -> None:
    """Refuse options that sampling rules do not work with where none of our methods runs.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    if args.speculative_config:
        raise ValueError(
            f"sampling rules do not work with speculative_config.method={args.speculative_config.get('method')!r}: "
            "vLLM's own methods sample without logits processors. Use one of vllm-ext's (`vllm-ext methods`), or none."
        )


def check_rules_runner(ruled: RuleSettings, on_v2: bool) -> None:
    """Refuse rules that vLLM's V2 runner has no place for, where that runs.

    Raises:
        ValueError: naming the rules and the way out.
    """
    if on_v2 and ruled.need_v1:
        reasons = "; ".join(f"{name!r} {load_rule(name).why_v1}" for name in ruled.need_v1)
        raise ValueError(
            f"sampling rules {', '.join(map(repr, ruled.need_v1))} do not work with vLLM's V2 model runner yet "
            f"({reasons}): set VLLM_USE_V2_MODEL_RUNNER=0."
        )


def check_rules_classes(args: Any, ruled: RuleSettings) -> None:
    """Refuse classes of the user's own where rules bring theirs.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    refusals = (
        (
            (ruled.reports or ruled.learns or ruled.steers) and args.worker_cls != "auto",
            "worker_cls",
            "'auto'",
        ),
        (ruled.schedules and args.scheduler_cls is not None, "scheduler_cls", "unset"),
        (ruled.schedules and args.async_scheduling is True, "async_scheduling", "unset or False"),
    )
    for refused, option, rule in refusals:
        if refused:
            names = ", ".join(map(repr, ruled.options))
            raise ValueError(
                f"sampling rules {names} do not work with {option}={getattr(args, option)!r}: it must be {rule}, as "
                "what a rule learns, reports or reads goes through classes of its own. Remove that option, or the rule."
            )


def check_rules_scheduler(args: Any, ruled: RuleSettings) -> None:
    """Refuse a scheduler of the user's own that ours does not stand before, where rules on V2 need it.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    if ruled.shares_grammars and args.scheduler_cls is not None:
        raise ValueError(
            f"sampling rule {ruled.shares_grammars[0]!r} does not work with scheduler_cls={args.scheduler_cls!r} on "
            "vLLM's V2 model runner without a method of ours: it must be unset, as grammars come by a scheduler class. "
            "Remove that option, or the rule."
        )


def check_rules_config(vllm_config: Any, ruled: RuleSettings, on_v2: bool) -> None:
    """Refuse for sampling rules what only the finished config tells.

    Raises:
        ValueError: naming the field, its value and the way out.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    model = vllm_config.model_config
    if vllm_config.use_v2_model_runner != on_v2:
        raise ValueError(
            f"sampling rules are ready for vLLM's {'V2' if on_v2 else 'V1'} model runner, and it runs the other: set "
            "VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if model.runner_type != "generate":
        raise ValueError(
            f"sampling rules do not work with runner={model.runner_type!r}: it must be 'generate'. Remove the rules."
        )
    if model.skip_tokenizer_init or cached_tokenizer_from_config(model).eos_token_id is None:
        raise ValueError(
            f"sampling rules do not work with model {model.model!r}: it has no tokenizer with an end token "
            "(eos_token). Choose another model or tokenizer, leave out --skip-tokenizer-init, or remove the rules."
        )
    parallel = vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    if on_v2 and ruled.shares_grammars and parallel.world_size == 1 and executor != "uni":
        raise ValueError(
            f"sampling rule {ruled.shares_grammars[0]!r} does not work with distributed_executor_backend={executor!r} "
            "on vLLM's V2 model runner: it must be 'uni', which is vLLM's own choice for one GPU, as the rule reads "
            "grammars in the engine core's process. Give that, or remove the rule."
        )
    if ruled.adds_requests and vllm_config.scheduler_config.max_num_seqs < 2:
        raise ValueError(
            f"sampling rule {ruled.adds_requests[0]!r} does not work with max_num_seqs=1: it must be 2 at least, as it "
            "adds requests that run beside those it is for. Raise it, or remove the rule."
        )
    if ruled.adds_requests and vllm_config.kv_transfer_config is not None:
        raise ValueError(
            f"sampling rule {ruled.adds_requests[0]!r} does not work with a KV connector (kv_transfer_config or KV "
            "offloading): it must be unset, as the requests it adds have no other side. Leave it out, or remove the "
            "rule."
        )
    if on_v2 and ruled.adds_requests and (model.is_hybrid or model.is_attention_free):
        raise ValueError(
            f"sampling rule {ruled.adds_requests[0]!r} does not work with model {model.model!r}, which has recurrent "
            "(Mamba-like) layers, on vLLM's V2 model runner: all of its layers must be attention, as a request that "
            "waits for another reads its last token again. Choose another model, or remove the rule."
        )
    whole = ruled.steers or ruled.reports or ruled.learns
    if on_v2 and whole and parallel.enable_batch_sharded_sampling:
        raise ValueError(
            "sampling rules that steer, report or learn do not work with enable_batch_sharded_sampling=True on vLLM's "
            "V2 model runner: it must be False, as each rank then samples rows that no other sees. Leave it out, or "
            "remove the rules."
        )
    mode = vllm_config.compilation_config.cudagraph_mode
    if on_v2 and ruled.companion is not None and mode is not None and mode.has_full_cudagraphs():
        raise ValueError(
            f"sampling rules that read a second model do not work with cudagraph_mode={mode.name} on vLLM's V2 model "
            "runner: it must be 'PIECEWISE' or 'NONE', as the model reads along with steps that no graph replays. "
            """Give --compilation-config '{"cudagraph_mode": "PIECEWISE"}', or set VLLM_USE_V2_MODEL_RUNNER=0."""
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if ruled.steers and stages > 1:
        raise ValueError(
            f"sampling rules that steer do not work with pipeline_parallel_size={stages}: it must be 1, as they read "
            "all layers, and a second model, where tokens are sampled. Use tensor parallelism, or remove the rules."
        )


def check_scheduler(args: Any, method: str) -> None:
    """Refuse a scheduler of the user's own next to a draft model on V1: drafts need slots that vLLM's does not reserve.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    if args.scheduler_cls is not None:
        raise ValueError(
            _refusal(method, f"scheduler_cls={args.scheduler_cls!r}", "must be unset: it brings its own.")
        )


def check_scheduling_ahead(args: Any, method: str) -> None:
    """Refuse a scheduler of the user's own that cannot do what ``async_scheduling`` asks of it.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    if args.async_scheduling is True and not schedulers.is_ahead(args.scheduler_cls):
        raise ValueError(
            _refusal(
                method,
                f"async_scheduling=True and scheduler_cls={schedulers.path_of(args.scheduler_cls)!r}",
                "must derive from vLLM's AsyncScheduler, or async_scheduling be unset: vLLM would not hand it drafts.",
            )
        )


def check_vllm_config(vllm_config: Any, method: str, choice: RunnerChoice, reads_nodes: bool = False) -> None:
    """Refuse what only the finished config tells (offloading turns into a connector, a model into a pooler).

    Args:
        vllm_config: vLLM's.
        method: its name.
        choice: of the runner.
        reads_nodes: whether it has passes over nodes that are not verified yet; see `hybrid.reads_nodes`.

    Raises:
        ValueError: naming the field, its value and the way out.
    """
    from vllm.platforms import current_platform

    if vllm_config.kv_transfer_config is not None:
        _check_connector(vllm_config.kv_transfer_config, method, reads_nodes)
    if vllm_config.use_v2_model_runner != (choice.runner == "V2"):
        raise ValueError(
            _refusal(
                method,
                "this configuration",
                f"was made for the {choice.runner} model runner ({choice.reason}), and vLLM runs the other one. Set "
                "VLLM_USE_V2_MODEL_RUNNER=0.",
            )
        )
    if choice.runner == "V2" and vllm_config.watermark_config is not None:
        raise ValueError(_refusal(method, "watermark_config", "must be unset: it has a sampler of its own."))
    if vllm_config.model_config.runner_type != "generate":
        raise ValueError(
            _refusal(
                method,
                f"runner={vllm_config.model_config.runner_type!r}",
                "must be 'generate': a pooling model decodes nothing.",
            )
        )
    if vllm_config.model_config.is_hybrid or vllm_config.model_config.is_attention_free:
        _check_recurrent(vllm_config, method, choice)
    if vllm_config.parallel_config.use_ubatching:
        raise ValueError(
            _refusal(method, "microbatching (--enable-dbo)", "must be off: it splits a step's trees.")
        )
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        raise ValueError(
            _refusal(method, f"platform {current_platform.device_name!r}", "must be CPU, CUDA or ROCm.")
        )


def _check_connector(given: Any, method: str, reads_nodes: bool) -> None:
    """Of connectors whose saved blocks are known to hold no slot of a draft: see `CONNECTORS`.

    Args:
        given: vLLM's ``KVTransferConfig``, or one of those in a ``MultiConnector``.
        method: its name.
        reads_nodes: see `check_vllm_config`.
    """
    name, extra = given.kv_connector, given.kv_connector_extra_config
    what = f"the KV connector {name!r} (kv_transfer_config or KV offloading)"
    if name == "MultiConnector":
        for each in extra.get("connectors", []):
            _check_connector(type(given)(**each), method, reads_nodes)
    elif name not in CONNECTORS:
        known = " or ".join(map(repr, CONNECTORS))
        raise ValueError(
            _refusal(
                method, what, f"must be {known}: of others it is not known that they leave drafts' slots out."
            )
        )
    if extra.get("bidirectional_kv_xfer"):
        raise ValueError(
            _refusal(
                method,
                f"{what} with bidirectional_kv_xfer=True",
                "must be without: vLLM counts a finished request's tokens with drafts behind its last one.",
            )
        )
    if reads_nodes:
        raise ValueError(
            _refusal(
                method,
                what,
                "must be unset: the method's passes write KV that a connector would save before it is right. Methods "
                "without passes work, such as 'token_recycling'.",
            )
        )


def _check_recurrent(vllm_config: Any, method: str, choice: RunnerChoice) -> None:
    """Of a model with recurrent layers, whose state cannot be taken back."""
    from vllm.platforms import current_platform

    model, cache = f"model {vllm_config.model_config.model!r}", vllm_config.cache_config
    if choice.runner == "V1" and not current_platform.is_cpu():
        raise ValueError(
            _refusal(method, model, "has recurrent (Mamba-like) layers, and needs the V2 runner on GPUs.")
        )
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        raise ValueError(
            _refusal(
                method,
                f"{model}, which has recurrent (Mamba-like) layers, and cudagraph_mode={mode.name}",
                """needs graphs without them: --compilation-config '{"cudagraph_mode": "PIECEWISE"}'.""",
            )
        )
    if cache.mamba_cache_mode != "none":
        raise ValueError(
            _refusal(
                method,
                f"{model}, which has recurrent (Mamba-like) layers, and prefix caching",
                "needs --no-enable-prefix-caching.",
            )
        )
    if cache.use_replayssm:
        raise ValueError(_refusal(method, "--use-replayssm", "must be off: it reads states in its own way."))


def _refusal(method: str, what: str, rule: str) -> str:
    return (
        f"speculative method {method!r} does not work with {what}: it {rule} "
        f"Change it, or remove the method from --speculative-config."
    )
