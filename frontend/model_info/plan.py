"""The memory plan: what a model needs and what a machine provides, computed before anything is
loaded. The figures are those that the engine computes when it starts.

Must not know: torch, weight files, how a plan is shown.
"""

from __future__ import annotations

import contextlib
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...ipc.config import CacheConfig, EngineConfig, ModelConfig, resolved
from ...ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ...ipc.machine import free_memory_bytes, total_memory_bytes
from ...ipc.models.architectures import NATIVE
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.draft_heads import HeadNames, find_heads, head_rows, quantization_of_head
from ...ipc.models.encoder_memory import num_encoders, table_bytes
from ...ipc.models.expert_parallel import shares_experts
from ...ipc.models.fallback_architectures import parse_model
from ...ipc.models.gguf import is_gguf, read_gguf
from ...ipc.models.gguf_weights import DTYPE_BYTES, check_gguf_tensors, weights_in_memory
from ...ipc.models.kv_layout import LayerGroups, make_layout, plan_groups, plan_groups_of_stage
from ...ipc.models.memory_plan import (
    CPU_MEMORY_FRACTION,
    QUANTIZATION_BITS,
    affordable_blocks,
    check_cache_size,
    fitting_tokens,
    free_of_share,
    plan_num_blocks,
    plan_states,
)
from ...ipc.models.quantization_config import parse_quantization
from ...ipc.models.quantized_tensors import saved_bytes
from ...ipc.models.ranks import num_ranks, num_readers, stages_of, state_bytes_of_rank
from ...ipc.models.resolve_pooling import positions_of
from ...ipc.models.rope_config import model_context
from ..engine_args import EngineArgs
from .gguf_header import find_description
from .gpu_memory import gpu_memory_bytes
from .model_sizes import (
    HeadSizes,
    ModelSizes,
    StoredSizes,
    encoder_bytes,
    kv_bytes_by_layer,
    kv_bytes_per_token,
    largest_head_dim,
    measure_eagle3,
    measure_model,
    measure_mtp_head,
)

# A GPU needs this for the CUDA context and the cuBLAS workspace. It is an estimate, not a
# measurement.
CUDA_BYTES = 640 * 2**20
# This is for the engine process without weights and cache (260 MiB measured, of Python and torch),
# and a frontend (100 MiB).
RUNTIME_BYTES = 384 * 2**20
CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
# arguments that the plan determines
NOT_COPIED = frozenset({"model", "max_model_len", "kv_cache_memory_bytes"})


class States(msgspec.Struct, frozen=True):
    """The states of requests, of one engine, on one rank."""

    bytes_of_one: int  # of a request
    num_requests: int  # that have room for theirs
    num_checkpoints: int  # that are kept at most

    @property
    def num_bytes(self) -> int:
        return self.bytes_of_one * (self.num_requests + self.num_checkpoints)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as given by the user
    architecture: str
    num_parameters: int
    dtype: str
    weights_bytes: int
    # Of a table that stays in the files: a step reads few rows, and the system may drop their pages
    # like others that it caches. It is none of weights_bytes.
    mapped_bytes: int = 0
    quantization: str | None  # of the linear layers' weights
    keeps_blocks: bool  # quantized weights of the files, for the types that kernels multiply
    # "bfloat16" or "float32" unquantized, else "int8" or "int4" with this dtype
    weights_bytes_by_dtype: dict[str, int]
    kv_bytes_per_token: int  # of all layers, while their windows see it
    block_size: int
    block_bytes: int
    blocks_per_sequence: int  # at most at a time, of max_model_len tokens
    num_layers: int
    num_window_layers: int  # layers that return the blocks that their window has left
    model_context: int | None
    max_model_len: int  # requested; default: the model's context length
    device: str
    # Engines (data_parallel_size), which on a CPU share the memory. Figures of weights and of the
    # KV cache are those of one engine.
    num_engines: int = 1
    divides_experts: bool = False  # each engine has a part of the experts
    # Ranks of an engine, as if all were on one machine. Figures are those of all ranks together,
    # and of as many GPUs.
    num_ranks: int = 1
    memory_bytes: int  # on GPUs: their total memory
    memory_is_named: bool  # False: the free memory of this machine or its GPU
    memory_share: float  # gpu_memory_utilization
    # On a GPU: the share that gpu_memory_utilization leaves to other processes, and what they use
    # beyond it.
    withheld_bytes: int
    runtime_bytes: int  # of the processes, those beside the first with their weights
    step_bytes: int  # on a GPU: activations, graphs and request tables, estimated
    images_bytes: int = 0  # of the tables of encoded images, of a model that reads any
    num_blocks: int  # KV-cache blocks of the engine; 0: the engine would not start
    kv_cache_bytes: int
    longest_kv_cache_bytes: int  # of one sequence of `longest_context` tokens
    states: States | None = None  # of models whose layers keep any
    # Tokens of one sequence that fit, at most the model's context length. 0: the weights and one
    # block do not fit.
    longest_context: int
    # Tokens per request -> requests that run concurrently, at most max_num_seqs.
    concurrency: dict[int, int]
    flags: list[str]  # flags that make the model fit; empty if there are none
    # The dtype in `flags`, if the model fits with that dtype only.
    fits_as: str | None

    @property
    def weights_kind(self) -> str:
        return "blocks of the file" if self.keeps_blocks else self.quantization or self.dtype

    @property
    def fits(self) -> bool:
        return self.num_blocks > 0

    @property
    def least_memory_bytes(self) -> int:
        """Memory for the weights and one sequence of max_model_len, as divided by the engine's
        defaults. On GPUs it is the memory of each.
        """
        if self.device == "cuda":
            needed = (
                self.weights_bytes
                + self.runtime_bytes
                + self.step_bytes
                + self.images_bytes
                + self.least_kv_cache_bytes
            )
            needed = -(-needed // self.num_ranks)
            total = ceil(needed / self.memory_share)
            return total + (int(total * self.memory_share) < needed)
        return (
            self.weights_bytes
            + self.runtime_bytes
            + self.images_bytes
            + ceil(self.least_kv_cache_bytes * self.num_engines / CPU_MEMORY_FRACTION)
        )

    @property
    def least_kv_cache_bytes(self) -> int:
        """KV cache for one sequence of max_model_len, including the null block."""
        return (1 + self.blocks_per_sequence) * self.block_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes left for the KV cache and everything else. Negative if the weights do not fit."""
        return (
            self.memory_bytes
            - self.withheld_bytes
            - self.weights_bytes
            - self.runtime_bytes
            - self.step_bytes
            - self.images_bytes
        )


def make_plan(
    args: EngineArgs, memory_bytes: int | None = None, given: dict[str, Any] | None = None
) -> Plan:
    """Returns the plan for `args` on this machine, or for `memory_bytes` (of a GPU: its total).

    `given` holds the user's arguments, which `flags` repeats. Raises the engine's own errors.
    """
    config = resolve(args)
    model_config, size = config.model_config, num_ranks(config)
    sizes = measure_model(model_config.hf_config, model_config.model, model_config.model_impl)
    _check_supported(config, largest_head_dim(sizes.config))
    memory = _measure_memory(config, memory_bytes)
    draft_bytes, draft_block_bytes = _bytes_of_draft(config)
    weights_bytes, keeps_blocks = weights_in_engine(config, sizes)
    weights_bytes += draft_bytes
    num_engines = 1 if memory.is_gpu else config.device_config.data_parallel_size
    beside = _bytes_beside(config, sizes, memory, num_engines, weights_bytes)
    free = memory.total_bytes - memory.withheld_bytes - weights_bytes - sum(beside.values())
    cache = _Cache(config, sizes, draft_block_bytes)
    room = _measure_room(config, cache, free // size)
    flags = _flags(config, room, given or {}, memory_bytes is not None and not memory.is_gpu)
    as_bfloat16 = _flags_as_bfloat16(args, config, room.longest, memory_bytes, given or {})
    return Plan(
        model=args.model,
        architecture=sizes.architecture,
        num_parameters=sizes.num_parameters,
        dtype=model_config.dtype,
        weights_bytes=weights_bytes,
        mapped_bytes=0 if keeps_blocks else _mapped_bytes(config, sizes, model_config.dtype),
        quantization=model_config.quantization,
        keeps_blocks=keeps_blocks,
        weights_bytes_by_dtype=_bytes_by_dtype(config, sizes, memory.is_gpu),
        kv_bytes_per_token=cache.bytes_per_token,
        block_size=config.cache_config.block_size,
        block_bytes=cache.block_bytes * size,
        blocks_per_sequence=cache.layout.most_blocks(resolved(model_config.max_model_len)),
        num_layers=cache.num_layers,
        num_window_layers=cache.num_window_layers,
        model_context=room.context,
        max_model_len=resolved(model_config.max_model_len),
        device=config.device_config.device,
        num_engines=num_engines,
        divides_experts=shares_experts(config),
        num_ranks=size,
        memory_share=config.cache_config.gpu_memory_utilization,
        memory_bytes=memory.total_bytes,
        memory_is_named=memory_bytes is not None,
        withheld_bytes=memory.withheld_bytes,
        **beside,
        num_blocks=room.num_blocks,
        kv_cache_bytes=room.num_blocks * cache.block_bytes * size,
        states=room.states,
        longest_kv_cache_bytes=cache.layout.most_blocks(room.longest) * cache.block_bytes * size,
        longest_context=room.longest,
        concurrency=room.concurrency,
        flags=flags or as_bfloat16,
        fits_as="bfloat16" if as_bfloat16 else None,
    )


class _Cache:
    """Tells what a block of one rank's KV cache holds, and how many a request needs."""

    def __init__(self, config: EngineConfig, sizes: ModelSizes, draft_block_bytes: int):
        cache_config, shape, size = config.cache_config, sizes.config, num_ranks(config)
        dtype, block_size = config.model_config.dtype, cache_config.block_size
        by_layer = kv_bytes_by_layer(shape, dtype, cache_config.kv_cache_dtype)
        bytes_per_token, windows = sum(by_layer), shape.cache_windows
        groups = plan_groups(config, windows, by_layer)
        self.block_bytes = groups.largest(by_layer) * block_size + draft_block_bytes
        self.num_layers = shape.num_hidden_layers
        self.num_window_layers = sum(
            len(layers) for layers, window in zip(groups.layers, groups.windows) if window
        )
        if size > 1:
            assert isinstance(shape, DecoderConfig)  # check_ranks
            groups, self.block_bytes = _blocks_of_ranks(config, shape, by_layer, draft_block_bytes)
            bytes_per_token = self.block_bytes * size // block_size
        self.bytes_per_token = bytes_per_token  # of all layers and ranks
        self.windows = groups.windows
        self.layout = make_layout(config, groups.windows)
        self.state_bytes = shape.state_bytes(DTYPE_BYTES[dtype])  # of one request, on one rank
        if size > 1:
            self.state_bytes = state_bytes_of_rank(config, DTYPE_BYTES[dtype])


def _blocks_of_ranks(
    config: EngineConfig, shape: DecoderConfig, by_layer: list[int], draft_block_bytes: int
) -> tuple[LayerGroups, int]:
    """Returns the groups of layers of several ranks, whose windows are those of all stages, and the
    bytes of a block of the rank with the most. by_layer: bytes of a token in each layer of the
    cache, of which a rank has its heads. What drafts is whole in each rank of the last stage.
    """
    device, block_size = config.device_config, config.cache_config.block_size
    bytes_of = dict[int, int]()
    for index, num_bytes in zip(shape.cache_layers, by_layer):
        heads = shape.layer(index).num_kv_heads
        bytes_of[index] = num_bytes // heads * max(1, heads // device.tensor_parallel_size)
    num_stages, most = device.pipeline_parallel_size, 0
    stages = stages_of(shape, num_stages, num_readers(config.model_config))
    groups = [plan_groups_of_stage(config, shape, stages, stage) for stage in range(num_stages)]
    for stage, layers in enumerate(stages):
        own = groups[stage].largest([bytes_of[index] for index in layers if index in bytes_of])
        has_draft = stage == num_stages - 1
        most = max(most, own * block_size + has_draft * draft_block_bytes)
    return groups[-1], most


class _Room(NamedTuple):
    num_blocks: int  # that the engine would allocate; 0: it would not start
    context: int | None  # the model's, in tokens
    longest: int  # sequence in tokens
    concurrency: dict[int, int]
    cache_bytes: int  # of one rank, for a machine whose memory is named
    states: States | None


def _measure_room(config: EngineConfig, cache: _Cache, free: int) -> _Room:
    """Measures what fits. `free` has the bytes of one rank for its cache, on a CPU also for
    activations.
    """
    states = _measure_states(config, cache.state_bytes, free)
    if states is not None:
        if config.device_config.device == "cuda":  # a CPU's pages are taken when they are written
            free -= states.num_bytes
        free = free if states.num_requests else 0
    affordable = affordable_blocks(config, cache.block_bytes, free) if free > 0 else 0
    hf_config = config.model_config.hf_config
    context = positions_of(hf_config) or model_context(hf_config)
    fitting = fitting_tokens(config, affordable, cache.windows, context)
    longest = min(fitting, context or fitting)
    num_blocks = 0
    if free > 0:
        with contextlib.suppress(NotEnoughMemoryError):
            num_blocks = plan_num_blocks(config, cache.block_bytes, free, cache.windows)
    lengths = sorted({*(length for length in CONTEXTS if length < longest), longest} - {0})
    most, usable = config.scheduler_config.max_num_seqs, (num_blocks or affordable) - 1
    most = most if states is None else min(most, states.num_requests)
    concurrency = {
        length: min(most, usable // cache.layout.most_blocks(length)) for length in lengths
    }
    num_bytes = (num_blocks or affordable) * cache.block_bytes
    return _Room(num_blocks, context, longest, concurrency, num_bytes, states)


def _bytes_beside(
    config: EngineConfig,
    sizes: ModelSizes,
    memory: Memory,
    num_engines: int,
    weights_bytes: int,
) -> dict[str, int]:
    """By the name of Plan's field: what lies beside weights and cache."""
    size, item_bytes = num_ranks(config), DTYPE_BYTES[config.model_config.dtype]
    return {
        "runtime_bytes": _runtime_bytes(config, memory, num_engines, weights_bytes),
        "step_bytes": size * _estimate_step(config, sizes) if memory.is_gpu else 0,
        "images_bytes": num_engines * num_encoders(config) * table_bytes(config, item_bytes),
    }


def _measure_states(config: EngineConfig, state_bytes: int, free: int) -> States | None:
    """Measures the room for states; None for a model that keeps none."""
    if not state_bytes:
        return None
    num_requests = num_checkpoints = 0
    if free > 0:
        with contextlib.suppress(NotEnoughMemoryError):
            num_requests, num_checkpoints = plan_states(config, state_bytes, free)
    return States(state_bytes, num_requests, num_checkpoints)


def _runtime_bytes(
    config: EngineConfig, memory: Memory, num_engines: int, weights_bytes: int
) -> int:
    """Returns what the processes take, including the weights of those beside the first. On a CPU a
    standby is a second process with weights of its own; it touches its cache when the first is
    gone. On a GPU it takes no memory there.
    """
    has_loaded_standby = config.service_config.standby and not memory.is_gpu
    num_others = num_engines - 1 + has_loaded_standby
    num_bytes = memory.runtime_bytes + num_others * (RUNTIME_BYTES + weights_bytes)
    if not memory.is_gpu:
        num_bytes += (num_ranks(config) - 1) * (1 + num_others) * RUNTIME_BYTES
    return num_bytes


def _bytes_by_dtype(config: EngineConfig, sizes: ModelSizes, is_gpu: bool) -> dict[str, int]:
    """Returns Plan.weights_bytes_by_dtype."""
    by_dtype = {name: _bytes_of_packed(config, sizes, name) for name in ("bfloat16", "float32")}
    for name in () if is_gpu else QUANTIZATION_BITS:
        by_dtype[name] = _bytes_of_packed(config, sizes, config.model_config.dtype, name)
    return by_dtype


def _flags_as_bfloat16(
    args: EngineArgs,
    config: EngineConfig,
    longest: int,
    memory_bytes: int | None,
    given: dict[str, Any],
) -> list[str]:
    """Returns the flags with which a model fits that does not fit in float32. They are empty if
    there are none.
    """
    if longest or config.model_config.dtype != "float32":
        return []
    as_bfloat16: dict[str, Any] = {"dtype": "bfloat16"}
    changed = EngineArgs(**vars(args) | as_bfloat16)
    return make_plan(changed, memory_bytes, given | as_bfloat16).flags


def _bytes_of_draft(config: EngineConfig) -> tuple[int, int]:
    """Returns the bytes of the weights of the model or head that drafts, and of its part of a
    KV-cache block. They are 0 without one.
    """
    scheduling, cache_config = config.scheduler_config, config.cache_config
    drafting = scheduling.speculative_config
    if drafting is None or (draft := drafting.draft_model_config) is None:
        return 0, 0
    if drafting.method == "draft_model":
        sizes = measure_model(draft.hf_config, draft.model, draft.model_impl)
        shape = sizes.config
        of_draft = msgspec.structs.replace(config, model_config=draft)
        weights_bytes, _ = weights_in_engine(of_draft, sizes)
    elif drafting.method == "eagle3":
        head = measure_eagle3(draft.hf_config, Path(draft.model))
        shape, weights_bytes = head.config, head.weights_bytes(draft.dtype, draft.quantization)
        weights_bytes += head.states_bytes(draft.dtype, head_rows(scheduling, 1))
    else:
        head = measure_mtp_head(draft.hf_config)
        shape, most = head.config, drafting.num_speculative_tokens
        _, _, target = parse_model(config.model_config.hf_config, config.model_config.model_impl)
        sizes_of_model = target.num_hidden_layers, shape.num_hidden_layers
        chain = find_heads(Path(draft.model), *sizes_of_model, most)
        weights_bytes = sum(_bytes_of_mtp_head(config, draft, head, names) for names in chain)
        rows = head_rows(scheduling, len(chain))
        weights_bytes += len(chain) * head.states_bytes(draft.dtype, rows)
        per_token = kv_bytes_per_token(shape, draft.dtype, cache_config.kv_cache_dtype)
        return weights_bytes, len(chain) * per_token * cache_config.block_size
    per_token = kv_bytes_per_token(shape, draft.dtype, cache_config.kv_cache_dtype)
    return weights_bytes, per_token * cache_config.block_size


def _bytes_of_mtp_head(
    config: EngineConfig, draft: ModelConfig, head: HeadSizes, names: HeadNames
) -> int:
    """Returns the bytes of the weights of a head. Blocks of a GGUF file or a quantized checkpoint
    are kept, if they are those of the model; fc is unpacked (executor/models/draft_heads.py:
    JoinedLinear).
    """
    keeps_fp8 = config.device_config.device == "cuda"
    path, quantization = Path(draft.model), parse_quantization(draft.hf_config, keeps_fp8)
    are_kept = _keeps_blocks(msgspec.structs.replace(config, model_config=draft))
    if not are_kept or (quantization is None and not is_gguf(path)):
        return head.weights_bytes(draft.dtype, draft.quantization)
    shapes = {names.of(name): shape for name, shape in head.shapes.items()}
    fc = names.of("fc.weight")
    if is_gguf(path):
        tensors = check_gguf_tensors(read_gguf(path), shapes, names.layers[0])
        fc_bytes = prod(tensors.pop(fc).shape) * DTYPE_BYTES[draft.dtype]
        num_bytes = weights_in_memory(tensors, draft.dtype, keeps_blocks=True)
        return num_bytes + fc_bytes + head.wider_bytes(draft.dtype)
    experts = head.config.experts
    num_experts = 0 if experts is None else experts.count
    quantization = quantization_of_head(quantization, path, shapes, num_experts)
    assert quantization is not None
    del shapes[fc]
    saved = saved_bytes(shapes, quantization, DTYPE_BYTES[draft.dtype])
    return head.weights_bytes(draft.dtype) - saved


def weights_in_engine(config: EngineConfig, sizes: ModelSizes) -> tuple[int, bool]:
    """Returns the bytes of the weights in the engine's memory, and whether they are the blocks of
    the files.
    """
    kept_bytes = bytes_of_blocks(config, sizes)
    model_config = config.model_config
    if kept_bytes is not None:
        return kept_bytes + _bytes_of_encoders(config, model_config.dtype), True
    return _bytes_of_packed(config, sizes, model_config.dtype, model_config.quantization), False


def _bytes_of_packed(
    config: EngineConfig, sizes: ModelSizes, dtype: str, quantization: str | None = None
) -> int:
    """Returns the bytes of the weights that one engine has."""
    num_bytes = sizes.weights_bytes(dtype, quantization) - _mapped_bytes(config, sizes, dtype)
    num_bytes += _bytes_of_encoders(config, dtype, quantization)
    if shares_experts(config):
        # each has equally many, see check_expert_parallel
        size = config.device_config.data_parallel_size
        num_bytes -= sizes.experts_bytes(dtype, quantization) * (size - 1) // size
    return num_bytes


def _bytes_of_encoders(config: EngineConfig, dtype: str, quantization: str | None = None) -> int:
    """Returns the bytes of the encoders of images in all ranks of an engine."""
    return num_encoders(config) * encoder_bytes(config.model_config.vision, dtype, quantization)


def _mapped_bytes(config: EngineConfig, sizes: ModelSizes, dtype: str) -> int:
    """Returns the bytes of the table of layers' inputs, if it stays in the files: on a CPU, where
    it has the model's dtype.
    """
    model_config, shape = config.model_config, sizes.config
    inputs = shape.per_layer_inputs if isinstance(shape, DecoderConfig) else None
    hf_config = model_config.hf_config
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if inputs is None or stored != dtype or config.device_config.device != "cpu":
        return 0
    if is_gguf(Path(model_config.model)):
        return 0
    return inputs.vocab_size * shape.num_hidden_layers * inputs.size * DTYPE_BYTES[dtype]


def bytes_of_blocks(config: EngineConfig, sizes: ModelSizes) -> int | None:
    """Returns the bytes of the weights of a GGUF file or a quantized checkpoint, whose blocks are
    multiplied as they are, or None for others. The engine's LayerFactory.keeps_blocks decides the
    same.
    """
    model_config = config.model_config
    if not _keeps_blocks(config):
        return None
    shapes = (
        dict(sizes.shapes)
        if isinstance(sizes, StoredSizes)
        else NATIVE[sizes.architecture].weight_shapes(sizes.config)  # type: ignore[arg-type]
    )
    if is_gguf(path := Path(model_config.model)):
        tensors = check_gguf_tensors(read_gguf(path), shapes)
        num_bytes = weights_in_memory(tensors, model_config.dtype, keeps_blocks=True)
        return num_bytes + sizes.wider_bytes(model_config.dtype)
    keeps_fp8 = config.device_config.device == "cuda"
    quantization = parse_quantization(model_config.hf_config, keeps_fp8)
    if quantization is None:
        return None
    if isinstance(sizes, StoredSizes):
        shapes = dict(sizes.kept)
    dense = sizes.weights_bytes(model_config.dtype)
    saved = saved_bytes(shapes, quantization, DTYPE_BYTES[model_config.dtype])
    return dense - saved if saved else None


def _keeps_blocks(config: EngineConfig) -> bool:
    """Whether the engine multiplies blocks of files as they are, where there are any."""
    device, model_config = config.device_config, config.model_config
    return (
        (model_config.dtype, model_config.quantization) == ("bfloat16", None)
        and (device.device == "cuda" or device.cpu_isa != "none")
        and device.kernels.get("pack_gguf_linear") != "reference"
    )


def check_cache(args: EngineArgs, plan: Plan) -> str:
    """Calls check_cache_size for a plan, as the engine does when it starts."""
    on_gpus = plan.device == "cuda"
    there_is = plan.memory_bytes
    if not (on_gpus or plan.memory_is_named):
        there_is = total_memory_bytes()
    if args.distributed_executor_backend == "ray":  # each machine has some of the ranks
        return ""
    cache_config = CacheConfig(
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
    )
    num_bytes = plan.kv_cache_bytes * plan.num_engines
    return check_cache_size(cache_config, num_bytes, plan.free_bytes, there_is)


class Memory(msgspec.Struct, frozen=True):
    total_bytes: int
    withheld_bytes: int
    runtime_bytes: int
    is_gpu: bool


def _measure_memory(config: EngineConfig, memory_bytes: int | None) -> Memory:
    """Returns the memory of this machine, or of a machine with `memory_bytes`: the free memory of a
    CPU machine, or the total memory of a GPU, which is then assumed to be idle. Each rank has a GPU
    like the first.
    """
    if config.device_config.device != "cuda":
        return Memory(
            free_memory_bytes() if memory_bytes is None else memory_bytes, 0, RUNTIME_BYTES, False
        )
    share, size = config.cache_config.gpu_memory_utilization, num_ranks(config)
    if memory_bytes is not None:
        withheld = memory_bytes - free_of_share(memory_bytes, memory_bytes, share)
        return Memory(size * memory_bytes, size * withheld, size * CUDA_BYTES, True)
    free, total = gpu_memory_bytes()  # the CUDA context is already subtracted
    withheld = total - free_of_share(free, total, share)
    return Memory(size * total, size * withheld, 0, True)


def _estimate_step(config: EngineConfig, sizes: ModelSizes) -> int:
    """Estimates what the worker measures: the largest step, the largest step with a graph, whose
    memory is separate, and the request tables.
    """
    scheduler_config, model_config = config.scheduler_config, config.model_config
    most_tokens = resolved(scheduler_config.max_num_batched_tokens)
    most_requests = scheduler_config.max_num_seqs
    max_model_len = resolved(model_config.max_model_len)
    steps = sum(
        sizes.step_bytes(model_config.dtype, tokens, min(tokens, most_requests))
        for tokens in (most_tokens, most_requests)
    )
    row_length = max_model_len + max_model_len // config.cache_config.block_size
    return steps + most_requests * row_length * 4


def resolve(args: EngineArgs) -> EngineConfig:
    """Returns the configuration that the engine would receive.

    It reads only small files of the model. A model in the hub cache needs no network.
    """
    described: dict[str, Any] = {
        "model": str(find_description(args)),
        "tokenizer": None,
        "generation_config": "none",
        "load_format": "dummy",
    }
    return EngineArgs(**vars(args) | described).create_engine_config()


def _check_supported(config: EngineConfig, head_dim: int) -> None:
    """Raises the errors of the engine for unsupported combinations, with short messages."""
    kv_cache_dtype = config.cache_config.kv_cache_dtype
    if config.device_config.device == "cuda":
        _check_int8_heads(kv_cache_dtype, head_dim)
        return
    if not {"reshape_and_cache", "paged_attention"} <= config.device_config.kernels.keys():
        if kv_cache_dtype == "fp8":
            raise InvalidParameterError(
                "kv_cache_dtype",
                ("fp8 is supported by the NVIDIA GPU kernels only; use int8 or auto"),
            )
        _check_int8_heads(kv_cache_dtype, head_dim)
    if config.model_config.dtype == "float16":
        raise InvalidParameterError(
            "dtype", "float16 is not supported on a CPU; use bfloat16 or float32"
        )


def _check_int8_heads(kv_cache_dtype: str, head_dim: int) -> None:
    if kv_cache_dtype == "int8" and (head_dim % 16 or head_dim > 512):
        raise InvalidParameterError(
            "kv_cache_dtype",
            f"int8 needs a head_dim that is a multiple of 16 up to 512, the model has {head_dim}; "
            f"use auto",
        )


def _flags(config: EngineConfig, room: _Room, given: dict[str, Any], is_named: bool) -> list[str]:
    """Returns the flags with which the engine starts. is_named: the memory of another machine is,
    so that they give the cache's bytes. A GPU's engine measures them.
    """
    if not (longest := room.longest):
        return []
    kv_cache_bytes = room.cache_bytes if is_named else None
    flags: dict[str, Any] = {name: value for name, value in given.items() if name not in NOT_COPIED}
    if resolved(config.model_config.max_model_len) > longest:
        flags["max_model_len"] = round_down(longest) if kv_cache_bytes is None else longest
    elif "max_model_len" in given:
        flags["max_model_len"] = given["max_model_len"]
    if config.cache_config.kv_cache_memory_bytes is not None:
        flags["kv_cache_memory_bytes"] = config.cache_config.kv_cache_memory_bytes
    elif kv_cache_bytes is not None:
        # for a different machine, use the free memory that its engine would measure
        flags["kv_cache_memory_bytes"] = kv_cache_bytes
    return [word for name, value in flags.items() for word in _words(name, value)]


def round_down(length: int) -> int:
    """Rounds down, because free memory changes constantly and a value to copy needs some margin."""
    step = 1024 if length >= 8192 else 256 if length >= 1024 else 1
    return length // step * step


def _words(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [word for item in value for word in (option, str(item))]
    return [option, msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)]
