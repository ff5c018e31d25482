"""One rank: loads its model, sizes and owns its part of the KV cache, runs steps.
May know: the configuration, the device, the loader, the runner.
Must not know: other ranks, requests, how steps reach it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError, ModelLoadError
from ..ipc.messages import ModelRunnerOutput, SchedulerOutput
from ..kernels import registry
from . import device as devices
from .grammar import Grammars
from .input_batch import InputBatch
from .layers import LayerFactory
from .loader import fill_with_random_weights, load_weights
from .logits_processors import load_logits_processors
from .model_runner import ModelRunner
from .models import find_model_class
from .token_stages import make_stages

logger = logging.getLogger(__name__)

CPU_MEMORY_FRACTION = 0.4  # of what is free once the weights are loaded; the rest is for activations and for other programs
PLUGINS = "quire.plugins"  # entry points of installed packages: modules that register kernels or models when they are imported


def load_plugins() -> None:
    """Imports what other packages bring, wherever the engine runs: a child process sees nothing of what its parent has imported.

    Raises ModelLoadError naming the entry point that fails: a model must not run on other kernels than its owner installed.
    """
    for plugin in entry_points(group=PLUGINS):
        try:
            plugin.load()
        except Exception as error:
            raise ModelLoadError(f"the plugin {plugin.name} = {plugin.value} cannot be loaded: {type(error).__name__}: {error}") from error


class Worker:
    """Created, then load_model, determine_num_blocks, initialize_kv_cache; then execute_model as often as one likes."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.device = devices.select_device(config.device_config.device)
        self.dtype = devices.select_dtype(config.model_config.dtype, self.device)
        self.num_threads = devices.set_num_threads(config.device_config.num_threads)
        self.model: Any = None
        self.runner: ModelRunner | None = None
        self.grammars: Grammars | None = None

    def load_model(self, report: Callable[[str, float], None]) -> None:
        """Builds the model and fills its weights. Raises ModelLoadError, InvalidParameterError (an unknown kernel or processor)."""
        model_config, scheduler_config = self.config.model_config, self.config.scheduler_config
        block_size = self.config.cache_config.block_size
        load_plugins()
        processors = load_logits_processors(model_config.logits_processors)
        model_class = find_model_class(model_config.hf_config)
        shape = model_class.parse_config(model_config.hf_config)
        sizes = {"head_dim": shape.head_dim, "num_heads": shape.num_attention_heads, "num_kv_heads": shape.num_key_value_heads}
        ops = registry.select(self.device, self.dtype, self.config.device_config.kernels, block_size=block_size, **sizes)
        make = LayerFactory(ops, self.dtype, self.device)
        self.model = model_class(shape, make, model_config.max_model_len)
        if self.config.load_config.load_format == "dummy":
            fill_with_random_weights(self.model, model_config.seed, report)
        else:
            load_weights(self.model, Path(model_config.model), report)
        make.finish()
        max_num_seqs, max_model_len = scheduler_config.max_num_seqs, model_config.max_model_len
        self.grammars = Grammars(self.config, ops, shape.vocab_size)
        stages = make_stages(ops, shape.vocab_size, max_num_seqs, max_model_len, processors, self.grammars)
        batch = InputBatch(max_num_seqs, max_model_len, block_size, stages)
        self.runner = ModelRunner(self.model, ops, batch, block_size, self.device, self.grammars)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of block_size tokens in every layer."""
        per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.model.attention_layers()) * self.dtype.itemsize
        return per_token * self.config.cache_config.block_size

    def determine_num_blocks(self) -> int:
        """How many KV-cache blocks to make, the null block included. Raises InvalidParameterError when one full sequence would not fit."""
        return plan_num_blocks(self.config, self.block_bytes, devices.free_memory_bytes())

    def initialize_kv_cache(self, num_blocks: int) -> int:
        """Allocates the cache, gives each layer its part, runs the model once, and returns the cache's size in bytes."""
        block_size = self.config.cache_config.block_size
        for layer in self.model.attention_layers():
            shape = (2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
            layer.key_cache, layer.value_cache = devices.zeros(shape, self.dtype, self.device)
        self.execute_dummy_batch()  # what operations set up in their first call, no request shall wait for; and a broken one shows now
        num_bytes = num_blocks * self.block_bytes
        logger.info("KV cache: %d blocks of %d tokens, %.1f MiB", num_blocks, block_size, num_bytes / 2**20)
        return num_bytes

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        self.runner.execute_dummy_batch()

    def shutdown(self) -> None:
        """Lets go of model and cache. May be called twice."""
        if self.grammars is not None:
            self.grammars.shutdown()
        self.model = self.runner = self.grammars = None


def plan_num_blocks(config: EngineConfig, block_bytes: int, free_bytes: int) -> int:
    """KV-cache blocks, the null block included: num_gpu_blocks_override, or what fits kv_cache_memory_bytes, or else the smaller of what
    max_num_seqs sequences of max_model_len need and what fits CPU_MEMORY_FRACTION of `free_bytes`.

    Raises InvalidParameterError when a sequence of max_model_len would not fit: with no other left to preempt, it could never end.
    """
    cache_config, max_model_len = config.cache_config, config.model_config.max_model_len
    blocks_per_sequence = -(-max_model_len // cache_config.block_size)
    wanted = 1 + blocks_per_sequence * config.scheduler_config.max_num_seqs
    if cache_config.num_gpu_blocks_override is not None:
        num_blocks, origin = cache_config.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif cache_config.kv_cache_memory_bytes is not None:
        num_blocks, origin = cache_config.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
    else:
        num_blocks, origin = min(wanted, int(free_bytes * CPU_MEMORY_FRACTION) // block_bytes), "kv_cache_memory_bytes"
    needed = 1 + blocks_per_sequence
    if num_blocks < needed:
        fitting = max(0, num_blocks - 1) * cache_config.block_size
        or_shorter = f", or lower max_model_len to at most {fitting}" if fitting else ""
        raise InvalidParameterError(
            origin,
            f"one sequence of max_model_len={max_model_len} tokens needs {needed} KV-cache blocks ({needed * block_bytes} bytes), "
            f"there is room for {num_blocks} ({num_blocks * block_bytes} bytes), that is {fitting} tokens; "
            f"give more memory through kv_cache_memory_bytes{or_shorter}",
        )
    return num_blocks
