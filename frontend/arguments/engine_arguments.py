"""The typed keyword arguments of EngineArgs and LLM, for editors and type checkers.

Must not know: defaults and ranges, which are in ipc/config.py.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ...ipc.config import SpeculativeConfig
from ...ipc.kv_events import KVEventsConfig
from ...ipc.models.pooling import PoolerConfig


class EngineArguments(TypedDict, total=False):
    """Every field of ipc/config.py except `model`, under the same name. `quire serve --help-all`
    describes each.
    """

    tokenizer: str | None
    served_model_name: str | None
    revision: str | None
    dtype: Literal["auto", "bfloat16", "float32", "float16"]
    quantization: Literal["int8", "int4"] | None
    model_impl: Literal["auto", "quire", "transformers"]
    max_model_len: int | None
    seed: int
    hf_overrides: dict[str, Any]
    skip_tokenizer_init: bool
    generation_config: str
    override_generation_config: dict[str, Any]
    max_logprobs: int
    logits_processors: list[str]
    runner: Literal["auto", "generate", "pooling"]
    convert: Literal["auto", "none", "embed", "classify"]
    pooler_config: PoolerConfig | None
    load_format: Literal["auto", "safetensors", "dummy"]
    download_dir: str | None
    packed_weights_cache: str | None
    block_size: Literal[8, 16, 32, 64, 128]
    kv_cache_dtype: Literal["auto", "fp8", "int8"]
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    swap_space: float
    enable_prefix_caching: bool
    kv_offloading_size: float | None
    kv_offloading_path: str | None
    kv_events_config: KVEventsConfig | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: Literal["fcfs", "priority"]
    preemption_mode: Literal["auto", "recompute", "swap"]
    num_scheduler_steps: int
    speculative_config: SpeculativeConfig | None
    async_scheduling: bool
    disable_hybrid_kv_cache_manager: bool
    enable_jump_forward: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
    max_cpu_loras: int | None
    device: Literal["auto", "cpu", "cuda"]
    num_threads: int | None
    cpu_isa: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "none"]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    distributed_executor_backend: Literal["mp", "ray"]
    data_parallel_size: int
    enable_expert_parallel: bool
    data_parallel_cores: list[str]
    enforce_eager: bool
    kernels: dict[str, str]
    startup_timeout_s: float
    on_engine_death: Literal["restart", "fail"]
    engine_restarts: int
    standby: bool
    step_timeout_s: float
    shutdown_timeout_s: float
    max_message_bytes: int
    token_file: str | None
    log_stats_interval_s: float
    otlp_traces_endpoint: str | None
    otlp_metrics_endpoint: str | None
    disable_log_stats: bool
    log_steps: bool
