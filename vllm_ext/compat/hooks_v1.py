# SPDX-License-Identifier: Apache-2.0
"""The symbols of vLLM that we override, call or read with its V1 runner; others: `hooks_v2`, `hooks_cuda`."""

from __future__ import annotations

from vllm_ext.compat.hooks import Hook
from vllm_ext.compat.hooks_blocks import BLOCK_HOOKS
from vllm_ext.compat.hooks_structured import STRUCTURED_HOOKS

_SPEC = "vllm.v1.kv_cache_interface"
HIDDEN_STATE_HOOKS = (
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
    Hook(
        "vllm.model_executor.models.llama_eagle3",
        "Eagle3LlamaForCausalLM.forward",
        ("self", "input_ids", "positions", "hidden_states", "inputs_embeds"),
        "passes of EAGLE-3's head, and of its relatives",
    ),
)
LAYER_HOOKS = (
    *(
        Hook("vllm.model_executor.layers.attention_layer_base", f"AttentionLayerBase.{name}", parameters, why)
        for name, parameters, why in (
            ("get_attn_backend", ("self",), "tells the backend of a layer"),
            ("get_kv_cache_spec", ("self", "vllm_config"), "tells what a layer's cache is like"),
        )
    ),
    Hook(
        "vllm.model_executor.layers.attention.chunked_local_attention",
        "create_chunked_local_attention_backend",
        ("underlying_attn_backend", "attention_chunk_size"),
        "tells the backend of layers in chunks from others that vLLM derives",
    ),
    Hook(_SPEC, "ChunkedLocalAttentionSpec.attention_chunk_size", None, "tells their chunks"),
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
        "vllm.model_executor.custom_op",
        "PluggableLayer.register_oot",
        ("_decorated_layer_cls", "name"),
        "makes layers of ours on CPUs",
    ),
    Hook(
        "vllm.model_executor.layers.linear",
        "UnquantizedLinearMethod.process_weights_after_loading",
        ("self", "layer"),
        "gives layers on CPUs their product",
    ),
    Hook(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        ("self", "layer"),
        "gives the head its product",
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
    *BLOCK_HOOKS,
    *STRUCTURED_HOOKS,
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
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("self",), "makes room for pairs of requests"),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.finish_requests",
        ("self", "request_ids", "finished_status"),
        "ends pairs with their primaries",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._preempt_request",
        ("self", "request", "timestamp"),
        "makes room for pairs of requests",
    ),
    Hook(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        ("self", "request_id", "prompt", "params"),
        "makes the prompts of pairs of requests",
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
        "SamplingParams.verify",
        ("self", "model_config", "speculative_config"),
        "lets requests use min_p and logit_bias, where it is told of no speculation",
    ),
    Hook(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        ("backend", "class_path"),
        "puts tree attention in front of the platform's backend",
    ),
    *(
        Hook(
            "vllm.v1.attention.backends.registry",
            f"AttentionBackendEnum.{name}",
            ("self",),
            "gives the platform's backend back",
        )
        for name in ("is_overridden", "clear_override", "get_path")
    ),
    Hook(
        "vllm.v1.attention.selector",
        "_cached_get_attn_backend",
        None,
        "lets each engine of a process have its own backend",
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
        "GPUModelRunner._calc_mrope_positions",
        ("self", "scheduler_output"),
        "counts M-RoPE's positions on from the prompt's",
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
    *HIDDEN_STATE_HOOKS,
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
    Hook("vllm.v1.core.sched.scheduler", "Scheduler.make_stats", ("self",), "sends them to the API server"),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.has_requests",
        ("self",),
        "sends what a start has counted",
    ),
    Hook("vllm.v1.metrics.stats", "SchedulerStats.perf_stats", None, "has them"),
    Hook("vllm.v1.metrics.perf", "PerfStats.debug_stats", None, "has them"),
    Hook("vllm.v1.metrics.perf", "DebugPerfStats.context_breakdown", None, "has them"),
    Hook("vllm.v1.outputs", "EMPTY_MODEL_RUNNER_OUTPUT", None, "is copied where it is to have some"),
    Hook("vllm.v1.engine.llm_engine", "LLMEngine.collective_rpc", ("self", "method"), "asks for them"),
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
