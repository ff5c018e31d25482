"""vLLM's names and values of engine and server arguments that Quire does not have, and how each is
handled.

Must not know: the effect of Quire's arguments, argparse.

An argument stands for Quire's own of the same meaning where there is one (the aliases in
ipc/config.py). It is accepted without effect if vLLM's meaning cannot change an answer here; the
table gives the reason for each. An argument that requests an unsupported feature raises an error,
unless its value requests nothing (None, False, an empty list).
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from ...ipc.errors import InvalidParameterError

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    return {name: advice for advice, names in names_of.items() for name in names.split()}


# Each argument of Quire maps vLLM's value to Quire's value.
SPELLINGS: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "generation_config": {"vllm": "none"},
    "max_model_len": {-1: None, "-1": None, "auto": None},
    "model_impl": {"vllm": "quire"},
    "distributed_executor_backend": {"uni": "mp"},
    "log_level": {"trace": "debug", "critical": "error"},
}
SHORT_OPTIONS = {
    "decode_context_parallel_size": ("-dcp",),
    "prefill_context_parallel_size": ("-pcp",),
    "optimization_level": ("-O",),
    "compilation_config": ("-cc",),
}

# These are accepted, with this note in the log.
NOTED = {
    "trust_remote_code": "Quire runs no code from a model's repository",
    "enable_log_requests": "quire serve logs a line per request (access_log)",
    "disable_uvicorn_access_log": "--no-access-log turns the lines per request off",
    "enable_auto_tool_choice": "tool calls are always parsed if the model's template supports them",
}
# These are accepted without effect, whatever the value. The reason maps to the names.
WITHOUT_EFFECT = _by_name(
    {
        "it tunes speed or memory": """
            additional_config compilation_config cudagraph_capture_sizes
            disable_async_output_proc disable_cascade_attn disable_custom_all_reduce
            disable_nccl_for_dp_synchronization dp_sync_interval enable_batch_sharded_sampling
            all2all_backend dbo_decode_token_threshold dbo_prefill_token_threshold
            enable_bf16x3_router_gemm enable_cumem_allocator enable_dbo
            enable_flashinfer_autotune enable_nccl_comm_suspend fully_sharded_loras
            gdn_prefill_backend ir_op_priority kda_prefill_backend kernel_config linear_backend
            max_cudagraph_capture_size max_seq_len_to_capture moe_backend numa_bind
            numa_bind_cpus numa_bind_nodes optimization_level performance_mode
            prefill_schedule_interval prefix_caching_hash_algo renderer_num_workers
            scheduler_reserve_full_isl specialize_active_lora ubatch_size watermark
        """,
        "it concerns logs and reports": """
            aggregate_engine_logging cudagraph_metrics disable_log_requests
            enable_layerwise_nvtx_tracing enable_mfu_metrics fail_on_environ_validation
            jit_monitor_mode jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample
            per_request_spec_decode_metrics ray_workers_use_nsight
            show_hidden_metrics_for_version use_tqdm_on_load
        """,
        "it concerns loading": """
            code_revision enable_ep_weight_filter ignore_patterns max_parallel_loading_workers
            model_loader_extra_config pt_load_map_location safetensors_load_strategy
            safetensors_prefetch_block_size safetensors_prefetch_num_threads
        """,
        "Quire always does so": """
            enable_mixed_moe_lora_format enable_moe_shared_loras enable_sleep_mode
        """,
        "it refines images and audio": """
            default_mm_loras
            disable_chunked_mm_input enable_mm_processor_stats enable_tower_connector_lora
            interleave_mm_strings media_io_kwargs
            mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
            mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
            mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm
            mm_ipc_gpu_memory_gb mm_processor_cache_type
            mm_processor_device mm_shm_cache_max_object_size_mb
            mm_tensor_ipc skip_mm_profiling video_pruning_method video_pruning_rate
        """,
        "it concerns servers": "shutdown_timeout",
        "it refines context parallelism": """
            cp_kv_cache_interleave_size dcp_comm_backend dcp_kv_cache_interleave_size
            dcp_q_replicate
        """,
        "it refines several machines": """
            cpu_distributed_timeout_seconds data_parallel_rpc_port distributed_timeout_seconds
            master_addr master_port
        """,
        "it refines weights in host memory": """
            cpu_offload_params offload_backend offload_group_size offload_num_in_group
            offload_params offload_prefetch_step
        """,
        "it refines balanced experts": "eplb_config expert_placement_strategy",
        "it refines fault tolerance": "fault_tolerance_config",
        "it refines transfers of embeddings": "ec_manager_config",
        "it refines older quantization": "allow_deprecated_quantization",
        "it refines recurrent states": """
            enable_mamba_cache_stochastic_rounding mamba_backend mamba_block_size
            mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
            mamba_ssm_cache_dtype mamba_ssu_algorithm replayssm_buffer_len use_replayssm
        """,
    }
)
# These are accepted with these values only.
ONLY: dict[str, tuple[Any, ...]] = {
    "data_parallel_address": ("localhost", "127.0.0.1", "::1"),
    "data_parallel_backend": ("mp",),
    "config_format": ("auto", "hf"),
    "cpu_offload_gb": (0,),
    "decode_context_parallel_size": (1,),
    "kv_offloading_backend": ("native",),
    "logprobs_mode": ("raw_logprobs",),
    "lora_dtype": ("auto",),
    "max_num_partial_prefills": (1,),
    "nnodes": (1,),
    "node_rank": (0,),
    "prefill_context_parallel_size": (1,),
    "stream_interval": (1,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "worker_cls": ("auto",),
    "worker_extension_cls": ("",),
    # server arguments
    "allowed_headers": ("*", '["*"]'),
    "allowed_methods": ("*", '["*"]'),
    "chat_template_content_format": ("auto", "string"),
    "fingerprint_mode": ("full",),
    "response_role": ("assistant",),
    "ssl_cert_reqs": (0,),
}
# These arguments are dicts. A key maps to the error for a value that requests something; "" accepts
# any value.
BY_KEY: dict[str, dict[str, str]] = {
    "structured_outputs_config": {
        "backend": "",  # all backends allow the same outputs
        "disable_fallback": "",
        "disable_any_whitespace": "StructuredOutputsParams and quire serve have this option",
        "disable_additional_properties": "StructuredOutputsParams and quire serve have this option",
        "enable_in_reasoning": "the grammar begins behind the reasoning",
        "reasoning_parser": "quire serve has this option",
        "reasoning_parser_plugin": "plugins cannot add parsers",
    }
}
# These are rejected. The advice of the error maps to the names.
REFUSED = _by_name(
    {
        "": """
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
            data_parallel_rank data_parallel_start_rank diffusion_config disable_sliding_window
            ec_transfer_config enable_elastic_ep enable_eplb enable_fault_tolerance
            enable_return_routed_experts enable_trace_replay kv_cache_dtype_skip_layers
            io_processor_plugin kv_sharing_fast_prefill model_class_overrides
            model_weights prefix_cache_retention_interval prefix_match_unit reasoning_config
            reasoning_parser_plugin return_sampling_mask scheduler_cls tokens_only use_fp64_gumbel
        """,
        "kernels chooses implementations": "attention_backend attention_config",
        "LLM.chat and quire serve accept it": "chat_template",
        "otlp_traces_endpoint enables the spans that exist": "collect_detailed_traces",
        "CUDA_VISIBLE_DEVICES selects the GPU": "device_ids",
        "all data_parallel_size engines run on this machine": "data_parallel_size_local",
        "adapters apply to all modules that they have": "lora_target_modules",
        "models accept text only": "enable_mm_embeds mm_encoder_only",
        "prompts are text or token ids": "enable_prompt_embeds",
        "hf_overrides changes keys of config.json": "hf_config_path",
        "quire serve has max_queued_requests": "max_num_queued_reqs",
        "quire serve has max_queued_tokens": "max_num_queued_tokens",
        "max_num_batched_tokens limits a step": "max_num_scheduled_tokens",
        "quantization accepts int8 or int4": "quantization_config",
        "quire serve accepts it": "reasoning_parser",
        "set it in hf_overrides": "rope_scaling rope_theta",
        "speculative_config has these": "spec_method spec_model spec_tokens",
        "start_profile(prefix) says where the trace goes": "profiler_config",
        "revision applies to the model and the tokenizer": "tokenizer_revision",
        "load_weights replaces the weights": "weight_transfer_config",
    }
)
# These are only in `vllm serve`.
SERVER_WITHOUT_EFFECT = _by_name(
    {
        "it tunes speed or memory": """
            enable_flash_late_interaction h11_max_header_count h11_max_incomplete_event_size
        """,
        "it concerns logs and reports": """
            disable_access_log_for_endpoints enable_log_deltas log_error_stack max_log_len
        """,
        "Quire always does so": """
            enable_offline_docs enable_prompt_tokens_details enable_request_id_headers
            enable_server_load_tracking enable_tokenizer_info_endpoint
            exclude_tools_when_tool_choice_none
        """,
        "it refines servers of data-parallel ranks": """
            data_parallel_supervisor_port dp_supervisor_probe_failure_threshold
            dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
        """,
        "it refines Cohere's chat API": "cohere_format cohere_is_reasoning_model",
    }
)
SERVER_REFUSED = _by_name(
    {
        "": """
            allow_credentials enable_log_outputs enable_ssl_refresh fingerprint_value grpc headless
            log_config_file middleware root_path ssl_ca_certs ssl_ciphers tool_parser_plugin
            tool_server uds
        """,
        "/docs and /openapi.json describe the routes": "disable_fastapi_docs",
        "--chat-template sets it for all requests": "trust_request_chat_template",
        "clients set stream_options": "enable_force_include_usage",
        "/metrics has the histograms": "enable_per_request_metrics",
        "requests may ask for it": "return_tokens_as_token_ids",
    }
)
SERVER_NAMES = frozenset(SERVER_WITHOUT_EFFECT).union(
    SERVER_REFUSED,
    _names(
        """
        allowed_headers allowed_methods chat_template_content_format
        enable_auto_tool_choice fingerprint_mode response_role ssl_cert_reqs
        """
    ),
)
HUB_TOKEN = "hf_token"
NAMES = frozenset({HUB_TOKEN}).union(
    NOTED, WITHOUT_EFFECT, ONLY, BY_KEY, REFUSED, SERVER_WITHOUT_EFFECT, SERVER_REFUSED
)
# These take no value on the command line.
SWITCHES = frozenset(
    name
    for name in NAMES
    if name.startswith(("enable_", "disable_", "trust_", "skip_", "return_", "allow_"))
) - {"disable_access_log_for_endpoints"} | _names(
    """
    aggregate_engine_logging cohere_is_reasoning_model cudagraph_metrics data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras grpc headless
    interleave_mm_strings jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill
    log_error_stack mm_encoder_only numa_bind ray_workers_use_nsight
    scheduler_reserve_full_isl specialize_active_lora tokens_only use_fp64_gumbel use_replayssm
    use_tqdm_on_load
    """
)
# These strings request nothing, on the command line and in a file.
NOTHING = ("", "none", "null", "false", "{}", "[]")


def spelled(name: str, value: Any) -> Any:
    """Converts vLLM's value to Quire's: "half" is float16, torch.bfloat16 is bfloat16."""
    if name == "dtype" and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    known = SPELLINGS.get(name)
    if known is None or isinstance(value, bool) or not isinstance(value, (str, int)):
        return value
    return known.get(value, value)


def accept(name: str, value: Any) -> bool:
    """Returns whether `name` is an argument of vLLM that Quire accepts although it has no argument
    of this name.

    False means that neither vLLM nor Quire has it. Raises InvalidParameterError if it requests an
    unsupported feature.
    """
    if name not in NAMES:
        return False
    if _asks_for_nothing(value):
        return True
    if name == HUB_TOKEN:
        if isinstance(value, str):
            os.environ["HF_TOKEN"] = value  # what the hub's client reads
    elif name in NOTED:
        logger.warning("%s: accepted without effect: %s", name, NOTED[name])
    elif name in BY_KEY:
        _check_keys(name, value)
    elif name in ONLY:
        if str(value) not in map(str, ONLY[name]):
            allowed = " or ".join(repr(allowed) for allowed in ONLY[name])
            raise InvalidParameterError(name, f"must be {allowed}, got {value!r}")
    elif name in REFUSED or name in SERVER_REFUSED:
        advice = REFUSED.get(name) or SERVER_REFUSED.get(name)
        raise InvalidParameterError(name, "is not supported" + (f"; {advice}" if advice else ""))
    else:
        reason = WITHOUT_EFFECT.get(name) or SERVER_WITHOUT_EFFECT[name]
        logger.info("%s: accepted without effect: %s", name, reason)
    return True


def _check_keys(name: str, value: Any) -> None:
    """Raises InvalidParameterError for a dict, or its JSON, with a key that requests something."""
    known = BY_KEY[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise InvalidParameterError(name, f"must be an object with any of {', '.join(known)}")
    for key, asked in value.items():
        if key not in known:
            raise InvalidParameterError(f"{name}.{key}", f"must be one of {', '.join(known)}")
        if known[key] and not _asks_for_nothing(asked):
            raise InvalidParameterError(f"{name}.{key}", f"is not supported here; {known[key]}")


def require_nothing(**arguments: Any) -> None:
    """Raises InvalidParameterError naming the first argument of a vLLM call that requests a feature
    that Quire does not support.
    """
    for name, value in arguments.items():
        if not _asks_for_nothing(value):
            raise InvalidParameterError(name, f"is not supported, got {type(value).__name__}")


def _asks_for_nothing(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in NOTHING
    return value is None or value is False or (isinstance(value, (list, dict, set)) and not value)
