"""One rank, which owns its model and its part of the KV cache. A rank that is alone is the executor
of an engine in its own process.

Must not know: other ranks, requests, the scheduler, how a step is run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..ipc.config import EngineConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..ipc.kv_transfer import KVShare
from ..ipc.lora import LoRARequest
from ..ipc.machine import resident_bytes
from ..ipc.models.decoder_config import DecoderConfig
from ..ipc.models.encoder_memory import has_encoder, table_bytes
from ..ipc.models.kv_layout import LayerGroups, plan_groups_of_stage
from ..ipc.models.memory_plan import (
    check_cache_size,
    plan_num_blocks,
    plan_num_host_blocks,
    plan_states,
)
from ..ipc.models.ranks import num_readers, stages_of
from ..ipc.params import StructuredOutputsParams
from ..ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from ..ipc.trace import RanksTrace, place_of_function
from ..kernels.cpu.native.recorder import Limits
from ..kernels.cpu.native.replay import Program
from ..kernels.cpu.native.weights import early_memory
from ..kernels.registry import OpTable
from . import device as devices
from .device import CopyToHost, SecondStream
from .draft import Draft, draft_config, use_taps
from .groups.expert_group import make_expert_group
from .groups.tensor_group import ALONE, TensorGroup
from .input_batch import InputBatch
from .kv_cache_memory import KVCacheMemory, move_caches, release_caches
from .loras import Loras
from .model import AttentionLayer, Forward, Model, expert_load
from .model_builder import ModelBuilder
from .offload.block_memory import STAGED_BLOCKS, BlockMemory, DeviceMemory, HostMemory
from .offload.block_store import BlockStore
from .offload.kv_offload import KVOffload, identity_of, open_store
from .plugins import load_plugins, naming_plugins
from .pooling.dense import load_dense
from .pooling.heads import PoolingHead
from .pooling.pooler import Pooler
from .preemption_costs import measure_recompute, shortest_time
from .program.narrowed import Sections, record_sections
from .program.step_program import record_step
from .runner.assembly import RunnerState, assemble, on_device
from .runner.block_mover import BlockMover, caches_of
from .runner.cuda_graphs import Capture, CudaCapture, GraphedStep
from .runner.image_table import ImageTable
from .runner.launched_steps import HostStep, PendingStep
from .runner.model_runner import ModelRunner
from .runner.padded_graphs import MOST_TOKENS, make_graphs
from .runner.speculation.draft_depth import DraftDepth
from .runner.speculation.drafters import LookupDrafter
from .runner.speculation.pass_costs import (
    PassTimes,
    cpu_clock,
    cpu_step_clock,
    gpu_clock,
    max_num_logits,
    measure_passes,
)
from .runner.speculation.staged import KeptDrafts
from .runner.speculation.verification import (
    make_depth,
    make_lookup,
    make_speculation,
)
from .runner.stage_step import PendingTokens
from .runner.state_table import StateTable
from .sampling.grammar import Grammars
from .sampling.logits_processors import LoadedProcessor, load_logits_processors
from .sampling.token_stages import make_stages
from .state_memory import StateMemory
from .tracing.measured_limits import measured_limits
from .tracing.step_tracer import StepTracer
from .weights.early_memory import take as take_early_memory

logger = logging.getLogger(__name__)


class Worker:
    """Implements Executor and SharingExecutor (executor/executor.py) for one rank.

    Runs steps after load_model, determine_num_blocks, initialize_kv_cache and
    initialize_swap_space. Between two steps it can sleep, wake up or take other weights; the
    scheduler has dropped all KV entries by then. Each of these makes a new ModelRunner.
    """

    # collective_rpc may call these: some change nothing, the others change what is in memory
    CALLABLE = frozenset(
        {"check_health", "execute_dummy_batch", "expert_load", "memory_usage"}
        | {"load_weights", "sleep", "wake_up"}
    )

    def __init__(self, config: EngineConfig, group: TensorGroup = ALONE):
        """`config` is resolved. The ranks of `group` have the other parts of the layers, and make
        the same calls.

        Raises InvalidParameterError for what one rank on this device cannot do.
        """
        if group is ALONE:
            _refuse_ranks(config)
        self.config, self.group = config, group
        self.expert_group = make_expert_group(config, group.place[0])
        self.device = devices.select_device(config.device_config.device)
        self.dtype = devices.select_dtype(config.model_config.dtype, self.device)
        self.kv_cache_dtype = devices.select_kv_cache_dtype(
            config.cache_config.kv_cache_dtype, self.dtype, self.device
        )
        self.num_threads = devices.set_num_threads(config.device_config.num_threads)
        self.cpu_isa = devices.select_cpu_isa(config.device_config.cpu_isa)
        logger.info("%d threads, native kernels: %s", self.num_threads, self.cpu_isa)
        self.loras = Loras(config.lora_config, self.dtype)
        self.asleep: set[str] = set()  # of "weights" and "kv_cache": what is not in memory
        self.tracer: StepTracer | None = None  # while steps are traced
        self._stopped_tracer: StepTracer | None = None  # by another runner: its steps are known
        self.offload: KVOffload | None = None
        self._kept_shapes: tuple[int, list[Any]] = (0, [])  # see _shapes_of_store
        self._thread: ThreadPoolExecutor | None = None  # created by the first overlapped step
        # None: there is no model, as before it is loaded and while the weights sleep
        self._model: Model | None = None
        self._runner: ModelRunner | None = None
        # whether a pass is one of all engines; a stage may have no layers of experts
        self._shares_passes = False
        self._builder: ModelBuilder
        self._directory: Path | None = None  # source of the current weights; None: random ones
        self._dense = PoolingHead([])  # of sentence-transformers' Dense modules
        self._state: RunnerState | None = None  # set with the model, and kept while it sleeps
        self._cache: KVCacheMemory
        self._states: StateMemory | None = None  # of a model that keeps any
        # how many requests have room for their states, and how many checkpoints
        self._num_states = self._num_checkpoints = 0
        self._num_blocks = self._cache_bytes = self._num_host_blocks = 0
        # the parts of the runner besides the model; each is None until there is a cache
        self._forward: Forward | None = None
        self._sections: Sections | None = None
        self._mover: BlockMover | None = None
        # These belong to an engine that drafts. `_draft` is the model or head, if it drafts with
        # one, and is None while the weights sleep. `_lookup` drafts without a model. `_depth`
        # knows how many drafts were accepted.
        self._draft: Draft | None = None
        self._lookup: LookupDrafter | None = None
        self._depth: DraftDepth | None = None

    # ------------------------------------------------------------ start

    def load_model(self, report: Callable[[str, float], None]) -> None:
        """Builds the model, fills its weights and calls report(stage, fraction) as it goes.

        Raises ModelLoadError, InvalidParameterError (an unknown kernel or processor).
        """
        with naming_plugins():
            self._load_model(report)

    def _load_model(self, report: Callable[[str, float], None]) -> None:
        model_config = self.config.model_config
        load_plugins()
        processors = load_logits_processors(model_config.logits_processors)
        groups = self.group, self.expert_group
        self._builder = builder = ModelBuilder(
            self.config, self.dtype, self.kv_cache_dtype, self.device, self.cpu_isa, *groups
        )
        if self.config.load_config.load_format != "dummy":
            self._directory = Path(model_config.model)
        with early_memory(take_early_memory()):
            model = builder.build(self._directory, report)
        layers = model.attention_layers()
        groups = self._groups_of_stage() if self.group.stages.count > 1 else None
        self._cache = KVCacheMemory(layers, self.config, self.kv_cache_dtype, self.device, groups)
        if state_layers := model.state_layers():
            self._states = StateMemory(state_layers, self.dtype, self.device)
        self._state = self._make_state(processors)
        if model_config.pooling is not None:
            self._dense = load_dense(model_config.pooling.dense, self._directory)
        self._use_model(model)
        self._draft = self._make_draft(report)
        if self.group.stages.is_last:
            self._lookup = make_lookup(self.config.scheduler_config, self.state.batch)
        self._assemble()
        if (launched := self.runner.launched) is not None:
            launched.launcher.warm_up()

    def _groups_of_stage(self) -> LayerGroups:
        """How the layers of a stage share blocks, of which all stages have the same tables."""
        shape, stages = self._builder.shape, self.group.stages
        assert isinstance(shape, DecoderConfig)  # check_ranks
        layers = stages_of(shape, stages.count, num_readers(self.config.model_config))
        return plan_groups_of_stage(self.config, shape, layers, stages.stage)

    def _make_draft(self, report: Callable[[str, float], None]) -> Draft | None:
        """The model or head that drafts, if there is one; in the last stage, where tokens are."""
        model_config = draft_config(self.config)
        if model_config is None:
            return None
        if not self.group.stages.is_last:
            use_taps(self.config, model_config, self._builder, self.model, report)
            return None
        tables = self.state, self.kv_cache_windows
        has_graphs = self.device.type == "cuda" and not self.config.device_config.enforce_eager
        capture = CudaCapture if has_graphs else None
        parts = self.config, model_config, self._builder, self.model, *tables, report
        return Draft(*parts, capture)

    def _make_state(self, processors: Sequence[LoadedProcessor]) -> RunnerState:
        """The tables of requests, and what belongs to their slots."""
        scheduler_config, ops = self.config.scheduler_config, self.ops
        vocab_size = self._builder.shape.vocab_size
        sizes = scheduler_config.max_num_seqs, resolved(self.config.model_config.max_model_len)
        grammars = Grammars(self.config, ops, vocab_size)
        batch = InputBatch(
            *sizes,
            self.config.cache_config.block_size,
            make_stages(ops, vocab_size, *sizes, processors, grammars),
            self.kv_cache_windows,
            self.loras if self.loras.is_enabled else None,
        )
        states = None if self._states is None else StateTable(sizes[0])
        images, vision = None, self.config.model_config.vision
        if vision is not None:
            images = ImageTable(bool(vision.mrope_section), vision.sees_whole_images)
        kept = None
        if self.group.stages.count > 1 and scheduler_config.speculative_config is not None:
            num_tokens = resolved(scheduler_config.max_num_batched_tokens)
            kept = KeptDrafts(batch, num_tokens, max_num_logits(scheduler_config))
        pending = None if self.group.stages.is_last else PendingTokens(batch, kept=kept)
        tables = {"pending": pending, "states": states, "images": images, "kept": kept}
        state = RunnerState(batch, self.device, grammars, **tables)
        copy_to_host = self._copy_to_host()
        return state if copy_to_host is None else on_device(state, ops, copy_to_host)

    def _copy_to_host(self) -> CopyToHost | None:
        """How tokens come from a device that keeps the tables; None on a CPU."""
        return None if self.device.type == "cpu" else SecondStream(self.device)

    def _use_model(self, model: Model) -> None:
        self._model = model
        self._shares_passes = self.expert_group.size > 1 and bool(model.routed_tokens())
        if self.loras.is_enabled:
            self.loras.use_model(model)

    def _assemble(self) -> None:
        """Makes the runner from all that is in memory now."""
        pooling, model, pooler = self.config.model_config.pooling, self.model, None
        if pooling is not None:
            pooler = Pooler(pooling, self._dense, model.head)
        speculation = None
        if (drafter := self._lookup if self._draft is None else self._draft.drafter) is not None:
            speculation = make_speculation(
                self.config.scheduler_config,
                self.state.batch,
                drafter,
                self._depth,
                has_states=self._states is not None,
            )
        self._runner = assemble(
            self.state,
            model,
            self.ops,
            self._forward,
            self._mover,
            speculation,
            pooler,
            self._states,
            self.group.stages.count > 1,
            self._sections,
        )

    @property
    def model(self) -> Model:
        """The model. Raises RuntimeError while there is none."""
        if self._model is None:
            self.check_health()
        assert self._model is not None
        return self._model

    @property
    def runner(self) -> ModelRunner:
        """What runs steps. Raises RuntimeError while there is none."""
        if self._runner is None:
            self.check_health()
        assert self._runner is not None
        return self._runner

    @property
    def state(self) -> RunnerState:
        """The tables of requests, which exist once a model is loaded."""
        assert self._state is not None
        return self._state

    @property
    def ops(self) -> OpTable:
        """The operations that the model uses."""
        return self._builder.ops

    @property
    def kv_cache_windows(self) -> tuple[int, ...]:
        """See Executor."""
        return self._cache.groups.windows

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache."""
        num_bytes = self._cache.block_bytes(self.model.attention_layers())
        return num_bytes if self._draft is None else num_bytes + self._draft.block_bytes

    def attention_layers(self) -> list[AttentionLayer]:
        """All layers that have a part of each block of the KV cache, also those of what drafts."""
        layers = self.model.attention_layers()
        return layers if self._draft is None else [*layers, *self._draft.attention_layers()]

    @property
    def max_num_seqs(self) -> int:
        """See Executor."""
        return (
            self.config.scheduler_config.max_num_seqs if self._states is None else self._num_states
        )

    @property
    def num_state_checkpoints(self) -> int | None:
        """See Executor."""
        return None if self._states is None else self._num_checkpoints

    def determine_num_blocks(self) -> int:
        """Returns how many KV-cache blocks to allocate, including the null block, or how many there
        are.

        Raises NotEnoughMemoryError if one full sequence does not fit, and for more blocks than
        memory holds.
        """
        if self._num_blocks:
            return self._num_blocks
        block_bytes, num_sharing = self.block_bytes, self.group.num_on_machine
        free_bytes = self._free_for_cache()
        if self._states is not None:
            place_bytes = self._states.place_bytes
            counts = plan_states(self.config, place_bytes, free_bytes)
            self._num_states, self._num_checkpoints = counts
            if self.device.type != "cpu":  # a CPU's pages are taken when they are written
                most = self.config.scheduler_config.max_num_seqs
                if self._num_states < most:
                    problem = f"must be at most {self._num_states}: the states of {most} requests"
                    raise InvalidParameterError("max_num_seqs", f"{problem} do not fit the memory")
                free_bytes -= sum(counts) * place_bytes
        num_blocks = plan_num_blocks(self.config, block_bytes, free_bytes, self.kv_cache_windows)
        if self.device.type == "cpu":
            num_sharing *= self.config.device_config.data_parallel_size
            free, total = devices.free_bytes(self.device), devices.total_bytes(self.device)
        else:  # each rank has a GPU of its own, whose memory is taken at once
            num_sharing = 1
            free = total = devices.free_share_bytes(self.device, 1.0)
        num_bytes = num_sharing * num_blocks * block_bytes
        if warning := check_cache_size(self.config.cache_config, num_bytes, free, total):
            logger.warning(warning)
        return num_blocks

    def _free_for_cache(self) -> int:
        """The bytes that the cache may take. On a CPU this is the free memory, which steps and
        other programs share; on a GPU it is what the largest step and its graphs leave.
        """
        if self.device.type == "cpu":
            free = devices.free_host_bytes(has_standby=self.config.service_config.standby)
            # pages of the table of images are taken when they are written
            free //= self.group.num_on_machine
            has_table = has_encoder(self.config, self.group.stages.stage)
            return free - has_table * table_bytes(self.config, self.dtype.itemsize)
        scheduler_config = self.config.scheduler_config
        self._cache.bind(self.model.attention_layers(), 1)
        if self._states is not None:
            self._states.allocate(self.model.state_layers(), 1)
        if self._draft is not None:
            self._draft.allocate(1)
        num_bytes = devices.free_share_bytes(
            self.device, self.config.cache_config.gpu_memory_utilization
        )
        # A step takes it once, and graphs, which have a memory pool of their own, take it again.
        # They do not sample, which leaves room for the results that they keep.
        max_num_tokens = resolved(scheduler_config.max_num_batched_tokens)
        most_padded = max(scheduler_config.max_num_seqs, min(MOST_TOKENS, max_num_tokens))
        before_bytes = self._peak_of_encoder()  # freed before the step takes its own
        for num_tokens in (max_num_tokens, most_padded):
            num_logits = min(num_tokens, max_num_logits(scheduler_config))
            step_bytes = devices.peak_bytes(
                self.device,
                partial(self.runner.execute_dummy_batch, num_tokens, num_logits, is_sampled=True),
            )
            num_bytes -= max(step_bytes, before_bytes)
            before_bytes = 0
            if self._draft is not None:
                num_logits = min(num_tokens, scheduler_config.max_num_seqs)
                num_bytes -= devices.peak_bytes(
                    self.device, partial(self._draft.run_pass, num_tokens, num_logits)
                )
        return num_bytes

    def _peak_of_encoder(self) -> int:
        """The memory of a GPU that encoding an image takes at most."""
        if self.model.encoder is None:
            return 0
        most_rows = self.config.multimodal_config.max_encoder_tokens
        return devices.peak_bytes(
            self.device, partial(self.model.encoder.encode_largest, most_rows)
        )

    def initialize_kv_cache(self, num_blocks: int) -> int:
        """Allocates the cache, binds it to the layers, runs the model once, and returns the cache's
        size in bytes.
        """
        with naming_plugins():
            self._make_cache(num_blocks)
        logger.info(
            "KV cache: %d blocks of %d tokens, %.1f MiB",
            num_blocks,
            self.config.cache_config.block_size,
            self._cache_bytes / 2**20,
        )
        return self._cache_bytes

    def _make_cache(self, num_blocks: int) -> None:
        self._cache.bind(self.model.attention_layers(), num_blocks)
        if self._states is not None:
            num_places = self.config.scheduler_config.max_num_seqs + self._num_checkpoints
            self._states.allocate(self.model.state_layers(), num_places)
        if self._draft is not None:
            self._draft.allocate(num_blocks)
        self._num_blocks, self._cache_bytes = num_blocks, num_blocks * self.block_bytes
        self.state.batch.use_cache(num_blocks)
        self._forward = self._make_forward()
        self._sections = self._make_sections()
        self._mover = self._make_block_mover()
        self._assemble()
        # the first call of an operation may set things up, which must not delay a request; and a
        # broken operation fails here
        self.runner.execute_dummy_batch()
        # otherwise it has slept, and its costs are known, or all ranks measure together
        if self._depth is None and self.group.num_ranks == 1:
            if (times := self._measure_passes()) is not None:
                self.use_pass_times(*times)

    def _measure_passes(self) -> PassTimes | None:
        """What passes cost; None of an engine that doesn't ask."""

        def verify(num_tokens: int) -> None:
            # rows without logits: no graph of decodes has such a pass, and none that verifies
            self.run_pass(num_tokens, max(1, num_tokens - 1))

        is_on_cpu = self.device.type == "cpu"
        return measure_passes(
            self.config.scheduler_config,
            lambda num_tokens: self.run_pass(num_tokens, num_tokens),
            self.run_draft_pass,
            cpu_clock(self.num_threads) if is_on_cpu else gpu_clock,
            None if is_on_cpu else verify,
        )

    def _make_forward(self) -> Forward | None:
        """Makes what runs the model; None: operation by operation. Call it again when weights or
        cache have moved, since programs and graphs hold their addresses.
        """
        config, stages = self.config, self.group.stages
        if stages.count > 1:
            most = resolved(config.scheduler_config.max_num_batched_tokens)
            self.model.reserve_stream(most)
        is_on_cpu = self.device.type == "cpu"
        if self.expert_group.size > 1 or (is_on_cpu and not self.group.can_record):
            logger.info("the model runs operation by operation: others have parts of its layers")
            return None
        num_groups = len(self.kv_cache_windows)
        if is_on_cpu:
            all_agree = self.group.all_agree
            return record_step(self.model, self.ops, self._limits, num_groups, all_agree)
        if self.model.UNRECORDABLE:  # it may wait for the device, which a capture does not allow
            logger.info("the model runs without CUDA graphs: %s", self.model.UNRECORDABLE)
        # a stage before the last one has no head, and hands on what its layers return
        is_decoded = self.model.has_head or not stages.is_last
        if config.device_config.enforce_eager or self.model.UNRECORDABLE or not is_decoded:
            return None
        return self._make_graphs(CudaCapture())

    def _make_sections(self) -> Sections | None:
        """Makes what runs parts of the model, if its layers need not all compute the same rows.
        Call it after _make_forward.
        """
        if not isinstance(self._forward, Program):
            return None
        num_groups, all_agree = len(self.kv_cache_windows), self.group.all_agree
        return record_sections(self.model, self.ops, self._limits, num_groups, all_agree)

    @property
    def _limits(self) -> Limits:
        """The largest step."""
        scheduler_config = self.config.scheduler_config
        num_logits = max_num_logits(scheduler_config)
        num_requests = max(scheduler_config.max_num_seqs, num_logits)
        return Limits(resolved(scheduler_config.max_num_batched_tokens), num_requests, num_logits)

    def _make_graphs(self, capture: Capture) -> GraphedStep:
        limits, config = self._limits, self.config
        return make_graphs(
            self.model,
            self.ops,
            config.scheduler_config.max_num_seqs,
            limits.num_tokens,
            limits.num_logits,
            resolved(config.model_config.max_model_len),
            config.cache_config.block_size,
            self.device,
            capture,
            len(self.kv_cache_windows),
        )

    def initialize_swap_space(self) -> tuple[int, PreemptionCosts]:
        """Allocates host memory for the blocks of preempted requests.

        Returns the number of blocks, and the cost of bringing a request back.
        """
        num_blocks = self.plan_swap_space() or 0
        swap_costs = self.open_swap_space(num_blocks)
        if self.config.scheduler_config.preemption_mode != "auto" or not num_blocks:
            return num_blocks, PreemptionCosts()
        recompute_s = measure_recompute(self.run_pass, self.config.scheduler_config)
        costs = PreemptionCosts(recompute_s, *swap_costs)
        logger.info("swap space: %d blocks; %s", num_blocks, costs)
        return num_blocks, costs

    def plan_swap_space(self) -> int | None:
        """How many blocks of preempted requests the host's memory has room for. None: as many as
        one likes, since the layers of this rank keep nothing.
        """
        if self.config.scheduler_config.preemption_mode == "recompute":
            return 0
        if self._states is None and not self.block_bytes:
            return None
        free_bytes = devices.free_bytes(torch.device("cpu")) // self.group.num_on_machine
        windows = self.kv_cache_windows
        return plan_num_host_blocks(self.config, self.block_bytes, free_bytes, windows)

    def open_swap_space(self, num_blocks: int) -> tuple[float, float]:
        """Allocates host memory for so many blocks. Returns the seconds of moving a request out and
        in again, and those of each of its tokens; zeros where preemption_mode does not ask.
        """
        self._num_host_blocks = num_blocks
        if not num_blocks:
            return 0.0, 0.0
        self._mover = self._make_block_mover()
        self._assemble()
        if self.config.scheduler_config.preemption_mode != "auto":
            return 0.0, 0.0
        swap_s, swap_s_per_block = self._mover.measure()
        if (states := self._states) is not None:
            last = len(states.places) - 1

            def swap_state() -> None:
                states.copy([(0, last), (last, 0)])
                devices.synchronize(self.device)

            swap_s += shortest_time(swap_state)
        # a token has a part of a block in each group
        num_groups, block_size = len(self.kv_cache_windows), self.config.cache_config.block_size
        return swap_s, swap_s_per_block * num_groups / block_size

    def use_pass_times(
        self,
        model: dict[int, float],
        draft: dict[int, float] | None,
        verify: dict[int, float] | None = None,
    ) -> None:
        """Takes what passes cost (PassTimes), from which an engine that drafts chooses how far."""
        times = PassTimes(model, draft, verify)
        clock = None  # ranks with times of their own would draft differently
        if self.group.num_ranks == 1:
            clock = cpu_step_clock if self.device.type == "cpu" else gpu_clock
        self._depth = make_depth(
            self.config.scheduler_config, self.state.batch, times, clock, self._lookup
        )
        self._assemble()

    def run_draft_pass(self, num_tokens: int) -> None:
        """Runs a pass without effects of the model or head that drafts, if this rank has one."""
        if self._draft is not None:
            self._draft.run_pass(num_tokens)
            devices.synchronize(self.device)

    def run_pass(self, num_tokens: int = 1, num_logits: int = 1) -> None:
        """Runs a pass without effects, as execute_dummy_batch does, and waits for its end."""
        self.runner.execute_dummy_batch(num_tokens, num_logits)
        devices.synchronize(self.device)

    @property
    def model_name(self) -> str:
        return self._builder.kind.name

    @property
    def burst_weights_bytes(self) -> int:
        """Bytes of weights if a step with lookahead tokens is one call, otherwise 0."""
        return self._builder.weights_bytes if self.runner.bursts is not None else 0

    def _make_block_mover(self) -> BlockMover:
        num_blocks = self._num_host_blocks
        host_caches = self._host_caches(num_blocks) if num_blocks else []
        return BlockMover(self.attention_layers(), host_caches, self.ops)

    def _host_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """Memory of the host for blocks, in the order of caches_of."""
        host_caches = self._cache.host_caches(self.model.attention_layers(), num_blocks)
        return host_caches + ([] if self._draft is None else self._draft.host_caches(num_blocks))

    def initialize_offload(self) -> KVOffload | None:
        """Opens the store of blocks that the cache has no room for, if the configuration asks for
        one. Raises InvalidParameterError, NotEnoughMemoryError.
        """
        # the layers of a stage may keep nothing
        has_any = self.block_bytes or self._states
        if self.config.cache_config.kv_offloading_size and has_any:
            self._kept_shapes = self._shapes_of_store()
            group, transfer = self.group, self.config.cache_config.kv_transfer_config
            share = KVShare(group.size, group.stages.count, group.place[0])
            if transfer is not None:
                transfer = transfer.of_rank(self.config.device_config.data_parallel_rank, share)
            self.offload = KVOffload(
                self._open_store(self._directory),
                self._block_memory(),
                self._finish_steps,
                transfer,
                share,
            )
        return self.offload

    def _block_memory(self) -> BlockMemory:
        states = self._states

        def caches() -> list[torch.Tensor]:
            return caches_of(self.attention_layers())

        places = None if states is None else lambda: states.places
        if self.device.type == "cpu":
            return HostMemory(caches, places)
        host_caches = self._host_caches(STAGED_BLOCKS)
        return DeviceMemory(caches, places, host_caches, self.ops.copy_blocks, self.device)

    def _finish_steps(self) -> None:
        """Waits for the steps that run in the thread."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()

    def _shapes_of_store(self) -> tuple[int, list[Any]]:
        """The bytes of a block that is kept, and what it consists of."""
        layers = self.attention_layers()  # also those of a drafting model
        shapes: list[Any] = [
            [layer.num_kv_heads, layer.head_dim, str(self.kv_cache_dtype)] for layer in layers
        ]
        block_bytes = self.block_bytes
        if self._states is not None:
            shapes += self._states.shapes
            block_bytes = block_bytes or self._states.place_bytes  # without attention
        if self.kv_cache_windows != (0,):
            shapes.append(self._cache.groups)
        rank = self.group.place
        if rank != (0, 1):
            shapes.append([self.group.size, self.group.stages.count, rank])
        return block_bytes, shapes

    def _open_store(self, directory: Path | None) -> BlockStore:
        """The place for blocks that the weights in a directory compute."""
        block_bytes, shapes = self._kept_shapes
        is_on_cpu = self.device.type == "cpu"
        place = str(self.cpu_isa) if is_on_cpu else devices.gpu_name(self.device)
        computed_by = f"{place} {self.ops}"
        identity = identity_of(self.config, directory, computed_by, shapes, __version__)
        free_bytes = devices.free_bytes(torch.device("cpu")) // self.group.num_on_machine
        return open_store(self.config, block_bytes, identity, free_bytes, self.group.place)

    # ------------------------------------------------------------ steps

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Does nothing: no rank dies without this process."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step.

        A failure of one request is a row in `errors`; an exception fails the engine.
        """
        step = self.runner if self.tracer is None else self.tracer
        if not self._shares_passes:
            return step.execute_model(scheduler_output)
        run = partial(step.execute_model, scheduler_output)
        return self.expert_group.run(run, self.runner.execute_dummy_batch)

    def submit_model(
        self, scheduler_output: SchedulerOutput
    ) -> PendingStep | HostStep | Future[ModelRunnerOutput]:
        """Starts a step. The caller schedules and submits the next one before it asks for the
        `result()`.

        Steps run in the order of submission. On a GPU the step is launched here, which costs less
        than passing it to a thread; on a CPU a thread computes it.
        """
        if self.runner.launched is not None and self.tracer is None:
            return self._launch(scheduler_output)
        if self._thread is None:
            use = partial(devices.use_in_thread, self.device)
            self._thread = ThreadPoolExecutor(1, "quire-executor", use)
        return self._thread.submit(self.execute_model, scheduler_output)

    def _launch(
        self, scheduler_output: SchedulerOutput
    ) -> PendingStep | HostStep | Future[ModelRunnerOutput]:
        try:
            return self.runner.launch_model(scheduler_output)
        except Exception as error:
            # the error is this step's; the rows of the previous step are delivered first
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed

    def append_sampled(
        self,
        num_sampled: list[int],
        token_ids: list[int],
        num_drafts: list[int],
        draft_ids: list[int],
    ) -> None:
        """Takes the tokens of the oldest step that has none, as in ModelRunnerOutput, and what the
        last stage drafted after them. Only a stage before the last one is called so, ahead of a
        step that needs these tokens.
        """
        assert self.state.pending is not None
        self.state.pending.append(num_sampled, token_ids, num_drafts, draft_ids)

    def drafts_of(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """What the last of several stages has drafted for the next step of these slots: how many
        drafts each has, and all of them.
        """
        kept = self.state.kept
        return ([], []) if kept is None else kept.columns(slots)

    def execute_dummy_batch(self) -> None:
        """Runs a forward pass without effects, to warm up."""
        self.check_health()
        self.runner.execute_dummy_batch()

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        """See Executor. A compilation takes milliseconds, at most a few seconds, once it is the
        owner's turn.
        """
        if self._state is None or self._state.grammars is None:
            raise RuntimeError("the executor has no model: it was not loaded, or it was shut down")
        return self._state.grammars.check(params, is_known=is_known, owner=owner)

    def read_lora(self, request: LoRARequest) -> Future[str]:
        """See Executor. One adapter is read at a time."""
        return self.loras.begin_read(request)

    def add_lora(self, request: LoRARequest) -> bool:
        """See Executor."""
        return self.loras.add_read(request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        return self.loras.remove(lora_int_id)

    def list_loras(self) -> set[int]:
        """See Executor."""
        return self.loras.list()

    def join_engines(self) -> None:
        """See SharingExecutor."""
        self.expert_group.connect()

    def meet_engines(self, has_work: bool) -> bool:
        """See SharingExecutor."""
        return self.expert_group.meet(has_work)

    def join_pass(self) -> None:
        """Runs a pass without data, in which this engine's experts compute rows of the others."""
        self.check_health()
        run = self.runner.execute_dummy_batch
        if self._shares_passes:
            self.expert_group.run(run, run)
        else:
            run()

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of CALLABLE on every rank and returns the results in rank order.

        Raises InvalidParameterError.
        """
        if method not in self.CALLABLE:
            raise InvalidParameterError(
                "method", f"must be one of {', '.join(sorted(self.CALLABLE))}, got {method!r}"
            )
        function = getattr(self, method)
        try:
            inspect.signature(function).bind(*args)
        except TypeError as error:
            raise InvalidParameterError(
                "args", f"{method} does not take {list(args)!r}: {error}"
            ) from None
        return [function(*args)]

    def start_trace(self, num_steps: int) -> None:
        """Records the next `num_steps` steps, which then run one after the other, until
        `end_trace`. No step may be in flight here and in `end_trace`.
        """
        self.check_health()
        self._stopped_tracer = None
        self.tracer = StepTracer(self.runner, num_steps, self.num_threads)

    def end_trace(self) -> RanksTrace:
        """Ends the recording and returns what there is. The first call measures the machine, which
        takes tenths of a second.
        """
        self._stop_tracer()
        tracer, self._stopped_tracer = self._stopped_tracer, None
        if tracer is None:
            return RanksTrace()
        functions = Worker.execute_model, ModelRunner.execute_model
        return RanksTrace(
            {step: [rank] for step, rank in tracer.take().items()},
            measured_limits(
                self.device,
                self.dtype,
                self.config.model_config.quantization,
                self.memory_usage()["weights_bytes"],
                self.num_threads,
                bool(self.model.state_layers()),
            ),
            {function.__qualname__: place_of_function(function) for function in functions},
            tracer.notes,
            str(self.cpu_isa) if self.device.type == "cpu" else str(self.device),
            self.model_name,
        )

    def _stop_tracer(self) -> None:
        """Stops the tracer because its runner will not run any more, or because the trace ends."""
        if self.tracer is not None:
            self.tracer.stop()
            self._stopped_tracer, self.tracer = self.tracer, None

    # ------------------------------------------------------------ between steps

    def check_health(self) -> None:
        """Raises RuntimeError if this rank cannot run steps now."""
        if self.asleep:
            raise RuntimeError(
                f"the worker sleeps: its {' and '.join(sorted(self.asleep))} must be woken first"
            )
        if self._model is None:
            raise RuntimeError("the worker has no model: it was not loaded, or it was shut down")

    def memory_usage(self) -> dict[str, int]:
        """The bytes of weights and cache, and of the whole process. On a CPU, only the written
        pages of the cache take memory.
        """
        return {
            "weights_bytes": 0 if "weights" in self.asleep else self._weights_bytes,
            "kv_cache_bytes": 0 if "kv_cache" in self.asleep else self._cache_bytes,
            "resident_bytes": resident_bytes(),
        }

    @property
    def _weights_bytes(self) -> int:
        num_bytes = self._builder.weights_bytes
        return num_bytes if self._draft is None else num_bytes + self._draft.weights_bytes

    def expert_load(self) -> dict[int, list[int]]:
        """See model.expert_load."""
        return {} if self._model is None else expert_load(self._model)

    def sleep(self, tags: list[str]) -> None:
        """Releases the memory of "kv_cache" or "weights".

        A CPU has no other place for weights: they are dropped.
        """
        self._stop_tracer()
        # the runner holds the model and, by their addresses, weights and cache
        self._runner = self._forward = self._sections = None
        if "kv_cache" in tags and "kv_cache" not in self.asleep:
            if self._model is not None:
                release_caches(self._model.attention_layers())
                if self._states is not None:
                    self._states.release(self._model.state_layers())
            self._mover = None
            if self._draft is not None:
                self._draft.release_cache()
        if "weights" in tags:
            self._model = self._draft = None
        self.asleep.update(tags)
        devices.release_memory()

    def wake_up(self, tags: list[str]) -> None:
        """Reads the weights again from their source, and allocates the cache, which needs the
        weights.

        A part that fails stays asleep.
        """
        for tag in ("weights", "kv_cache"):
            if tag not in tags or tag not in self.asleep:
                continue
            if tag == "weights":
                self._use_model(self._builder.build(self._directory, _report_nothing))
                self._draft = self._make_draft(_report_nothing)
            else:
                self._make_cache(self._num_blocks)
            self.asleep.discard(tag)

    def load_weights(self, path: str) -> None:
        """Replaces the weights by those in the directory `path`. On an error the old ones stay in
        use.

        The new model is built while the old one is in memory, so both must fit. Raises
        ModelLoadError, NotEnoughMemoryError.
        """
        directory = Path(path)
        self._builder.check_same_architecture(directory)
        model = self._builder.build(directory, _report_nothing)
        dense = self._dense
        if (pooling := self.config.model_config.pooling) is not None:
            dense = load_dense(pooling.dense, directory)
        # what was kept means the old weights, so without another place for it nothing changes
        store = None if self.offload is None else self._open_store(directory)
        self._dense = dense
        self._stop_tracer()
        if self._model is not None:
            move_caches(self._model.attention_layers(), model.attention_layers())
            if self._states is not None:
                self._states.bind(model.state_layers())
        self._directory = directory
        self._use_model(model)
        if self.offload is not None and store is not None:
            self.offload.use_store(store)
        if self._draft is None:
            self._draft = self._make_draft(_report_nothing)
        else:
            self._draft.use_model(model)
        self.asleep.discard("weights")
        if not self.asleep:
            self._runner = self._forward = None  # of the old weights, which they hold
            self._forward = self._make_forward()
            self._sections = self._make_sections()
            self._mover = self._make_block_mover()
            self._assemble()
        devices.release_memory()

    def shutdown(self) -> None:
        """Frees model and cache after the step in flight. It may be called twice."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self.loras.shutdown()
        if self._state is not None and self._state.grammars is not None:
            self._state.grammars.shutdown()
        if self.offload is not None:
            self.offload.close()
        self.expert_group.close()
        self._model = self._runner = self._state = self._forward = self._mover = None
        self._sections = None
        self.tracer = self._stopped_tracer = self._draft = self._lookup = None
        if self.device.type != "cpu":  # another engine of this process may need the memory
            self._states = None
            devices.release_memory()


def _refuse_ranks(config: EngineConfig) -> None:
    device_config = config.device_config
    for name, size in (
        ("tensor_parallel_size", device_config.tensor_parallel_size),
        ("pipeline_parallel_size", device_config.pipeline_parallel_size),
    ):
        if size > 1:
            raise InvalidParameterError(
                name, f"must be 1 for an executor with one rank, got {size}"
            )


def _report_nothing(stage: str, fraction: float) -> None:
    pass
