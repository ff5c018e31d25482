"""The draft model of a rank: its weights, its part of each block of the KV cache, its program.

Must not know: requests, how drafts are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..ipc.config import EngineConfig, LoRAConfig, ModelConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..kernels.cpu.native.recorder import Limits
from .kv_cache_memory import KVCacheMemory
from .model_builder import ModelBuilder
from .program.step_program import record_step
from .runner.bursts import Bursts
from .runner.draft_model import DraftModel
from .runner.input_batch import InputBatch
from .runner.step_inputs import dummy_step


def draft_config(config: EngineConfig) -> ModelConfig | None:
    """The configuration of the engine's draft model, if it has one."""
    wanted = config.scheduler_config.speculative_config
    return None if wanted is None else wanted.draft_model_config


class Draft:
    """`kv_cache_windows`: of the model that verifies (see Executor). The draft model's layers keep
    the whole context, in the blocks of the first group.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        builder: ModelBuilder,
        batch: InputBatch,
        kv_cache_windows: tuple[int, ...],
        cpu_isa: str,
    ):
        if kv_cache_windows[0]:
            raise InvalidParameterError(
                "speculative_config",
                "method draft_model needs a model with a layer that sees the whole context; all "
                f"layers of this one have a window of {kv_cache_windows[0]}",
            )
        self._config = msgspec.structs.replace(
            config,
            model_config=model_config,
            lora_config=LoRAConfig(),
            scheduler_config=msgspec.structs.replace(
                config.scheduler_config, disable_hybrid_kv_cache_manager=True
            ),
        )
        self._builder = ModelBuilder(
            self._config, builder.dtype, builder.kv_cache_dtype, builder.device, cpu_isa
        )
        if self._builder.shape.is_bidirectional:
            raise InvalidParameterError("speculative_config", "model: must generate text")
        self._num_groups = len(kv_cache_windows)
        self._max_num_tokens = resolved(config.scheduler_config.max_num_batched_tokens)
        self._batch = batch
        self._cache: KVCacheMemory  # set by load, as the next
        self.drafter: DraftModel

    def load(self, report: Callable[[str, float], None]) -> None:
        """Raises ModelLoadError, NotEnoughMemoryError."""
        model = self._build(report)
        layers = model.attention_layers()
        builder = self._builder
        self._cache = KVCacheMemory(layers, self._config, builder.kv_cache_dtype, builder.device)
        max_model_len = resolved(self._config.model_config.max_model_len)
        sizes = self._max_num_tokens, max_model_len
        self.drafter = DraftModel(model, builder.ops, self._batch, *sizes)

    def _build(self, report: Callable[[str, float], None]) -> Any:
        is_random = self._config.load_config.load_format == "dummy"
        directory = None if is_random else Path(self._config.model_config.model)
        return self._builder.build(directory, report)

    @property
    def weights_bytes(self) -> int:
        return self._builder.weights_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of the draft model's part of one block."""
        return self._cache.block_bytes(self.attention_layers())

    def attention_layers(self) -> list[Any]:
        return self.drafter.model.attention_layers()

    def host_caches(self, num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._cache.host_caches(self.attention_layers(), num_blocks)

    def allocate(self, num_blocks: int) -> None:
        """Allocates the cache and records the program, which holds its addresses."""
        self._cache.bind(self.attention_layers(), num_blocks)
        drafter, scheduler_config = self.drafter, self._config.scheduler_config
        limits = Limits(
            max(self._max_num_tokens, scheduler_config.max_num_seqs),
            scheduler_config.max_num_seqs,
            scheduler_config.max_num_seqs,
        )
        program = record_step(drafter.model, drafter.ops, limits, self._num_groups)
        drafter.program, drafter.bursts = program, None
        if program is not None and "sample_tokens" in drafter.ops.native:
            batch = self._batch
            drafter.bursts = Bursts(program, batch, batch.block_size, drafter.make_inputs)

    def run_pass(self, num_tokens: int) -> None:
        """A pass of one-token rows without effect on the cache."""
        self.drafter.run(*dummy_step(num_tokens, num_tokens, self._num_groups))

    def release_cache(self) -> None:
        for layer in self.attention_layers():
            layer.key_cache = layer.value_cache = None
        self.drafter.program = self.drafter.bursts = None

    def release_weights(self) -> None:
        self.drafter.model = self.drafter.program = self.drafter.bursts = None

    def reload(self, report: Callable[[str, float], None]) -> None:
        """Takes the weights again; the cache is allocated afterwards."""
        self.drafter.model = self._build(report)
