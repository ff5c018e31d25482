"""vLLM's names and values of engine and server arguments that Quire does not have, and how each is
handled.

Must not know: the effect of Quire's arguments, argparse.

An argument is accepted without effect if vLLM's meaning cannot change an answer here: it tunes
speed or logging, or refines a disabled feature. An argument that requests an unsupported feature
raises an error, unless its value requests nothing (None, False, an empty list).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ...ipc.errors import InvalidParameterError

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    return {name: advice for advice, names in names_of.items() for name in names.split()}


# Quire's argument -> vLLM's value -> Quire's value.
SPELLINGS: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "generation_config": {"vllm": "none"},
    "max_model_len": {-1: None, "-1": None, "auto": None},
    "model_impl": {"vllm": "quire"},
    "distributed_executor_backend": {"uni": "mp"},
}
# Quire's argument -> other command-line options with the same meaning.
OPTIONS = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "enable_expert_parallel": ("-ep",),
    "quantization": ("-q",),
    "chat_template_kwargs": ("--default-chat-template-kwargs",),
    "default_model": ("--default",),
}
SHORT_OPTIONS = {
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "optimization_level": "-O",
    "compilation_config": "-cc",
    "api_server_count": "-asc",
}

# Accepted, with this note in the log.
NOTED = {
    "trust_remote_code": "Quire runs no code from a model's repository",
    "enable_log_requests": "quire serve logs a line per request (access_log)",
    "enable_auto_tool_choice": "tool calls are always parsed if the model's template supports them",
}
# Accepted without effect, whatever the value.
WITHOUT_EFFECT = _names(
    """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
    allowed_local_media_path allowed_media_domains code_revision compilation_config
    cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_params
    cudagraph_capture_sizes cudagraph_metrics data_parallel_address data_parallel_backend
    data_parallel_rpc_port data_parallel_size_local dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
    default_mm_loras disable_async_output_proc disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_log_requests disable_nccl_for_dp_synchronization
    distributed_timeout_seconds dp_sync_interval
    ec_manager_config enable_batch_sharded_sampling enable_bf16x3_router_gemm
    enable_cumem_allocator enable_dbo enable_ep_weight_filter
    enable_flashinfer_autotune enable_layerwise_nvtx_tracing enable_logging_iteration_details
    enable_mamba_cache_stochastic_rounding enable_mfu_metrics enable_mixed_moe_lora_format
    enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend enable_sleep_mode
    enable_tower_connector_lora eplb_config expert_placement_strategy fail_on_environ_validation
    fault_tolerance_config fully_sharded_loras gdn_prefill_backend ignore_patterns
    interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose
    kda_prefill_backend kernel_config kv_cache_metrics kv_cache_metrics_sample
    language_model_only limit_mm_per_prompt linear_backend lora_dtype
    lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr
    master_port max_cudagraph_capture_size max_parallel_loading_workers max_seq_len_to_capture
    media_io_kwargs mm_device_do_normalize
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode
    mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
    mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
    model_loader_extra_config moe_backend node_rank numa_bind numa_bind_cpus numa_bind_nodes
    offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step
    optimization_level per_request_spec_decode_metrics performance_mode prefill_schedule_interval
    prefix_caching_hash_algo profiler_config pt_load_map_location ray_workers_use_nsight
    renderer_num_workers replayssm_buffer_len safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl
    show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling specialize_active_lora
    structured_outputs_config ubatch_size use_replayssm use_tqdm_on_load video_pruning_method
    video_pruning_rate watermark
    """
)
# Accepted with these values only.
ONLY: dict[str, tuple[Any, ...]] = {
    "api_server_count": (1,),
    "config_format": ("auto", "hf"),
    "cpu_offload_gb": (0,),
    "decode_context_parallel_size": (1,),
    "kv_offloading_backend": ("native",),
    "logprobs_mode": ("raw_logprobs",),
    "max_num_partial_prefills": (1,),
    "nnodes": (1,),
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
# Rejected: what the error advises -> names.
REFUSED = _by_name(
    {
        "": """
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
            data_parallel_rank data_parallel_start_rank diffusion_config disable_sliding_window
            ec_transfer_config enable_elastic_ep enable_eplb enable_fault_tolerance
            enable_return_routed_experts enable_trace_replay kv_cache_dtype_skip_layers
            kv_sharing_fast_prefill kv_transfer_config model_class_overrides
            model_weights prefix_cache_retention_interval prefix_match_unit reasoning_config
            reasoning_parser_plugin return_sampling_mask scheduler_cls tokens_only use_fp64_gumbel
        """,
        "kernels chooses implementations": "attention_backend attention_config",
        "LLM.chat and quire serve accept it": "chat_template",
        "otlp_traces_endpoint enables the spans that exist": "collect_detailed_traces",
        "CUDA_VISIBLE_DEVICES selects the GPU": "device_ids",
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
        "revision applies to the model and the tokenizer": "tokenizer_revision",
        "load_weights replaces the weights": "weight_transfer_config",
    }
)
# Only in `vllm serve`.
SERVER_WITHOUT_EFFECT = _names(
    """
    cohere_format cohere_is_reasoning_model data_parallel_supervisor_port
    disable_access_log_for_endpoints disable_fastapi_docs disable_uvicorn_access_log
    dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s enable_flash_late_interaction enable_log_deltas
    enable_offline_docs enable_prompt_tokens_details enable_request_id_headers
    enable_server_load_tracking enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none
    h11_max_header_count h11_max_incomplete_event_size log_error_stack max_log_len
    trust_request_chat_template uvicorn_log_level
    """
)
SERVER_REFUSED = _by_name(
    {
        "": """
            allow_credentials enable_log_outputs enable_ssl_refresh fingerprint_value grpc headless
            log_config_file middleware root_path ssl_ca_certs ssl_ciphers tool_parser_plugin
            tool_server uds
        """,
        "clients set stream_options": "enable_force_include_usage",
        "/metrics has the histograms": "enable_per_request_metrics",
        "requests may ask for it": "return_tokens_as_token_ids",
    }
)
SERVER_NAMES = SERVER_WITHOUT_EFFECT.union(
    SERVER_REFUSED,
    _names(
        """
        allowed_headers allowed_methods api_server_count chat_template_content_format
        enable_auto_tool_choice fingerprint_mode response_role ssl_cert_reqs
        """
    ),
)
HUB_TOKEN = "hf_token"
NAMES = frozenset(
    {HUB_TOKEN, *NOTED, *WITHOUT_EFFECT, *ONLY, *REFUSED, *SERVER_WITHOUT_EFFECT, *SERVER_REFUSED}
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
    language_model_only log_error_stack mm_encoder_only numa_bind ray_workers_use_nsight
    scheduler_reserve_full_isl specialize_active_lora tokens_only use_fp64_gumbel use_replayssm
    use_tqdm_on_load
    """
)
# Strings that request nothing, on the command line and in a file.
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
    """Whether `name` is an argument of vLLM that Quire accepts although it has no argument of this
    name.

    False: neither vLLM nor Quire has it. Raises InvalidParameterError if it requests an unsupported
    feature.
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
    elif name in ONLY:
        if str(value) not in map(str, ONLY[name]):
            allowed = " or ".join(repr(allowed) for allowed in ONLY[name])
            raise InvalidParameterError(name, f"must be {allowed}, got {value!r}")
    elif name in REFUSED or name in SERVER_REFUSED:
        advice = REFUSED.get(name) or SERVER_REFUSED.get(name)
        raise InvalidParameterError(name, "is not supported" + (f"; {advice}" if advice else ""))
    else:
        logger.info("%s: accepted without effect", name)
    return True


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
