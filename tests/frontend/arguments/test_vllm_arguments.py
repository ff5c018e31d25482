"""The names in vLLM 0.32's signatures: each is supported, accepted without effect, or refused with
an error that names it. Also vLLM's spellings of values.
"""

from __future__ import annotations

import inspect
import json
import logging
import os

import pytest
from quire import (
    LLM,
    AsyncEngineArgs,
    EngineArgs,
    InvalidParameterError,
    ModelLoadError,
    SamplingParams,
)
from quire.frontend.arguments import vllm_arguments
from quire.frontend.arguments.quantities import parse_count
from quire.frontend.cli import serve
from quire.frontend.cli.flags import engine_flags, given
from quire.frontend.server.config import server_fields
from quire.ipc.config import config_fields
from quire.ipc.models.architectures import ARCHITECTURES
from quire.tests.frontend.test_llm import make_llm

ENGINE_ARGS = """
    model enable_return_routed_experts return_sampling_mask model_weights served_model_name
    tokenizer hf_config_path runner convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode
    trust_remote_code allowed_local_media_path allowed_media_domains download_dir
    safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
    load_format config_format dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes
    max_cudagraph_capture_size ir_op_priority distributed_executor_backend pipeline_parallel_size
    master_addr master_port nnodes node_rank distributed_timeout_seconds
    cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
    tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size
    dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
    data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
    data_parallel_multi_port_external_lb data_parallel_backend enable_expert_parallel
    enable_batch_sharded_sampling enable_ep_weight_filter moe_backend linear_backend
    all2all_backend enable_elastic_ep enable_dbo ubatch_size dbo_decode_token_threshold
    dp_sync_interval dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config
    enable_eplb expert_placement_strategy max_parallel_loading_workers block_size
    enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval
    disable_sliding_window disable_cascade_attn offload_backend cpu_offload_gb cpu_offload_params
    offload_group_size offload_num_in_group offload_prefetch_step offload_params
    gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold max_num_seqs max_num_queued_reqs max_num_queued_tokens
    max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay disable_log_stats
    aggregate_engine_logging revision code_revision hf_token hf_overrides model_class_overrides
    tokenizer_revision quantization quantization_config allow_deprecated_quantization enforce_eager
    disable_custom_all_reduce language_model_only limit_mm_per_prompt enable_mm_embeds
    interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
    mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
    mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
    renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize enable_lora max_loras
    max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype
    lora_target_modules enable_tower_connector_lora specialize_active_lora
    enable_mixed_moe_lora_format enable_moe_shared_loras ray_workers_use_nsight
    num_gpu_blocks_override model_loader_extra_config ignore_patterns enable_chunked_prefill
    disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
    disable_hybrid_kv_cache_manager structured_outputs_config reasoning_parser
    reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens diffusion_config
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
    per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics
    enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
    jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats scheduling_policy scheduler_cls
    pooler_config compilation_config attention_config mamba_config kernel_config
    enable_flashinfer_autotune enable_bf16x3_router_gemm worker_cls worker_extension_cls
    profiler_config kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
    reasoning_config generation_config enable_sleep_mode enable_cumem_allocator
    enable_nccl_comm_suspend override_generation_config model_impl attention_backend
    kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size
    prefix_match_unit mamba_cache_mode replayssm_buffer_len use_replayssm mamba_backend
    mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
    additional_config use_tqdm_on_load pt_load_map_location logits_processors async_scheduling
    stream_interval kv_sharing_fast_prefill optimization_level performance_mode
    fault_tolerance_config enable_fault_tolerance kv_offloading_size kv_offloading_backend
    tokens_only shutdown_timeout weight_transfer_config fail_on_environ_validation
    gdn_prefill_backend kda_prefill_backend
""".split()  # noqa: SIM905
OF_ASYNC_ENGINE_ARGS = ["enable_log_requests"]
# of LLM's constructor, in addition to those of EngineArgs
OF_LLM = ["chat_template"]
# of older versions, which scripts still use
OLDER = [
    "swap_space",
    "max_seq_len_to_capture",
    "disable_async_output_proc",
    "task",
    "rope_scaling",
    "rope_theta",
    "disable_log_requests",
    "max_num_partial_prefills",
]
OF_SERVE = """
    headless api_server_count grpc lora_modules chat_template chat_template_content_format
    trust_request_chat_template default_chat_template_kwargs response_role
    return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none
    tool_call_parser tool_parser_plugin tool_server log_config_file max_log_len
    enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking
    enable_force_include_usage enable_tokenizer_info_endpoint enable_log_outputs enable_log_deltas
    cohere_is_reasoning_model cohere_format log_error_stack tokens_only fingerprint_mode
    fingerprint_value host port data_parallel_supervisor_port dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold uds uvicorn_log_level
    disable_uvicorn_access_log disable_access_log_for_endpoints allow_credentials allowed_origins
    allowed_methods allowed_headers api_key ssl_keyfile ssl_certfile ssl_ca_certs
    enable_ssl_refresh ssl_cert_reqs ssl_ciphers root_path middleware enable_request_id_headers
    disable_fastapi_docs h11_max_incomplete_event_size h11_max_header_count enable_offline_docs
    enable_flash_late_interaction
""".split()  # noqa: SIM905
SAMPLING = {
    "supported": [
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "structured_outputs",
        "logit_bias",
        "allowed_token_ids",
        "extra_args",
        "bad_words",
        "truncate_prompt_tokens",
    ],
    "refused": [
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "skip_clone",
        "output_text_buffer_length",
        "skip_reading_prefix_cache",
        "thinking_token_budget",
        "repetition_detection",
        "routed_experts_prompt_start",
        "trace_decode_token_ids",
        "best_of",
        "guided_decoding",
        "logits_processors",
    ],
}


def names_of_settings() -> set[str]:
    """Return the names of the settings and their aliases."""
    fields = config_fields().values()
    return {name for field in fields for name in (field.name, *field.aliases)}


def status(name: str, value: object = "something", *, nothing: object = None) -> str:
    """Return how EngineArgs treats an argument: "supported", "accepted" or "refused"."""
    if name in names_of_settings():
        return "supported"
    EngineArgs(**{name: nothing})  # a value without effect, accepted for every name
    try:
        EngineArgs(**{name: value})
    except InvalidParameterError as error:
        assert error.parameter == name and "no such argument" not in str(error)
        return "refused"
    return "accepted"


@pytest.mark.parametrize("name", [*ENGINE_ARGS, *OF_ASYNC_ENGINE_ARGS, *OF_LLM, *OLDER])
def test_every_engine_argument_of_vllm(name, monkeypatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    found = status(name)
    if found != "supported":
        refusing = vllm_arguments.ONLY, vllm_arguments.BY_KEY, vllm_arguments.REFUSED
        refuses = any(name in table for table in refusing)
        assert (found == "refused") == refuses
    monkeypatch.delenv("HF_TOKEN", raising=False)


def test_the_table_contains_only_vllms_names() -> None:
    known = {*ENGINE_ARGS, *OF_ASYNC_ENGINE_ARGS, *OF_LLM, *OLDER, *OF_SERVE}
    assert vllm_arguments.NAMES - known == set()
    assert vllm_arguments.SWITCHES <= vllm_arguments.NAMES
    kinds = [
        set(vllm_arguments.NOTED),
        set(vllm_arguments.WITHOUT_EFFECT),
        set(vllm_arguments.ONLY),
        set(vllm_arguments.BY_KEY),
        set(vllm_arguments.REFUSED),
    ]
    assert sum(map(len, kinds)) == len(set().union(*kinds)), "a name is in two tables"
    assert set().union(*kinds) & set(config_fields()) == set(), "Quire has it: take it out"


# For each reason why an argument has no effect: an argument and a value that would request the
# feature that it refines; None: there is no such feature.
REASONS: dict[str, tuple[str, object] | None] = {
    "it tunes speed or memory": None,
    "it concerns logs and reports": None,
    "it concerns loading": None,
    "Quire always does so": None,
    "it refines images and audio": ("enable_mm_embeds", True),
    "it refines context parallelism": ("decode_context_parallel_size", 2),
    "it refines several machines": ("nnodes", 2),
    "it refines weights in host memory": ("cpu_offload_gb", 1),
    "it refines balanced experts": ("enable_eplb", True),
    "it refines fault tolerance": ("enable_fault_tolerance", True),
    "it refines transfers of embeddings": ("ec_transfer_config", {"ec_connector": "x"}),
    "it refines older quantization": ("quantization", "deepspeedfp"),
    "it refines recurrent states": None,
    "it refines servers of data-parallel ranks": ("data_parallel_external_lb", True),
    "it refines Cohere's chat API": None,
    "it concerns servers": None,
}


def test_what_has_no_effect_says_why() -> None:
    given = {
        *vllm_arguments.WITHOUT_EFFECT.values(),
        *vllm_arguments.SERVER_WITHOUT_EFFECT.values(),
    }
    assert given == REASONS.keys()


@pytest.mark.parametrize("reason", REASONS)
def test_a_refined_feature_is_refused(reason) -> None:
    """Else its refinements would be accepted although they change what it does."""
    request = REASONS[reason]
    if reason == "it refines recurrent states":
        assert not {"mamba2", "qwen3_next", "granitemoehybrid"} & ARCHITECTURES.keys()
    elif request is not None:
        name, value = request
        with pytest.raises((InvalidParameterError, ModelLoadError), match=name):
            EngineArgs(**{name: value}).create_engine_config()


# Those which change answers, or what is logged and served, by vLLM's documentation, with a value
# that does so.
CHANGE_ANSWERS = {
    "lora_target_modules": ["q_proj"],
    "lora_dtype": "float16",
    "io_processor_plugin": "plugin",
    "data_parallel_size_local": 1,
    "data_parallel_address": "10.0.0.1",
    "data_parallel_backend": "ray",
    "node_rank": 1,
    "enable_prompt_embeds": True,
    "logprobs_mode": "processed_logprobs",
    "use_fp64_gumbel": True,
    "disable_sliding_window": True,
    "tokenizer_revision": "main",
}


@pytest.mark.parametrize("name", CHANGE_ANSWERS)
def test_what_changes_answers_is_refused(name) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        EngineArgs(**{name: CHANGE_ANSWERS[name]})
    assert raised.value.parameter == name


@pytest.mark.parametrize(
    "words", ["--disable-fastapi-docs", "--trust-request-chat-template", "--lora-target-modules=q"]
)
def test_server_flags_that_change_answers_are_refused(words, capsys) -> None:
    with pytest.raises((SystemExit, InvalidParameterError)) as raised:
        serve.make_parser([]).parse([words])
    assert words.split("=")[0] in capsys.readouterr().err + str(raised.value)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"backend": "xgrammar", "disable_fallback": True}, None),
        ({"disable_any_whitespace": False, "reasoning_parser": ""}, None),
        ({"disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"disable_additional_properties": True}, "disable_additional_properties"),
        ({"enable_in_reasoning": True}, "enable_in_reasoning"),
        ({"backend": "auto", "reasoning_parser": "qwen3"}, "reasoning_parser"),
        ({"whitespace": 1}, "whitespace"),
    ],
)
def test_a_configuration_of_structured_outputs(config, refused) -> None:
    name = "structured_outputs_config"
    for value in (config, json.dumps(config)):
        if refused is None:
            assert EngineArgs(**{name: value}) == EngineArgs()
            continue
        with pytest.raises(InvalidParameterError) as raised:
            EngineArgs(**{name: value})
        assert raised.value.parameter == f"{name}.{refused}"


def test_arguments_with_another_name_here() -> None:
    assert EngineArgs(enable_logging_iteration_details=True) == EngineArgs(log_steps=True)
    args = serve.make_parser([]).parse(
        ["--enable-logging-iteration-details", "--shutdown-timeout", "7"]
    )
    assert args.log_steps is True and args.drain_timeout_s == 7
    assert EngineArgs(shutdown_timeout=7) == EngineArgs()


@pytest.mark.parametrize("name", OF_SERVE)
def test_every_server_flag_of_vllm(name, capsys) -> None:
    parser = serve.make_parser([])
    option = "--" + name.replace("_", "-")
    is_switch = name in vllm_arguments.SWITCHES or name in ("tokens_only",)
    words = [option] if is_switch else [option, "7"]
    if option in parser._option_string_actions:  # Quire's, perhaps of another name
        return
    assert name not in server_fields()
    refuses = (
        name in vllm_arguments.SERVER_REFUSED
        or name in vllm_arguments.REFUSED
        or name in vllm_arguments.ONLY
        or name in vllm_arguments.BY_KEY
    )
    if not refuses:
        parser.parse(words)
        return
    with pytest.raises((SystemExit, InvalidParameterError)) as raised:
        parser.parse(words)
    assert option in capsys.readouterr().err + str(raised.value)


@pytest.mark.parametrize("name", SAMPLING["supported"] + SAMPLING["refused"])
def test_every_sampling_parameter_of_vllm(name) -> None:
    assert (name in SamplingParams.__struct_fields__) == (name in SAMPLING["supported"])
    if name in SAMPLING["refused"]:
        with pytest.raises(InvalidParameterError, match=name):
            SamplingParams(**{name: None})


def test_a_command_line_of_vllms() -> None:
    line = (
        "some/model -tp 1 --trust-remote-code --enable-auto-tool-choice --tool-call-parser hermes "
        "--gpu-memory-utilization 0.9 --dtype half --max-model-len 16k --generation-config vllm "
        "--download-dir models --tokenizer-mode auto --enforce-eager --max_num_seqs=8 -pp 1 "
        "--disable-log-requests --max-num-batched-tokens 8K --uvicorn-log-level info -O 3"
    )
    args = serve.make_parser([]).parse(line.split())
    assert args.tool_call_parser == "hermes"
    assert given(args, engine_flags()) == {
        "model": "some/model",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "dtype": "float16",
        "max_model_len": 16000,
        "generation_config": "none",
        "download_dir": "models",
        "enforce_eager": True,
        "max_num_seqs": 8,
        "pipeline_parallel_size": 1,
        "max_num_batched_tokens": 8192,
    }
    for words in ("--max-model-len -1", "--max-model-len auto", "--max-model-len=-1"):
        args = serve.make_parser([]).parse(words.split())
        assert given(args, engine_flags()) == {"max_model_len": None}


@pytest.mark.parametrize(
    ("text", "number"),
    [("16k", 16000), ("16K", 16384), ("1.5k", 1500), ("2m", 2 * 10**6), ("1G", 2**30), ("x", "x")],
)
def test_counts_with_a_unit(text, number) -> None:
    assert parse_count(text) == number


def test_settings_of_a_file_and_of_the_environment(tmp_path, monkeypatch) -> None:
    (tmp_path / "vllm.yaml").write_text("trust-remote-code: true\ndtype: half\n")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "-1")
    args = serve.make_parser([]).parse(["--config", str(tmp_path / "vllm.yaml")])
    assert given(args, engine_flags()) == {"dtype": "float16", "max_model_len": None}
    (tmp_path / "vllm.yaml").write_text("enable_elastic_ep: true\n")
    with pytest.raises(InvalidParameterError, match="enable_elastic_ep is not supported"):
        serve.make_parser([]).parse(["--config", str(tmp_path / "vllm.yaml")])


def test_scripts_for_vllm(monkeypatch, caplog) -> None:
    import torch

    monkeypatch.setenv("HF_TOKEN", "before")
    with caplog.at_level(logging.INFO):
        args = EngineArgs(
            "m",
            trust_remote_code=True,
            tensor_parallel_size=1,
            dtype=torch.bfloat16,
            seed=None,
            max_model_len=-1,
            max_num_seqs=None,
            generation_config="vllm",
            served_model_name=["name"],
            hf_token="secret",
            compilation_config={"level": 3},
            enable_lora=False,
            tokenizer_mode="auto",
            hf_overrides=None,
        )
    assert args == EngineArgs(
        "m", dtype="bfloat16", generation_config="none", served_model_name="name"
    )
    assert AsyncEngineArgs is EngineArgs
    assert "Quire runs no code from a model's repository" in caplog.text
    assert os.environ["HF_TOKEN"] == "secret"
    assert "secret" not in caplog.text + repr(args)
    for arguments, words in (
        ({"pipeline_parallel_size": 200}, "pipeline_parallel_size"),
        ({"data_parallel_size": 0}, "data_parallel_size: must be an integer, at least 1, got 0"),
        ({"speculative_config": {"method": "medusa"}}, "speculative_config: must be a dict"),
        ({"served_model_name": ["a", "b"]}, "served_model_name: must be a string"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode: must be 'auto' or 'hf', got 'mistral'"),
    ):
        with pytest.raises(InvalidParameterError, match=words):
            EngineArgs("bundled", **arguments).create_engine_config()


# ---------------------------------------------------------------- sampling parameters


def test_values_of_sampling_parameters_as_in_vllm() -> None:
    params = SamplingParams(
        seed=-1,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        bad_words=("x",),
        allowed_token_ids=(5, 6),
        logit_bias={"42": 1.5, 7: 2},
    )
    assert params == SamplingParams(
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        bad_words=["x"],
        allowed_token_ids=[5, 6],
        logit_bias={42: 1.5, 7: 2},
    )
    assert params.seed is None and SamplingParams(seed=None).seed is None
    for bias, words in (
        ({"4": 1, 4: 2}, "logit_bias: must give each token id once"),
        ({"four": 1}, "logit_bias: must be a list of token ids"),
        ({"-1": 1}, "logit_bias"),
    ):
        with pytest.raises(InvalidParameterError, match=words):
            SamplingParams(logit_bias=bias)
    with pytest.raises(InvalidParameterError, match="seed: must be an integer between 0"):
        SamplingParams(seed=-2)


def test_a_clone_shares_no_state() -> None:
    params = SamplingParams(stop=["a"], extra_args={"a": [1]}, seed=3)
    clone = params.clone()
    assert clone == params and clone is not params
    clone.stop.append("b")
    clone.extra_args["a"].append(2)
    assert params == SamplingParams(stop=["a"], extra_args={"a": [1]}, seed=3)


# ---------------------------------------------------------------- calls of LLM

GENERATE = [
    "prompts",
    "sampling_params",
    "use_tqdm",
    "lora_request",
    "priority",
    "tokenization_kwargs",
    "mm_processor_kwargs",
]
CHAT = [
    "messages",
    "sampling_params",
    "use_tqdm",
    "lora_request",
    "chat_template",
    "chat_template_content_format",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
    "tokenization_kwargs",
    "mm_processor_kwargs",
]


@pytest.mark.parametrize(("method", "names"), [("generate", GENERATE), ("chat", CHAT)])
def test_every_argument_of_vllms_calls(method, names) -> None:
    assert set(names) <= set(inspect.signature(getattr(LLM, method)).parameters)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tokenization_kwargs", "is not supported, got dict"),
        ("mm_processor_kwargs", "must be empty: this model reads text only"),
    ],
)
def test_unsupported_call_arguments_are_refused_by_name(name, problem, monkeypatch) -> None:
    llm = make_llm(monkeypatch)
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidParameterError, match=f"{name}: {problem}"):
        llm.generate("a", use_tqdm=False, **{name: {"x": 1}})
    with pytest.raises(InvalidParameterError, match=f"{name}: {problem}"):
        llm.chat(messages, None, False, chat_template="{{ messages }}", **{name: {"x": 1}})
    assert llm.generate("a", use_tqdm=False, **{name: None})
    template = {"chat_template": "{{ messages[0].content }}", name: {}}
    assert llm.chat(messages, None, False, chat_template_content_format="auto", **template)
    with pytest.raises(InvalidParameterError, match="chat_template_content_format: must be 'auto'"):
        llm.chat(messages, None, False, chat_template_content_format="openai", **template)
