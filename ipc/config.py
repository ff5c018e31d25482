"""The configuration: one frozen tree, from which EngineArgs, the command-line flags and --help are
made.

Must not know: files on disk, torch, or how a value is used. frontend/engine_args.py fills every
"auto" before a process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_origin

import msgspec
from msgspec import Meta

from .kv_events import KVEventsConfig
from .kv_transfer import KVTransferConfig
from .models.pooling import PoolerConfig, Pooling
from .models.vision_config import VisionConfig

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]

T = TypeVar("T")


def resolved(value: T | None) -> T:
    """`value` of a resolved configuration, in which None no longer stands for a default."""
    if value is None:
        raise ValueError("the configuration is not resolved")
    return value


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of the tree.

    A setting is a field whose annotation holds its type, its range, and the text of --help. Field
    names are unique across sections: they are the flat names of EngineArgs.
    """


# A frontend may choose such a setting even where it attaches to a daemon: it affects the frontend's
# requests, not the engine.
OF_FRONTEND = Meta(extra={"is_of_frontend": True})
# The value is never printed, neither with the settings nor in an error.
SECRET = Meta(extra={"is_secret": True})


def aliases(*names: str) -> Meta:
    """Other names of a setting: of an argument of EngineArgs, or, with dashes, of an option of the
    command line.
    """
    return Meta(extra={"aliases": names})


class ModelSettings(Section, frozen=True, kw_only=True):
    model: Annotated[
        str,
        "Directory or GGUF file of the model, or its name on the hub (org/name, org/name:Q4_K_M, "
        "org/name/file.gguf). Default: the model bundled with Quire.",
    ] = "bundled"
    tokenizer: Annotated[
        str | None, OF_FRONTEND, "Directory of the tokenizer. Default: the model's own."
    ] = None
    served_model_name: Annotated[
        str | None, "Name under which the model is served. Default: the model argument."
    ] = None
    revision: Annotated[str | None, "Branch, tag or commit on the hub."] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        "Type of weights and activations. auto: bfloat16 where the hardware or native kernels "
        "multiply it, else float32.",
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        aliases("-q"),
        "Converts the weights of linear layers to this type when they are loaded (those of the "
        "output head to int8 in both cases). Default: as dtype.",
    ] = None
    model_impl: Annotated[
        Literal["auto", "quire", "transformers"],
        "Whose code computes the model. auto: Quire's where it has the architecture, else that of "
        "transformers, on Quire's layers and KV cache.",
    ] = "auto"
    max_model_len: Annotated[
        PositiveInt | None, "Longest prompt plus output, in tokens. Default: the model's context."
    ] = None
    seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1),
        OF_FRONTEND,
        "Seed from which requests without a seed of their own draw theirs.",
    ] = 0
    hf_overrides: Annotated[
        dict[str, Any], "Keys that replace those of the model's config.json."
    ] = {}
    skip_tokenizer_init: Annotated[
        bool,
        OF_FRONTEND,
        "Do not load a tokenizer: prompts are token ids and outputs have no text.",
    ] = False
    generation_config: Annotated[
        str,
        OF_FRONTEND,
        "Where defaults of sampling parameters come from. auto: the model's "
        "generation_config.json; none: Quire's own; or a directory.",
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any], OF_FRONTEND, "Keys that replace those of generation_config.json."
    ] = {}
    max_logprobs: Annotated[
        int, Meta(ge=-1), "Most log-probabilities per token a request may ask for; -1: no limit."
    ] = 20
    logits_processors: Annotated[
        list[str],
        'Your own logits processors, "package.module:name" each; see '
        "executor/sampling/logits_processors.py.",
    ] = []
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        "What the model does. generate: text, and embeddings of its last layer; pooling: "
        "embeddings, scores or classes alone, without an output head. auto: what its files say.",
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        "Makes a model for embeddings or classes of one that generates text. auto: embed, where "
        "runner=pooling asks for it.",
    ] = "auto"
    pooler_config: Annotated[
        PoolerConfig | None,
        "How hidden states are pooled, where it differs from the model's files: a JSON object "
        'such as {"pooling_type": "MEAN"}.',
    ] = None


class ModelConfig(ModelSettings, frozen=True):
    """The settings and what is filled in when they are resolved."""

    hf_config: dict[str, Any] = {}  # config.json with hf_overrides applied
    pooling: Pooling | None = None  # None: the model cannot pool
    vision: VisionConfig | None = None  # None: the model reads no images


class LoadConfig(Section, frozen=True, kw_only=True):
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        "auto and safetensors read the model's weights; dummy makes random ones.",
    ] = "auto"
    download_dir: Annotated[
        str | None, OF_FRONTEND, "Directory of models from the hub. Default: the hub's own cache."
    ] = None
    packed_weights_cache: Annotated[
        str | None,
        "Directory in which weights that are quantized at load are kept packed, so that the next "
        "start maps them; auto: quire/packed_weights in the user's cache.",
    ] = None


class CacheConfig(Section, frozen=True, kw_only=True):
    block_size: Annotated[Literal[8, 16, 32, 64, 128], "Tokens per KV-cache block."] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        "Type of the KV cache. auto: as dtype. In half of bfloat16's memory: fp8 (e4m3) on GPUs, "
        "int8 with scales on CPUs.",
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        "Fraction of the GPU's memory the engine may use (not used on a CPU).",
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None, "Size of the KV cache in bytes. Default: from the free memory."
    ] = None
    num_gpu_blocks_override: Annotated[
        PositiveInt | None, "Number of KV-cache blocks, whatever the memory (for tests)."
    ] = None
    swap_space: Annotated[
        float,
        Meta(ge=0),
        "Host memory for KV-cache blocks of preempted requests, in GiB; taken as it is used. 0: "
        "none.",
    ] = 4.0
    state_cache_memory_bytes: Annotated[
        NonNegativeInt | None,
        "Memory for checkpoints of the states of recurrent layers, in bytes, with which prompts "
        "that begin alike start. Default: from the free memory.",
    ] = None
    state_checkpoint_interval: Annotated[
        PositiveInt,
        "Tokens between two such checkpoints of a long prompt or answer; a multiple of block_size.",
    ] = 512
    enable_prefix_caching: Annotated[
        bool, "Keep the KV cache of finished requests for prompts that begin alike."
    ] = True
    kv_offloading_size: Annotated[
        NonNegativeFloat | None,
        "Host memory, or a file with kv_offloading_path, for cached blocks that the KV cache has "
        "no room for, in GiB, of all ranks. Default: 1 with kv_transfer_config, else none.",
    ] = None
    kv_offloading_path: Annotated[
        str | None,
        "Directory of a file that keeps these blocks for the next start, and for all engines of "
        "this machine with the same model and settings.",
    ] = None
    kv_events_config: Annotated[
        KVEventsConfig | None,
        "Publishes over ZMQ which blocks the prefix cache has, for routers, as vLLM does: a JSON "
        'object such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
    ] = None

    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        "Sends blocks of the KV cache to other engines, or gets theirs, so that one engine "
        "computes prompts and another continues them: a JSON object such as "
        '{"kv_role": "kv_consumer", '
        '"peers": ["ipc:///run/quire/prefill.kv"]}.',
    ] = None

    @property
    def sends_kv(self) -> bool:
        return self.kv_transfer_config is not None and self.kv_transfer_config.sends

    @property
    def receives_kv(self) -> bool:
        return self.kv_transfer_config is not None and self.kv_transfer_config.receives

    @property
    def publishes_kv_events(self) -> bool:
        return self.kv_events_config is not None and self.kv_events_config.is_enabled


class SpeculativeConfig(Section, frozen=True):
    """How tokens are drafted, under vLLM's names; the model verifies several of them in one step.

    Outputs are those without speculation, bit by bit on native kernels.
    """

    # ngram: what followed the last tokens where they stood before. suffix: what followed most often
    # in the request and in earlier outputs of requests with its cache_salt and adapter. auto:
    # ngram, and suffix where it finds nothing. draft_model: what `model` draws. eagle3 and mtp: a
    # head that reads hidden states of the model that verifies.
    method: Literal["ngram", "suffix", "auto", "draft_model", "eagle3", "mtp"] = "ngram"
    # the draft model or the head: a directory, a GGUF file (but of eagle3) or a name. Default of
    # mtp: the files of the model itself.
    model: str | None = None
    revision: str | None = None  # of `model` on the hub
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 7  # most drafts of a row
    # fewer drafts, or none, where they are not expected to be worth what they cost
    adaptive: bool = True
    # the longest and the shortest end of the text that is looked up, in tokens
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 8
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] = 2
    # most tokens before a draft that are compared
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=64)] = 24
    # earlier outputs that are remembered, of each salt; 0: none
    suffix_decoding_max_cached_requests: NonNegativeInt = 10_000
    # most drafts per token that agrees
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0.0)] = 1.0
    # least probability of a draft and all before it, by how often they followed
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    # how the weights of `model` are made smaller; None: as the model's own
    quantization: Literal["int8", "int4"] | None = None
    draft_model_config: ModelConfig | None = None  # filled when resolved


class SchedulerConfig(Section, frozen=True, kw_only=True):
    max_num_seqs: Annotated[PositiveInt, "Most requests that run in one step."] = 256
    max_num_batched_tokens: Annotated[
        PositiveInt | None, "Most tokens computed in one step. Default: 2048."
    ] = None
    enable_chunked_prefill: Annotated[bool, "Split long prompts over several steps."] = True
    long_prefill_token_threshold: Annotated[
        NonNegativeInt, "Most tokens of one prompt in one step; 0: no limit."
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        "fcfs: first come, first served. priority: lower `priority` first, then by arrival.",
    ] = "fcfs"
    preemption_mode: Annotated[
        Literal["auto", "recompute", "swap"],
        "How a request makes room. recompute: its blocks are lost; swap: they move to swap_space; "
        "auto: what costs less.",
    ] = "auto"
    num_scheduler_steps: Annotated[
        NonNegativeInt,
        "Decoding steps per scheduling (multi-step decoding). 0: some, where few requests of a "
        "small model run on a CPU; else 1.",
    ] = 0
    owners_by_name: Annotated[
        bool,
        "Programs that name the same owner of a request (quire serve: its key) share what this "
        "owner gets of the engine; else each program has owners of its own.",
    ] = False
    speculative_config: Annotated[
        SpeculativeConfig | None,
        "How tokens are drafted, several of which a step verifies; a JSON object such as "
        '{"method": "ngram", "num_speculative_tokens": 7}.',
    ] = None
    async_scheduling: Annotated[
        bool | None,
        "Schedule the next step while one runs. Default: on one GPU, unless the engine drafts or "
        "takes several steps per scheduling.",
    ] = None
    disable_hybrid_kv_cache_manager: Annotated[
        bool, "Keep the whole context in layers with a sliding window, too."
    ] = False
    enable_jump_forward: Annotated[
        bool,
        "Append tokens without the model where a grammar leaves no choice (not with "
        "async_scheduling or several scheduler steps).",
    ] = True

    @property
    def has_draft_head(self) -> bool:
        """Whether a head drafts, which shares the embedding of the model that verifies."""
        return self.speculative_config is not None and self.speculative_config.method in (
            "eagle3",
            "mtp",
        )


class LoRAConfig(Section, frozen=True, kw_only=True):
    enable_lora: Annotated[
        bool, "Let requests use LoRA adapters (lora_request; quire serve: model)."
    ] = False
    max_loras: Annotated[PositiveInt, "Most different LoRA adapters in one step."] = 1
    max_lora_rank: Annotated[
        Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], "Highest rank of a LoRA adapter."
    ] = 16
    max_cpu_loras: Annotated[
        PositiveInt | None,
        "Most LoRA adapters in memory; the one that was used least recently makes room for "
        "another. Default: max_loras.",
    ] = None


class MultiModalConfig(Section, frozen=True, kw_only=True):
    limit_mm_per_prompt: Annotated[
        dict[Literal["image", "video", "audio"], NonNegativeInt],
        OF_FRONTEND,
        'Most images in a prompt, such as {"image": 4}; video and audio are never read. Default: '
        "16.",
    ] = {}
    mm_processor_kwargs: Annotated[
        dict[str, Any],
        OF_FRONTEND,
        "Keys that replace those of the model's preprocessor_config.json, such as the most pixels "
        "of an image.",
    ] = {}
    mm_processor_cache_gb: Annotated[
        NonNegativeFloat,
        OF_FRONTEND,
        "Memory of the frontend for images that have been prepared, in GiB; 0: none.",
    ] = 0.5
    allowed_local_media_path: Annotated[
        str, OF_FRONTEND, "Directory from which requests may name images as file:// URLs."
    ] = ""
    allowed_media_domains: Annotated[
        list[str],
        OF_FRONTEND,
        "Hosts from which images may be fetched over http and https. Default: none; images come "
        "with the request.",
    ] = []
    language_model_only: Annotated[
        bool, "Do not load the encoder of a model that reads images."
    ] = False
    mmproj: Annotated[
        str | None,
        "GGUF file of the encoder of images beside a GGUF model. Default: the file mmproj-*.gguf "
        "in the same directory, if there is one.",
    ] = None
    encoder_cache_tokens: Annotated[
        PositiveInt | None,
        "Rows of encoded images that the engine keeps, each in the place of one prompt token. "
        "Default: 16384, or max_num_batched_tokens if it is more.",
    ] = None
    max_encoder_tokens: Annotated[
        PositiveInt,
        "Most rows of images that a step encodes, unless a single image has more.",
    ] = 4096


class DeviceSettings(Section, frozen=True, kw_only=True):
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        "Where the model runs. auto: on a GPU that has room for it, otherwise on the CPU.",
    ] = "auto"
    num_threads: Annotated[
        PositiveInt | None,
        "Threads of each rank of the model. Default: OMP_NUM_THREADS, or the cores the process "
        "may use, divided by the number of ranks.",
    ] = None
    cpu_isa: Annotated[
        Literal[
            "auto",
            "amx",
            "avx512_bf16",
            "avx512",
            "avx2",
            "neon_bf16",
            "neon_i8mm",
            "neon_dotprod",
            "neon",
            "none",
        ],
        "Instruction set of the native kernels on a CPU. auto: the best that the processor has; "
        "none: torch's kernels instead.",
    ] = "auto"
    tensor_parallel_size: Annotated[
        PositiveInt, aliases("-tp"), "Ranks (processes) that share each layer; see docs/ranks.md."
    ] = 1
    pipeline_parallel_size: Annotated[
        PositiveInt, aliases("-pp"), "Ranks that share the stack of layers."
    ] = 1
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"], "Ranks are processes of this machine (mp) or actors of a Ray cluster."
    ] = "mp"
    data_parallel_size: Annotated[
        PositiveInt, aliases("-dp"), "Engine processes that divide the requests among them."
    ] = 1
    enable_expert_parallel: Annotated[
        bool, aliases("-ep"), "Divide a layer's experts among the engines of data_parallel_size."
    ] = False
    data_parallel_cores: Annotated[
        list[str],
        "Cores of each of these engines, such as 0-3,8 for one. Default: all that the process may "
        "use, divided by NUMA node.",
    ] = []
    enforce_eager: Annotated[bool, "Never capture CUDA graphs."] = False
    batch_invariant: Annotated[
        bool,
        "Give each request the bits that it has alone, whatever runs beside it and however its "
        "prompt is divided. On a CPU native kernels do so anyway; on a GPU it chooses kernels that "
        "do.",
    ] = False
    kernels: Annotated[
        dict[str, str],
        'Implementation by operation, e.g. {"rms_norm": "reference"}; the rest is chosen when the '
        "model is loaded.",
    ] = {}


class DeviceConfig(DeviceSettings, frozen=True):
    """The settings and what is set when an engine is started."""

    data_parallel_rank: int = 0  # the number of this engine among data_parallel_size
    cores: list[int] = []  # on which it runs; []: all
    expert_group: str = ""  # the address at which the engines that divide experts meet


class ServiceConfig(Section, frozen=True, kw_only=True):
    startup_timeout_s: Annotated[
        float, Meta(gt=0), OF_FRONTEND, "Deadline for the engine to come up, in seconds."
    ] = 600.0
    on_engine_death: Annotated[
        Literal["restart", "fail"],
        OF_FRONTEND,
        "restart: an engine process that dies is replaced, and its unfinished requests continue. "
        "fail: they end with an error, as all later calls do.",
    ] = "restart"
    engine_restarts: Annotated[
        NonNegativeInt,
        OF_FRONTEND,
        "Most engine restarts in 10 minutes, and failed ones in a row; 0: none.",
    ] = 5
    standby: Annotated[
        bool,
        "Keep a second engine process, which takes the place of one that dies: on a CPU with its "
        "weights loaded, on a GPU with its libraries imported.",
    ] = False
    step_timeout_s: Annotated[
        float,
        Meta(gt=0),
        OF_FRONTEND,
        "An engine process that has work and finishes no step for so many seconds is ended, and "
        "replaced as on_engine_death says.",
    ] = 300.0
    shutdown_timeout_s: Annotated[
        float,
        Meta(gt=0),
        OF_FRONTEND,
        "How long the engine may take to leave before it is killed, in seconds.",
    ] = 10.0
    max_message_bytes: Annotated[
        PositiveInt, OF_FRONTEND, "Largest message between the processes, in bytes."
    ] = 256 * 2**20
    token_file: Annotated[
        str | None,
        OF_FRONTEND,
        "A file with a secret of 16 bytes or more. An engine with --listen then serves other "
        "users that send it; a program of another user sends it.",
    ] = None
    log_stats_interval_s: Annotated[
        float, Meta(gt=0), OF_FRONTEND, "Seconds between two lines of statistics in the log."
    ] = 10.0
    otlp_traces_endpoint: Annotated[
        str | None,
        OF_FRONTEND,
        "Where OpenTelemetry spans go, one tree per request (needs the packages opentelemetry-sdk "
        "and opentelemetry-exporter-otlp).",
    ] = None
    otlp_metrics_endpoint: Annotated[
        str | None,
        OF_FRONTEND,
        "Where OpenTelemetry's three metrics of servers for generative AI go (needs the same "
        "packages).",
    ] = None
    disable_log_stats: Annotated[bool, "Do not collect statistics."] = False
    log_steps: Annotated[
        bool,
        aliases("enable_logging_iteration_details"),
        "Log a line for each step: queues, tokens, finished requests, times.",
    ] = False


class EngineConfig(Section, frozen=True):
    """The whole tree.

    The engine receives a resolved one, without "auto" and without a None that means "default".
    """

    model_config: ModelConfig = ModelConfig()
    load_config: LoadConfig = LoadConfig()
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    lora_config: LoRAConfig = LoRAConfig()
    multimodal_config: MultiModalConfig = MultiModalConfig()
    device_config: DeviceConfig = DeviceConfig()
    service_config: ServiceConfig = ServiceConfig()

    @property
    def num_seqs_at_once(self) -> int:
        """Most requests in one step of all engines of a frontend."""
        return self.scheduler_config.max_num_seqs * self.device_config.data_parallel_size


class ConfigField(msgspec.Struct, frozen=True):
    """One setting."""

    name: str
    section: str  # its section's name in EngineConfig; "" for a setting of ServerConfig
    type: Any  # the annotation
    info: msgspec.structs.FieldInfo

    @property
    def default(self) -> Any:
        """The default; a new object if it is mutable."""
        info = self.info
        return info.default_factory() if info.default is msgspec.NODEFAULT else info.default

    @property
    def help(self) -> str:
        return next(note for note in self.type.__metadata__ if isinstance(note, str))

    @property
    def aliases(self) -> tuple[str, ...]:
        return self._extra("aliases", ())

    @property
    def is_of_frontend(self) -> bool:
        return self._extra("is_of_frontend", False)

    @property
    def is_secret(self) -> bool:
        return self._extra("is_secret", False)

    def _extra(self, key: str, default: Any) -> Any:
        extras = (note.extra for note in self.type.__metadata__ if isinstance(note, Meta))
        return next((extra[key] for extra in extras if extra and key in extra), default)


def section_fields(section: type[Section], name: str = "") -> dict[str, ConfigField]:
    """Returns the settings of a section by name. A field that is filled in later has no text and is
    not a setting.
    """
    return {
        info.name: ConfigField(info.name, name, info.type, info)
        for info in msgspec.structs.fields(section)
        if get_origin(info.type) is Annotated
    }


@cache
def config_fields() -> Mapping[str, ConfigField]:
    """Every setting of an engine by its flat name."""
    sections = msgspec.structs.fields(EngineConfig)
    return {
        name: field
        for section in sections
        for name, field in section_fields(section.type, section.name).items()
    }
