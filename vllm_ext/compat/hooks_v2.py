# SPDX-License-Identifier: Apache-2.0
"""The symbols of vLLM's V2 runner that we override, call or read.

`hooks_v1` has those of the V1 runner. An engine needs the table of its runner, and on a GPU that of `hooks_cuda` too.
"""

from __future__ import annotations

from vllm_ext.compat.hooks import Hook
from vllm_ext.compat.hooks_blocks import V2_BLOCK_HOOKS
from vllm_ext.compat.hooks_cuda import CUDA_HOOKS
from vllm_ext.compat.hooks_recurrent import RECURRENT_HOOKS
from vllm_ext.compat.hooks_structured import V2_STRUCTURED_HOOKS
from vllm_ext.compat.hooks_v1 import HIDDEN_STATE_HOOKS, HOOKS, LAYER_HOOKS

_GPU = "vllm.v1.worker.gpu"
_BATCH = f"{_GPU}.input_batch"
_STATE = f"{_GPU}.model_states.interface"
_PROCESSOR = f"{_GPU}.sample.logits_processor.interface"
_SPECULATOR = f"{_GPU}.spec_decode.speculator"
_OUTPUT = "vllm.v1.core.sched.output"
_RUNNER = f"{_GPU}.model_runner"

V2_HOOKS = (
    *LAYER_HOOKS,
    *HIDDEN_STATE_HOOKS,
    *V2_BLOCK_HOOKS,
    *V2_STRUCTURED_HOOKS,
    *(
        Hook(f"{_GPU}.sample.logit_bias", name, None, "longer lists of a request are refused")
        for name in ("MAX_NUM_ALLOWED_TOKEN_IDS", "MAX_NUM_LOGIT_BIAS_TOKENS", "MAX_NUM_STOP_TOKEN_IDS")
    ),
    Hook("vllm.config", "VllmConfig.use_v2_model_runner", None, "tells which runner vLLM has chosen"),
    Hook(
        f"{_GPU}.spec_decode",
        "init_speculator",
        ("vllm_config", "device", "req_states"),
        "makes what our drafter takes the place of",
    ),
    *(
        Hook(_SPECULATOR, f"BaseSpeculator.{name}", parameters, "drafts on the device")
        for name, parameters in (
            ("init_cudagraph_manager", ("self", "cudagraph_mode")),
            ("capture", ("self",)),
        )
    ),
    Hook(
        _SPECULATOR,
        "BaseSpeculator.propose",
        (
            *(
                "self",
                "input_batch",
                "attn_metadata",
                "slot_mappings",
                "last_hidden_states",
                "aux_hidden_states",
            ),
            *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
        ),
        "drafts on the device",
    ),
    Hook(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.broadcast",
        ("self", "input_", "src"),
        "gives all ranks the trees of one",
    ),
    Hook(_SPECULATOR, "BaseSpeculator.num_query_per_req", None, "drafts without queries of their own"),
    Hook(
        f"{_GPU}.states",
        "RequestState",
        ("max_num_reqs", "max_model_len", "max_num_batched_tokens", "num_speculative_steps", "vocab_size"),
        "has the requests' texts on the device",
    ),
    Hook(_STATE, "ModelState.add_request", ("self", "req_index", "new_req_data"), "a request has got a slot"),
    Hook(
        _STATE, "ModelState.initialize_kv_cache", ("self", "kv_cache_config", "block_tables"), "binds caches"
    ),
    Hook(
        _STATE,
        "ModelState.preprocess_state",
        ("self", "input_batch", "block_tables", "kv_cache_config", "num_computed_tokens"),
        "sets the nodes' positions after the slots",
    ),
    Hook(
        _STATE,
        "ModelState.postprocess_state",
        ("self", "idx_mapping", "num_sampled", "num_computed_tokens"),
        "comes after a step's tokens are taken over",
    ),
    Hook(
        _STATE,
        "ModelState.prepare_inputs",
        ("self", "input_batch", "req_states"),
        "hands positions to the model",
    ),
    Hook(
        f"{_GPU}.model_states.default",
        "DefaultModelState.prepare_inputs",
        ("self", "input_batch", "req_states"),
        "hands M-RoPE's positions to the model",
    ),
    Hook(
        _STATE,
        "ModelState.prepare_dummy_inputs",
        ("self", "num_reqs", "num_tokens"),
        "hands them to what is captured",
    ),
    Hook(
        _STATE,
        "ModelState.prepare_attn",
        (
            *("self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
            *("kv_cache_config", "for_capture"),
        ),
        "marks tree rows",
    ),
    Hook(_STATE, "ModelState.custom_sampler", ("self", "sampler"), "vLLM's place for a sampler"),
    Hook(
        f"{_GPU}.model_states",
        "resolve_model_state_cls",
        ("vllm_config", "model"),
        "vLLM's model state class",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.prepare_inputs",
        ("self", "scheduler_output", "batch_req_state", "batch_desc"),
        "lays drafts out as a chain",
    ),
    Hook(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin._set_active_loras",
        ("self", "prompt_lora_mapping", "token_lora_mapping", "lora_requests"),
        "tells which adapter a row of logits has",
    ),
    Hook(_RUNNER, "GPUModelRunner.prepare_attn", ("self", "input_batch"), "computes slots of the flat list"),
    Hook(_RUNNER, "GPUModelRunner.add_requests", ("self", "scheduler_output"), "admits requests"),
    *(
        Hook(_OUTPUT, f"NewRequestData.{field}", None, "a request's text, for drafts")
        for field in ("req_id", "sampling_params", "prompt_token_ids", "prefill_token_ids", "prompt_len")
    ),
    Hook(_OUTPUT, "SchedulerOutput.scheduled_new_reqs", None, "admits requests"),
    *(
        Hook(_OUTPUT, f"SchedulerOutput.{field}", None, "cuts a step's drafts")
        for field in ("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens")
    ),
    Hook(_RUNNER, "GPUModelRunner.execute_model", ("self", "scheduler_output"), "cuts a step's drafts"),
    Hook(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len",
        ("vllm_config", "kv_cache_spec"),
        "says of which query lengths a graph may be",
    ),
    Hook(
        "vllm.config.compilation",
        "CompilationConfig.splitting_ops_contain_attention",
        ("self",),
        "keeps attention out of graphs",
    ),
    Hook("vllm.v1.request", "Request.use_structured_output", None, "tells which requests are structured"),
    Hook(_OUTPUT, "SchedulerOutput.finished_req_ids", None, "tells a drafter on the host who is gone"),
    Hook(_RUNNER, "GPUModelRunner.load_model", ("self",), "puts our parts in place"),
    Hook(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache",
        ("self", "kv_cache_config"),
        "asks whether the layers take trees",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.sample",
        ("self", "hidden_states", "input_batch", "grammar_output"),
        "moves the accepted path's KV",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected"),
        "takes a step's tokens over before drafts are made",
    ),
    Hook(
        _RUNNER,
        "ExecuteModelState",
        ("input_batch", "attn_metadata", "slot_mappings_by_layer", "hidden_states", "aux_hidden_states"),
        "what a step leaves for sampling",
    ),
    *(
        Hook(_BATCH, f"InputBatch.{field}", None, "how a step's rows lie")
        for field in (
            *("req_ids", "num_reqs", "idx_mapping", "idx_mapping_np", "num_tokens_after_padding"),
            *("expanded_idx_mapping", "expanded_local_pos", "num_draft_tokens"),
            *("num_draft_tokens_per_req", "query_start_loc", "query_start_loc_np", "seq_lens", "positions"),
            *("input_ids", "logits_indices", "cu_num_logits", "cu_num_logits_np", "num_reqs_after_padding"),
        )
    ),
    Hook(
        _BATCH,
        "prepare_pos_seq_lens",
        ("idx_mapping", "query_start_loc", "num_computed_tokens", "pos", "seq_lens"),
        "flat positions, which slots are computed from",
    ),
    Hook(
        _BATCH,
        "combine_sampled_and_draft_tokens",
        ("input_ids", "idx_mapping", "last_sampled_tokens", "query_start_loc", "seq_lens", "prefill_len"),
        "puts drafts behind the last token",
    ),
    Hook(
        _BATCH,
        "post_update",
        (
            *(
                "idx_mapping",
                "num_computed_tokens",
                "last_sampled_tokens",
                "output_bin_counts",
                "sampled_tokens",
            ),
            *("num_sampled", "num_rejected", "query_start_loc", "all_token_ids", "total_len"),
        ),
        "rolls back to the accepted tokens",
    ),
    Hook(
        f"{_GPU}.block_table",
        "BlockTables.compute_slot_mappings",
        ("self", "idx_mapping", "query_start_loc", "positions", "num_tokens_padded"),
        "computes the slots of the flat list",
    ),
    Hook(
        f"{_GPU}.spec_decode.rejection_sampler",
        "RejectionSampler",
        ("sampler", "spec_config", "device"),
        "verifies trees instead",
    ),
    Hook(
        f"{_GPU}.spec_decode.rejection_sampler",
        "RejectionSampler.__call__",
        ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
        "verifies trees instead",
    ),
    Hook(
        f"{_GPU}.spec_decode.rejection_sampler",
        "RejectionSampler._verify_in_chunks",
        ("self", "logits", "input_batch", "draft_logits", "draft_sampled", "pos", "max_chunk_logits"),
        "verifies large batches part after part",
    ),
    Hook(
        f"{_GPU}.spec_decode.rejection_sampler",
        "get_max_chunk_logits",
        ("vocab_size",),
        "verifies large batches part after part",
    ),
    Hook(f"{_GPU}.metrics.logits", "get_num_nans", ("logits",), "tells of logits that are no numbers"),
    *(
        Hook(f"{_GPU}.sample.{module}", name, parameters, "goes by the path of a tree's row")
        for module, state in (("penalties", "PenaltiesState"), ("bad_words", "BadWordsState"))
        for name, parameters in (
            (state, ("vllm_config", "req_states")),
            (f"{state}.apply", ("self", "logits", "ctx")),
        )
    ),
    Hook(f"{_GPU}.buffer_utils", "UvaBackedTensor", ("size", "dtype"), "the host's word of each slot"),
    Hook(
        f"{_GPU}.sample.sampler",
        "Sampler.__call__",
        ("self", "logits", "input_batch"),
        "draws the target's tokens",
    ),
    Hook(
        f"{_GPU}.sample.sampler",
        "Sampler.apply_sampling_params",
        (
            *("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids"),
            "expanded_local_pos",
        ),
        "draws the target's tokens",
    ),
    Hook(
        f"{_GPU}.sample.gumbel",
        "gumbel_sample",
        ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting"),
        "the noise of a seed and a position",
    ),
    Hook(
        f"{_GPU}.sample.logprob",
        "compute_topk_scores",
        (
            *("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logprob_token_ids_state"),
            *("expanded_idx_mapping", "max_per_req_token_ids", "logits_mode"),
        ),
        "scores of the tokens that a request lists",
    ),
    Hook(
        f"{_GPU}.sample.logprob",
        "LogprobTokenIdsState.max_num_token_ids",
        ("self", "idx_mapping_np"),
        "whether a request lists tokens",
    ),
    Hook(
        f"{_GPU}.sample.output",
        "SamplerOutput",
        ("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected"),
        "what a verified step puts out",
    ),
    Hook(_PROCESSOR, "LogitsProcessor", ("vllm_config", "req_states"), "applies sampling rules"),
    Hook(
        _PROCESSOR, "LogitsProcessor.validate_params", ("sampling_params",), "refuses requests at admission"
    ),
    Hook(
        _PROCESSOR,
        "LogitsProcessor.add_request",
        ("self", "req_idx", "sampling_params"),
        "applies sampling rules",
    ),
    Hook(_PROCESSOR, "LogitsProcessor.apply_staged_writes", ("self",), "applies sampling rules"),
    Hook(_PROCESSOR, "LogitsProcessor.apply", ("self", "logits", "ctx"), "applies sampling rules"),
    *(
        Hook(_PROCESSOR, f"LogitsContext.{field}", None, "tells whose a row of logits is")
        for field in (
            *(
                "expanded_idx_mapping",
                "idx_mapping",
                "idx_mapping_np",
                "expanded_local_pos",
                "input_ids",
                "pos",
            ),
            "seq_lens_upper_bound_np",
        )
    ),
    *(
        Hook(_PROCESSOR, f"LogitsProcRequestState.{field}", None, "the requests' texts, for rules")
        for field in ("all_token_ids", "prompt_len", "prefill_len", "total_len", "device")
    ),
    *(
        Hook("vllm.v1.sample.logits_processor", name, parameters, "processors of V1's interface")
        for name, parameters in (
            ("BatchUpdateBuilder.get_and_reset", ("self", "batch_size")),
            ("BatchUpdateBuilder.removed_append", ("self", "index")),
            ("BatchUpdateBuilder.pop_removed", ("self",)),
            ("MoveDirectionality", None),
            ("LogitsProcessor", ("vllm_config", "device", "is_pin_memory")),
            ("LogitsProcessor.validate_params", ("sampling_params",)),
            ("LogitsProcessor.is_argmax_invariant", ("self",)),
            ("LogitsProcessor.update_state", ("self", "batch_update")),
            ("LogitsProcessor.apply", ("self", "logits")),
            ("AdapterLogitsProcessor.update_state", ("self", "batch_update")),
            ("AdapterLogitsProcessor.apply", ("self", "logits")),
            ("cached_load_custom_logitsprocs", None),
        )
    ),
    Hook(
        f"{_GPU}.sample.logits_processor.loader",
        "_load_v2_logitsprocs",
        ("logits_processors",),
        "says which interface a processor has",
    ),
    Hook("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", None, "may schedule ahead of drafts"),
    Hook(
        f"{_GPU}.cudagraph_utils",
        "CudaGraphManager.dispatch",
        ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len"),
        "chooses the captured graph of a step",
    ),
    *(
        Hook(f"{_GPU}.cudagraph_utils", name, parameters, "captures what reads our buffers, and drafts")
        for name, parameters in (
            ("CudaGraphManager", ("vllm_config", "device", "cudagraph_mode", "decode_query_len")),
            ("CudaGraphManager._init_candidates", ("self",)),
            ("CudaGraphManager.capture", ("self", "create_forward_fn", "progress_bar_desc")),
            ("CudaGraphManager.run_fullgraph", ("self", "desc")),
            ("BatchExecutionDescriptor", ("cg_mode", "num_tokens", "num_reqs")),
            ("profile_cudagraph_memory", ("runner",)),  # drops the managers that it finds on a speculator
        )
    ),
    Hook(
        f"{_GPU}.cudagraph_utils",
        "prepare_inputs_to_capture",
        ("num_reqs", "num_tokens", "model_state", "input_buffers", "block_tables", "attn_groups"),
        "asks for metadata to capture",
    ),
    Hook(
        f"{_GPU}.attn_utils",
        "build_attn_metadata",
        ("attn_groups", "num_reqs", "num_tokens", "query_start_loc_gpu", "query_start_loc_cpu"),
        "makes the metadata that trees are marked in",
    ),
    Hook(
        f"{_GPU}.attn_utils",
        "init_attn_backend",
        ("kv_cache_config", "vllm_config", "device", "active_layer_names"),
        "makes the metadata builders of a draft model's layers",
    ),
    Hook(f"{_GPU}.block_table", "BlockTables.apply_staged_writes", None, "tells which blocks a request has"),
)

TABLES = {"V1": HOOKS, "V2": V2_HOOKS, "CUDA": CUDA_HOOKS, "recurrent": RECURRENT_HOOKS}
