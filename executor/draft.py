"""What a rank has to draft with a model: its weights, its part of each block of the KV cache, its
program.

Must not know: requests, how drafts are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from ..ipc.config import EngineConfig, LoRAConfig, ModelConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..kernels.cpu.native.drafting import Drafting
from ..kernels.cpu.native.recorder import Limits
from ..kernels.cpu.native.replay import Program
from ..kernels.registry import OpTable
from .head_builder import HeadBuilder
from .kv_cache_memory import KVCacheMemory
from .model_builder import ModelBuilder
from .models.draft_heads import DraftHead
from .program.step_program import record_step
from .runner.bursts import Bursts
from .runner.input_batch import InputBatch
from .runner.speculation.draft_head import HeadDrafter
from .runner.speculation.draft_model import DraftModel
from .runner.speculation.draft_passes import DraftPasses
from .runner.speculation.draft_rounds import DraftRounds
from .runner.step_inputs import dummy_step

Report = Callable[[str, float], None]


class Builder(Protocol):
    weights_bytes: int
    ops: OpTable

    def build(self, report: Report) -> Any: ...


class _DraftModelBuilder(ModelBuilder):
    """Builds a draft model from the files of its configuration, or random ones."""

    def build(self, report: Report) -> Any:  # type: ignore[override]
        is_random = self.config.load_config.load_format == "dummy"
        directory = None if is_random else Path(self.config.model_config.model)
        return super().build(directory, report)


def draft_config(config: EngineConfig) -> ModelConfig | None:
    """The configuration of the model or head that drafts, if there is one."""
    wanted = config.scheduler_config.speculative_config
    return None if wanted is None else wanted.draft_model_config


class Draft:
    """`builder` has built `model()`, which verifies and whose layers have the kv_cache_windows (see
    Executor). What drafts keeps the whole context, in the blocks of the first group.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        builder: ModelBuilder,
        model: Callable[[], Any],
        batch: InputBatch,
        kv_cache_windows: tuple[int, ...],
    ):
        scheduler_config = config.scheduler_config
        method = resolved(scheduler_config.speculative_config).method
        if kv_cache_windows[0]:
            raise InvalidParameterError(
                "speculative_config",
                f"method {method} needs a model with a layer that sees the whole context; all "
                f"layers of this one have a window of {kv_cache_windows[0]}",
            )
        self._config = config = msgspec.structs.replace(
            config,
            model_config=model_config,
            lora_config=LoRAConfig(),
            scheduler_config=msgspec.structs.replace(
                scheduler_config, disable_hybrid_kv_cache_manager=True
            ),
        )
        self._model = model
        self._num_groups = len(kv_cache_windows)
        self._batch = batch
        max_num_tokens = resolved(scheduler_config.max_num_batched_tokens)
        most_held = resolved(scheduler_config.speculative_config).num_speculative_tokens + 1
        # a head computes what the model does, and what is held of each request
        self._rows = max_num_tokens + scheduler_config.max_num_seqs * most_held
        self._kv_cache = builder.kv_cache_dtype, builder.device
        isa = builder.cpu_isa
        self._builder: Builder
        max_model_len = resolved(model_config.max_model_len)
        self.drafter: DraftModel | HeadDrafter  # set by load, as the next
        self._cache: KVCacheMemory
        if method == "draft_model":
            self._builder = own = _DraftModelBuilder(config, builder.dtype, *self._kv_cache, isa)
            if own.shape.is_bidirectional:
                raise InvalidParameterError("speculative_config", "model: must generate text")
            self._make_drafter = partial(
                DraftModel, max_num_tokens=max_num_tokens, max_model_len=max_model_len
            )
        else:
            self._builder = HeadBuilder(config, method, builder, model, self._rows)
            self._make_drafter = partial(
                HeadDrafter, max_model_len=max_model_len, most_held=most_held
            )

    def load(self, report: Report) -> None:
        """Raises ModelLoadError, NotEnoughMemoryError."""
        built = self._builder.build(report)
        self._cache = KVCacheMemory(built.attention_layers(), self._config, *self._kv_cache)
        ahead = int(isinstance(built, DraftHead))
        passes = DraftPasses(built, self._builder.ops, self._batch, ahead)
        self.drafter = self._make_drafter(passes, self._batch)

    @property
    def _passes(self) -> DraftPasses:
        return self.drafter.passes

    @property
    def weights_bytes(self) -> int:
        return self._builder.weights_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of its part of one block."""
        return self._cache.block_bytes(self.attention_layers())

    def attention_layers(self) -> list[Any]:
        return self._passes.model.attention_layers()

    def host_caches(self, num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._cache.host_caches(self.attention_layers(), num_blocks)

    def allocate(self, num_blocks: int) -> None:
        """Allocates the cache, and records the program."""
        self._cache.bind(self.attention_layers(), num_blocks)
        self._record()

    def use_model(self) -> None:
        """Takes another model that verifies, before it runs: a head shares its weights. The model
        has to be recorded afterwards.
        """
        if isinstance(head := self._passes.model, DraftHead):
            head.share(self._model())
            if head.attention_layers()[0].key_cache is not None:
                self._record()

    def _record(self) -> None:
        """A program holds addresses of weights and cache."""
        passes, max_num_seqs = self._passes, self._config.scheduler_config.max_num_seqs
        limits = Limits(self._rows, max_num_seqs, max_num_seqs)
        program = record_step(passes.model, passes.ops, limits, self._num_groups)
        passes.program, passes.bursts = program, None
        if program is not None and "sample_tokens" in passes.ops.native:
            batch = self._batch
            passes.bursts = Bursts(program, batch, batch.block_size, passes.make_inputs)

    def make_rounds(self, program: Program | None) -> None:
        """program: of the model that verifies; several passes of it and of what drafts are one
        call.
        """
        drafter, passes = self.drafter, self._passes
        drafter.rounds = None
        draft, can_burst = passes.program, passes.bursts is not None
        if program is None or not isinstance(draft, Program) or not can_burst:
            return
        block_size = self._batch.block_size
        if isinstance(drafter, HeadDrafter):
            taps, state = passes.model.taps, passes.model.state
            hidden = program.hidden if taps is None else taps.state
            drafting = Drafting(program, draft, block_size, hidden, state, taps is not None)
        elif program.has_adapters or program.has_token_types:
            return
        else:
            drafting = Drafting(program, draft, block_size)
        drafter.rounds = DraftRounds(drafting, drafter, self._batch)

    def run_pass(self, num_tokens: int) -> None:
        """A pass of one-token rows without effect on the cache."""
        self._passes.run(*dummy_step(num_tokens, num_tokens, self._num_groups))

    def release_cache(self) -> None:
        for layer in self.attention_layers():
            layer.key_cache = layer.value_cache = None
        self.make_rounds(None)
        self._passes.program = self._passes.bursts = None

    def release_weights(self) -> None:
        self.make_rounds(None)
        self._passes.model = self._passes.program = self._passes.bursts = None

    def reload(self, report: Report) -> None:
        """Takes the weights again; the cache is allocated afterwards."""
        self._passes.model = self._builder.build(report)
