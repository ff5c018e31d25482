"""EngineArgs: the configuration as flat arguments, validated and resolved into an EngineConfig.

Must not know: torch, the engine, the effect of a resolved value.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from ..ipc.checks import unknown_argument
from ..ipc.config import (
    CacheConfig,
    ConfigField,
    DeviceSettings,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ModelSettings,
    MultiModalConfig,
    SchedulerConfig,
    ServiceConfig,
    config_fields,
)
from ..ipc.errors import InvalidParameterError
from ..ipc.kv_events import check_kv_events
from ..ipc.kv_transfer import check_kv_transfer
from ..ipc.models.expert_parallel import check_expert_parallel
from ..ipc.models.pooling import Pooling
from ..ipc.models.ranks import check_ranks, num_ranks
from ..ipc.models.rope_config import INDEX_TOPK, model_context
from ..ipc.own_files import user_cache
from .arguments import vllm_arguments
from .arguments.field_types import describe_type
from .arguments.speculation import check_speculation, resolve_speculation
from .model_info.choose_device import choose_device
from .model_info.cpu import prefers_bfloat16
from .model_info.gguf_names import find_file
from .model_info.model_files import NO_GENERATION_CONFIG, find_model_directory, read_hf_config

if TYPE_CHECKING:
    from ..ipc.models.resolve_pooling import Resolved

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048

P = ParamSpec("P")
R = TypeVar("R")

# Editors and type checkers see these fields as keyword arguments. A class takes the sections of its
# bases from the last to the first.
if TYPE_CHECKING:

    class EngineArguments(
        ServiceConfig,
        DeviceSettings,
        MultiModalConfig,
        LoRAConfig,
        SchedulerConfig,
        CacheConfig,
        LoadConfig,
        ModelSettings,
        frozen=True,
    ): ...

    class OwnArguments(EngineArguments, frozen=True):
        """Has the arguments of EngineArgs, whose first one is positional too."""

        model: str = "bundled"

    class NamedEngine(EngineArguments, frozen=True, kw_only=True):
        engine: str = "process"

    class LLMArguments(NamedEngine, frozen=True):
        model: str = "bundled"

    class AsyncLLMArguments(EngineArguments, frozen=True):
        engine_args: EngineArgs | None = None
        engine: str = "process"

else:
    EngineArguments = OwnArguments = LLMArguments = AsyncLLMArguments = object


def takes(
    arguments: Callable[P, Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Gives a method the arguments of a class, for editors and type checkers."""
    return lambda method: method


class EngineArgs(EngineArguments):  # type: ignore[misc]
    """Every setting of ipc/config.py as a keyword argument and an attribute.

    None selects an argument's default. vLLM's other arguments are accepted where they change
    nothing (vllm_arguments.py). Raises InvalidParameterError on construction.
    """

    @takes(OwnArguments)
    def __init__(self, model: str = "bundled", **arguments: Any):
        fields = config_fields()
        renamed = {alias: field.name for field in fields.values() for alias in field.aliases}
        values = {name: field.default for name, field in fields.items()}
        for given, value in {"model": model, **arguments}.items():
            name = given if given.startswith("-") else renamed.get(given, given)
            if name in fields:
                values[name] = _checked(fields[name], value)
            elif not vllm_arguments.accept(name, value):
                raise InvalidParameterError(name, unknown_argument(name, fields))
        vars(self).update(values)

    def __repr__(self) -> str:
        changed = (
            f"{name}={getattr(self, name)!r}"
            for name, field in config_fields().items()
            if getattr(self, name) != field.default
        )
        return f"EngineArgs({', '.join(changed)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineArgs) and vars(self) == vars(other)

    def tree(self) -> EngineConfig:
        """Returns the arguments as given, "auto" and None included. A daemon's client uses them."""
        sections: dict[str, dict[str, Any]] = {}
        for name, field in config_fields().items():
            sections.setdefault(field.section, {})[name] = getattr(self, name)
        return msgspec.convert(sections, EngineConfig)

    def create_engine_config(self) -> EngineConfig:
        """Returns the tree with every "auto" and default resolved. Downloads the model's files if
        needed.

        Raises InvalidParameterError for conflicts, ModelLoadError if files of the model are missing
        or unreadable.
        """
        config = self.tree()
        check_speculation(config)
        device_config = config.device_config
        if device_config.device == "auto":
            on_gpu = EngineArgs(**{**vars(self), "device": "cuda"})
            device = choose_device(config, on_gpu.create_engine_config)
            device_config = replace(device_config, device=device)
        model_config = _resolve_model(config, device_config)
        resolved = replace(
            config,
            model_config=model_config,
            load_config=_resolve_load(config.load_config),
            scheduler_config=_resolve_overlap(
                _resolve_scheduler(
                    resolve_speculation(
                        _without_chunks(config.scheduler_config, model_config), config, model_config
                    ),
                    model_config.max_model_len,
                ),
                device_config,
            ),
            cache_config=_resolve_cache(config, model_config),
            lora_config=_resolve_lora(config.lora_config, model_config),
            device_config=device_config,
        )
        check_ranks(resolved)
        check_expert_parallel(resolved)
        return resolved

    def attach_to(self, config: EngineConfig) -> EngineConfig:
        """Returns the configuration of a frontend attached to a daemon: the daemon's, with this
        frontend's own tokenizer, seed and timeouts.

        Any other argument that differs from its default must equal the daemon's value; otherwise
        InvalidParameterError names both.
        """
        own: dict[str, dict[str, Any]] = {}
        for name, field in config_fields().items():
            wanted = getattr(self, name)
            actual = getattr(getattr(config, field.section), name)
            if wanted == field.default:
                continue
            if field.is_of_frontend:
                own.setdefault(field.section, {})[name] = wanted
            elif wanted != actual and not _names_model(name, wanted, config):
                raise InvalidParameterError(
                    name,
                    f"the attached engine runs with {actual!r}, not {wanted!r}; leave the argument "
                    f"out",
                )
        if "generation_config" in own.get("model_config", {}):
            own["model_config"]["generation_config"] = _resolve_generation_config(
                self.generation_config, config.model_config.model
            )
        if (tokenizer := own.get("model_config", {}).get("tokenizer")) is not None:
            own["model_config"]["tokenizer"] = str(
                find_model_directory(
                    tokenizer,
                    revision=self.revision,
                    weights=False,
                    download_dir=self.download_dir,
                )
            )
        return replace(
            config,
            **{
                section: replace(getattr(config, section), **values)
                for section, values in own.items()
            },
        )


AsyncEngineArgs = EngineArgs  # vLLM's name for the arguments of an AsyncLLM


def replace(section: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(section, **changes)


def _checked(field: ConfigField, value: Any) -> Any:
    name = field.name
    if name == "served_model_name" and isinstance(value, list) and len(value) == 1:
        value = value[0]
    value = vllm_arguments.spelled(name, value)
    if value is None and name != "model":
        return field.default  # None itself where the field may be None
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError:
        raise InvalidParameterError(
            name, f"must be {describe_type(field.type)}, got {value!r}"
        ) from None


def _names_model(name: str, wanted: Any, config: EngineConfig) -> bool:
    """Returns whether `wanted` is another name of the daemon's model: the resolved directory, or
    the name it was started with.
    """
    if name != "model":
        return False
    actual = config.model_config
    return (
        wanted == actual.served_model_name
        or str(Path(wanted).expanduser().resolve()) == actual.model
        or str(find_file(Path(wanted).expanduser())) == actual.model  # a GGUF file's links stay
    )


def _resolve_load(load_config: Any) -> Any:
    directory = load_config.packed_weights_cache
    if directory == "auto":
        directory = str(user_cache() / "packed_weights")
    elif directory is not None:
        directory = str(Path(directory).expanduser().resolve())
    return replace(
        load_config,
        load_format="safetensors" if load_config.load_format == "auto" else load_config.load_format,
        packed_weights_cache=directory,
    )


def _resolve_model(config: EngineConfig, device_config: Any) -> Any:
    wanted, download_dir = config.model_config, config.load_config.download_dir
    directory = find_model_directory(
        wanted.model,
        revision=wanted.revision,
        weights=config.load_config.load_format != "dummy",
        download_dir=download_dir,
    )
    tokenizer_directory = directory
    if wanted.tokenizer is not None:
        tokenizer_directory = find_model_directory(
            wanted.tokenizer, revision=wanted.revision, weights=False, download_dir=download_dir
        )
    hf_config = read_hf_config(directory, wanted.hf_overrides)
    # reads all architectures, which a help text does not need
    from ..ipc.models.resolve_pooling import resolve_pooling

    resolved = resolve_pooling(
        directory,
        hf_config,
        wanted.runner,
        wanted.convert,
        wanted.pooler_config,
        wanted.model_impl,
    )
    max_model_len, pooling = _resolve_lengths(wanted.max_model_len, resolved)
    vision = None
    if not config.multimodal_config.language_model_only and wanted.model_impl != "transformers":
        from ..ipc.models.vision_files import find_vision

        mmproj = config.multimodal_config.mmproj
        vision = find_vision(directory, resolved.hf_config, wanted.hf_overrides, mmproj)
    return replace(
        wanted,
        model=str(directory),
        tokenizer=str(tokenizer_directory),
        served_model_name=wanted.served_model_name or wanted.model,
        dtype=_auto_dtype(device_config) if wanted.dtype == "auto" else wanted.dtype,
        max_model_len=max_model_len,
        hf_config=resolved.hf_config,
        vision=vision,
        runner=resolved.runner,
        convert=resolved.convert,
        pooling=pooling,
        generation_config=_resolve_generation_config(wanted.generation_config, str(directory)),
    )


def _resolve_generation_config(wanted: str, model_directory: str) -> str:
    """Returns a directory with generation_config.json, or "none"."""
    if wanted in ("auto", NO_GENERATION_CONFIG):
        return model_directory if wanted == "auto" else wanted
    directory = Path(wanted).expanduser().resolve()
    if not (directory / "generation_config.json").is_file():
        raise InvalidParameterError(
            "generation_config",
            f'must be "auto", "{NO_GENERATION_CONFIG}" or a directory that holds '
            f"generation_config.json, got {wanted!r}",
        )
    return str(directory)


def _auto_dtype(device_config: Any) -> str:
    return (
        "bfloat16"
        if device_config.device == "cuda" or prefers_bfloat16(device_config.cpu_isa)
        else "float32"
    )


def _resolve_lengths(wanted: int | None, resolved: Resolved) -> tuple[int, Pooling]:
    """Returns max_model_len, and the pooling that cuts texts there if the model's files say where
    to cut.

    RoBERTa has fewer positions than rows of their table, and texts are cut at max_seq_length unless
    max_model_len is given.
    """
    hf_config, pooling = resolved.hf_config, resolved.pooling
    from ..ipc.models.resolve_pooling import positions_of

    length = _resolve_max_model_len(wanted, hf_config, positions_of(hf_config))
    if pooling.max_seq_length is None:
        return length, pooling
    if wanted is None:
        length = min(length, pooling.max_seq_length)
    return length, replace(pooling, max_seq_length=length)


def _resolve_max_model_len(
    wanted: int | None, hf_config: dict[str, Any], positions: int | None
) -> int:
    context = positions or model_context(hf_config)
    if wanted is None:
        if context is None:
            raise InvalidParameterError(
                "max_model_len",
                "the model's config.json does not give a context length, so it must be given",
            )
        return context
    if wanted > hf_config.get(INDEX_TOPK, wanted):
        raise InvalidParameterError(
            "max_model_len",
            f"must be at most index_topk={context} of config.json, got {wanted}: in a longer "
            f"context the model attends to tokens that an indexer chooses, which is not supported",
        )
    if context is not None and wanted > context:
        raise InvalidParameterError(
            "max_model_len",
            f"must be at most {context}, the context of the model, got {wanted} (hf_overrides can "
            f"change it)",
        )
    return wanted


def _without_chunks(wanted: Any, model_config: Any) -> Any:
    """Forbids chunks for a bidirectional model: every token sees the whole text, so the text is
    computed in one step.
    """
    if model_config.runner == "pooling" and model_config.pooling.is_bidirectional:
        return replace(wanted, enable_chunked_prefill=False)
    return wanted


def _resolve_cache(config: EngineConfig, model_config: Any) -> Any:
    """Resolves the cache's settings. A bidirectional model has no prefix cache: every token's entry
    depends on the whole text.
    """
    wanted = config.cache_config
    if model_config.runner == "pooling" and model_config.pooling.is_bidirectional:
        wanted = replace(wanted, enable_prefix_caching=False)
    if wanted.state_checkpoint_interval % wanted.block_size:
        raise InvalidParameterError(
            "state_checkpoint_interval",
            f"must be a multiple of block_size={wanted.block_size}, got "
            f"{wanted.state_checkpoint_interval}",
        )
    check_kv_events(wanted.kv_events_config, has_prefix_cache=wanted.enable_prefix_caching)
    path = wanted.kv_offloading_path
    size = wanted.kv_offloading_size
    if wanted.kv_transfer_config is not None and size is None:
        size = 1.0  # GiB
    if size:
        if not wanted.enable_prefix_caching:
            raise InvalidParameterError("kv_offloading_size", "needs enable_prefix_caching")
    elif path is not None:
        raise InvalidParameterError("kv_offloading_path", "needs kv_offloading_size, of its file")
    if path is not None:
        path = str(Path(path).expanduser().resolve())
    device = config.device_config
    check_kv_transfer(
        wanted.kv_transfer_config,
        size,
        num_engines=device.data_parallel_size,
        num_ranks=num_ranks(config),
        is_on_ray=device.distributed_executor_backend == "ray",
    )
    return replace(wanted, kv_offloading_path=path, kv_offloading_size=size)


def _resolve_lora(wanted: Any, model_config: Any) -> Any:
    if wanted.enable_lora and model_config.runner == "pooling":
        raise InvalidParameterError("enable_lora", "needs a model that generates text")
    most = wanted.max_loras if wanted.max_cpu_loras is None else wanted.max_cpu_loras
    if wanted.enable_lora and most < wanted.max_loras:
        raise InvalidParameterError(
            "max_cpu_loras", f"must be at least max_loras={wanted.max_loras}, got {most}"
        )
    return replace(wanted, max_cpu_loras=most)


def _resolve_overlap(wanted: Any, device_config: Any) -> Any:
    """Overlaps steps by default where they are launched without waiting for the last one's tokens:
    on one GPU, and not with drafts, with which the next step is only scheduled meanwhile.
    """
    if wanted.async_scheduling is not None:
        return wanted
    is_on_gpu = device_config.device == "cuda" and device_config.data_parallel_size == 1
    num_ranks = device_config.tensor_parallel_size * device_config.pipeline_parallel_size
    is_single = wanted.speculative_config is None and wanted.num_scheduler_steps <= 1
    return replace(wanted, async_scheduling=is_on_gpu and num_ranks == 1 and is_single)


def _resolve_scheduler(wanted: Any, max_model_len: int) -> Any:
    budget = wanted.max_num_batched_tokens
    if wanted.enable_chunked_prefill:
        return replace(wanted, max_num_batched_tokens=budget or DEFAULT_MAX_NUM_BATCHED_TOKENS)
    if wanted.long_prefill_token_threshold:
        raise InvalidParameterError(
            "long_prefill_token_threshold",
            "splits prompts, which enable_chunked_prefill=False forbids",
        )
    if budget is not None and budget < max_model_len:
        raise InvalidParameterError(
            "max_num_batched_tokens",
            f"must be at least max_model_len={max_model_len} with enable_chunked_prefill=False (a "
            f"prompt is one step), got {budget}",
        )
    return replace(
        wanted, max_num_batched_tokens=budget or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_model_len)
    )
