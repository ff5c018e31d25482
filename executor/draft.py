"""What a rank needs to draft with a model or heads: the weights, a part of each block of the KV
cache, and the programs.

Must not know: requests, how drafts are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from ..ipc.config import EngineConfig, LoRAConfig, ModelConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..ipc.models.draft_heads import head_rows
from ..kernels.cpu.native.recorder import Limits
from ..kernels.registry import OpTable
from .head_builder import HeadBuilder
from .kv_cache_memory import KVCacheMemory, release_caches
from .model import Forward, Model
from .model_builder import ModelBuilder
from .models.draft_heads import DraftHead
from .program.step_program import record_step
from .runner.assembly import RunnerState, no_buffers
from .runner.cuda_graphs import Capture, GraphedStep
from .runner.device_inputs import DeviceInputMaker
from .runner.image_table import ImageTable
from .runner.padded_graphs import make_graphs
from .runner.speculation.draft_head import HeadDrafter
from .runner.speculation.draft_model import DraftModel
from .runner.speculation.draft_passes import DraftPasses
from .runner.step_inputs import StepInputMaker, dummy_step

Report = Callable[[str, float], None]


class Builder(Protocol):
    weights_bytes: int
    ops: OpTable

    def build(self, report: Report) -> list[Any]: ...  # models, of which heads may form a chain


class _DraftModelBuilder(ModelBuilder):
    """Builds a draft model from the files of its configuration, or random ones."""

    def build(self, report: Report) -> list[Any]:  # type: ignore[override]
        is_random = self.config.load_config.load_format == "dummy"
        directory = None if is_random else Path(self.config.model_config.model)
        return [super().build(directory, report)]


def draft_config(config: EngineConfig) -> ModelConfig | None:
    """The configuration of the model or head that drafts, if there is one."""
    wanted = config.scheduler_config.speculative_config
    return None if wanted is None else wanted.draft_model_config


def use_taps(
    config: EngineConfig,
    model_config: ModelConfig,
    builder: ModelBuilder,
    model: Model,
    report: Report,
) -> None:
    """In a stage before the last one, where a head drafts: makes the passes of `model` show the
    head what it reads of their layers. Raises as Draft does.
    """
    if config.scheduler_config.has_draft_head:
        method = resolved(config.scheduler_config.speculative_config).method
        config = msgspec.structs.replace(config, model_config=model_config)
        model.use_taps(HeadBuilder(config, method, builder, model).build_taps(report))


class Draft:
    """A model that drafts, or heads. The constructor builds it without a cache. `builder` has built
    `model`, which verifies and whose layers have the kv_cache_windows (see Executor). What drafts
    keeps the whole context, in the blocks of the first group. `capture`: makes what captures the
    graphs that passes on a GPU are replayed from; None: there are none.

    Raises ModelLoadError, InvalidParameterError, NotEnoughMemoryError.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        builder: ModelBuilder,
        model: Model,
        state: RunnerState,
        kv_cache_windows: tuple[int, ...],
        report: Report,
        capture: Callable[[], Capture] | None = None,
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
        self._num_groups = len(kv_cache_windows)
        self._state, self._device, self._capture = state, builder.device, capture
        self._group = builder.group
        max_num_tokens = resolved(scheduler_config.max_num_batched_tokens)
        most_held = resolved(scheduler_config.speculative_config).num_speculative_tokens + 1
        kv_cache = builder.kv_cache_dtype, builder.device
        isa = builder.cpu_isa
        self._builder: Builder
        max_model_len = resolved(model_config.max_model_len)
        if method == "draft_model":
            self._builder = own = _DraftModelBuilder(config, builder.dtype, *kv_cache, isa)
            layers = map(own.shape.layer, range(own.shape.num_hidden_layers))
            if any(layer.mixer is not None for layer in layers):
                problem = "model: must have no layers that keep states"
                raise InvalidParameterError("speculative_config", problem)
            if own.shape.is_bidirectional:
                raise InvalidParameterError("speculative_config", "model: must generate text")
            self._drafter_of = partial(
                DraftModel, max_num_tokens=max_num_tokens, max_model_len=max_model_len
            )
        else:
            self._builder = HeadBuilder(config, method, builder, model)
            self._drafter_of = partial(
                HeadDrafter, max_model_len=max_model_len, most_held=most_held
            )
        self._built: Sequence[Model] = self._builder.build(report)
        self._rows = head_rows(scheduler_config, len(self._built))
        for head in self._heads():
            head.share(model)
        self._cache = KVCacheMemory(self.attention_layers(), config, *kv_cache)
        self.drafter = self._make_drafter([None] * len(self._built))  # made anew with the programs

    def _heads(self) -> list[DraftHead]:
        return [built for built in self._built if isinstance(built, DraftHead)]

    def _make_drafter(self, forwards: Sequence[Forward | None]) -> DraftModel | HeadDrafter:
        """forwards: how a pass of each model runs; None: operation by operation."""
        ops, batch, first = self._builder.ops, self._state.batch, len(self._heads()) and 1
        passes = []
        for depth, (built, forward) in enumerate(zip(self._built, forwards)):
            ahead = first + depth
            # a model that drafts reads the text alone
            images = None if built.images is None else self._state.images
            make_inputs = self._make_inputs(ahead, forward, images)
            passes.append(DraftPasses(built, ops, batch, make_inputs, ahead, forward, images))
        return self._drafter_of(passes, batch)

    def _make_inputs(
        self, ahead: int, forward: Forward | None, images: ImageTable | None
    ) -> StepInputMaker | DeviceInputMaker:
        tables, block_size = self._state.tables, self._state.batch.block_size
        if tables is None:
            batch = self._state.batch
            return StepInputMaker(batch, block_size, tokens_ahead=ahead, images=images)
        buffers = forward.buffers if isinstance(forward, GraphedStep) else no_buffers
        parts = tables, block_size, self._builder.ops, buffers
        return DeviceInputMaker(*parts, images=images, tokens_ahead=ahead)

    @property
    def weights_bytes(self) -> int:
        return self._builder.weights_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of what drafts in one block."""
        return self._cache.block_bytes(self.attention_layers())

    def attention_layers(self) -> list[Any]:
        return [layer for built in self._built for layer in built.attention_layers()]

    def host_caches(self, num_blocks: int) -> list[torch.Tensor]:
        return self._cache.host_caches(self.attention_layers(), num_blocks)

    def allocate(self, num_blocks: int) -> None:
        """Allocates the cache and records the programs."""
        self._cache.bind(self.attention_layers(), num_blocks)
        self._record()

    def use_model(self, model: Model) -> None:
        """Takes another model of the same class as the one that verifies, before it runs: a head
        shares its weights. The caller has to record the model afterwards.
        """
        for head in self._heads():
            head.share(model)
        if self._heads() and self.attention_layers()[0].key_cache is not None:
            self._record()

    def _record(self) -> None:
        """Records the programs or graphs, which hold the addresses of weights and cache."""
        if self._device.type == "cpu" and self._heads() and not self._group.can_record:
            return  # heads compute with the model's embedding and head, operation by operation
        # one for all heads of a chain, since the next runs when what one gave has been used
        capture = None if self._capture is None else self._capture()
        forwards = [self._make_forward(built, capture) for built in self._built]
        self.drafter = self._make_drafter(forwards)

    def _make_forward(self, built: Model, capture: Capture | None) -> Forward | None:
        max_num_seqs = self._config.scheduler_config.max_num_seqs
        ops, groups = self._builder.ops, self._num_groups
        if self._device.type == "cpu":
            limits = Limits(self._rows, max_num_seqs, max_num_seqs)
            return record_step(built, ops, limits, groups, self._group.all_agree)
        if capture is None or built.UNRECORDABLE:
            return None
        longest = resolved(self._config.model_config.max_model_len)
        sizes = max_num_seqs, self._rows, max_num_seqs, longest
        block_size = self._config.cache_config.block_size
        return make_graphs(built, ops, *sizes, block_size, self._device, capture, groups)

    def run_pass(self, num_tokens: int, num_logits: int | None = None) -> None:
        """Runs a pass of one-token rows, of the first model, that has no effect on the cache.
        num_logits: None: of all tokens.
        """
        num_logits = num_tokens if num_logits is None else num_logits
        has_images = self.drafter.passes.model.images is not None
        sizes = num_tokens, num_logits, self._num_groups, self._device
        step = dummy_step(*sizes, has_images=has_images)
        with torch.inference_mode():
            self.drafter.passes.run(*step)

    def release_cache(self) -> None:
        """Frees the cache. No drafts follow until `allocate`."""
        release_caches(self.attention_layers())
        self.drafter = self._make_drafter([None] * len(self._built))
