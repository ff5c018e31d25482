"""One rank: loads its model, sizes and owns its part of the KV cache, runs steps.

Must not know: other ranks, requests, how steps reach it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..ipc.config import EngineConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..ipc.models.memory_plan import check_cache_size, plan_num_blocks, plan_num_host_blocks
from ..ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from ..kernels.cpu.native.recorder import Limits
from ..kernels.cpu.native.weights import early_memory
from . import device as devices
from .draft import Draft, draft_config
from .kv_cache_memory import KVCacheMemory, move_caches
from .loras import Loras
from .model import expert_load
from .model_builder import ModelBuilder
from .offload.block_store import BlockStore
from .offload.kv_offload import KVOffload, identity_of, open_store
from .plugins import load_plugins
from .pooling.pooler import Pooler
from .program.step_program import record_step
from .ranks.expert_group import make_expert_group
from .ranks.tensor_group import ALONE, TensorGroup
from .runner.block_mover import BlockMover, caches_of, shortest_time
from .runner.bursts import Bursts
from .runner.cuda_graphs import CudaCapture, GraphedStep
from .runner.input_batch import InputBatch
from .runner.launched_steps import HostStep, PendingStep
from .runner.model_runner import ModelRunner
from .runner.sampled_elsewhere import SampledElsewhere
from .runner.speculation.verification import make_speculation, max_num_logits
from .sampling.grammar import Grammars
from .sampling.logits_processors import load_logits_processors
from .sampling.token_stages import make_stages
from .tracing.step_tracer import StepTracer
from .weights.early_memory import take as take_early_memory

logger = logging.getLogger(__name__)

# tokens of a forward pass that measures recomputation; the larger ones only for fast models
MEASURED_TOKENS = (8, 32)
MEASURING_BUDGET_S = 0.02  # of start-up; a slower pass is run once


class Worker:
    """Runs steps after load_model, determine_num_blocks and initialize_kv_cache.

    Between two steps it can sleep, wake up or take other weights; the scheduler has dropped all KV
    entries by then.
    """

    # by collective_rpc: those that change nothing, and those that change what is in memory
    CALLABLE = frozenset(
        {"check_health", "execute_dummy_batch", "expert_load", "memory_usage"}
        | {"load_weights", "sleep", "wake_up"}
    )

    def __init__(self, config: EngineConfig, group: TensorGroup = ALONE):
        """`group`: the ranks that have the other parts of the layers."""
        self.config = config
        self.group = group
        self.expert_group = make_expert_group(config)
        self.device = devices.select_device(config.device_config.device)
        self.dtype = devices.select_dtype(config.model_config.dtype, self.device)
        self.kv_cache_dtype = devices.select_kv_cache_dtype(
            config.cache_config.kv_cache_dtype, self.dtype, self.device
        )
        self.num_threads = devices.set_num_threads(config.device_config.num_threads)
        self.cpu_isa = devices.select_cpu_isa(config.device_config.cpu_isa)
        logger.info("%d threads, native kernels: %s", self.num_threads, self.cpu_isa)
        self.model: Any = None  # a Model
        self.runner: ModelRunner  # set by load_model
        self.grammars: Grammars | None = None
        self.loras = Loras(config.lora_config, self.dtype)
        self.asleep: set[str] = set()  # of "weights" and "kv_cache": what is not in memory
        self._directory: Path | None = None  # source of the current weights; None: random ones
        self.tracer: StepTracer | None = None  # while steps are traced
        self.draft: Draft | None = None  # set by load_model where the engine has a draft model
        self._cache: KVCacheMemory  # set by load_model
        self._num_blocks = 0
        self._num_host_blocks = 0
        self.offload: KVOffload | None = None  # set by initialize_offload

    def load_model(self, report: Callable[[str, float], None]) -> None:
        """Builds the model and fills its weights.

        Raises ModelLoadError, InvalidParameterError (an unknown kernel or processor).
        """
        model_config, scheduler_config = self.config.model_config, self.config.scheduler_config
        block_size = self.config.cache_config.block_size
        load_plugins()
        processors = load_logits_processors(model_config.logits_processors)
        groups = self.group, self.expert_group
        self._builder = builder = ModelBuilder(
            self.config, self.dtype, self.kv_cache_dtype, self.device, self.cpu_isa, *groups
        )
        ops, shape = builder.ops, builder.shape
        if self.config.load_config.load_format != "dummy":
            self._directory = Path(model_config.model)
        with early_memory(take_early_memory()):
            self.model = builder.build(self._directory, report)
        max_num_seqs = scheduler_config.max_num_seqs
        max_model_len = resolved(model_config.max_model_len)
        self.grammars = Grammars(self.config, ops, shape.vocab_size)
        stages = make_stages(
            ops, shape.vocab_size, max_num_seqs, max_model_len, processors, self.grammars
        )
        layers = self.model.attention_layers()
        self._cache = KVCacheMemory(layers, self.config, self.kv_cache_dtype, self.device)
        batch = InputBatch(max_num_seqs, max_model_len, block_size, stages, self.kv_cache_windows)
        batch.loras = self.loras if self.loras.is_enabled else None
        self.runner = ModelRunner(self.model, ops, batch, block_size, self.device, self.grammars)
        self.runner.is_stage = self.group.stages.count > 1
        if not self.group.stages.is_last:
            self.runner.elsewhere = SampledElsewhere(batch)
        if model_config.pooling is not None:
            self.runner.pooler = Pooler(model_config.pooling, self._directory)
            self.runner.pooler.use_model(self.model)
        if (of_draft := draft_config(self.config)) is not None:
            tables = batch, self.kv_cache_windows
            self.draft = Draft(self.config, of_draft, builder, lambda: self.model, *tables)
            self.draft.load(report)
            self.runner.draft = self.draft

    @property
    def kv_cache_windows(self) -> tuple[int, ...]:
        """Of each group of layers: see Executor."""
        return self._cache.groups.windows

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache."""
        num_bytes = self._cache.block_bytes(self.model.attention_layers())
        return num_bytes if self.draft is None else num_bytes + self.draft.block_bytes

    def determine_num_blocks(self) -> int:
        """The number of KV-cache blocks to allocate, including the null block.

        Raises NotEnoughMemoryError if one full sequence does not fit, and for more than the memory
        that there is.
        """
        block_bytes, num_sharing = self.block_bytes, self.group.num_on_machine
        num_blocks = plan_num_blocks(
            self.config, block_bytes, self._free_for_cache(), self.kv_cache_windows
        )
        if self.device.type == "cpu":
            num_sharing *= self.config.device_config.data_parallel_size
        else:  # each has a GPU of its own
            num_sharing = 1
        free, total = devices.free_bytes(self.device), devices.total_bytes(self.device)
        num_bytes = num_sharing * num_blocks * block_bytes
        if warning := check_cache_size(self.config.cache_config, num_bytes, free, total):
            logger.warning(warning)
        return num_blocks

    def _free_for_cache(self) -> int:
        """Bytes: on a CPU the free memory, which steps and other programs share; on a GPU what the
        largest step and its graphs leave.
        """
        if self.device.type == "cpu":
            free = devices.free_host_bytes(has_standby=self.config.service_config.standby)
            return free // self.group.num_on_machine
        scheduler_config = self.config.scheduler_config
        self._cache.bind(self.model.attention_layers(), 1)
        num_bytes = devices.free_share_bytes(
            self.device, self.config.cache_config.gpu_memory_utilization
        )
        # one for a step, one for graphs, which have a memory pool of their own
        max_num_tokens = resolved(scheduler_config.max_num_batched_tokens)
        for num_tokens in (max_num_tokens, scheduler_config.max_num_seqs):
            num_logits = min(num_tokens, scheduler_config.max_num_seqs)
            num_bytes -= devices.peak_bytes(
                self.device,
                partial(self.runner.execute_dummy_batch, num_tokens, num_logits, is_sampled=True),
            )
        return num_bytes

    def initialize_kv_cache(self, num_blocks: int) -> int:
        """Allocates the cache, binds it to the layers and runs the model once; returns its size in
        bytes.
        """
        self._cache.bind(self.model.attention_layers(), num_blocks)
        if self.draft is not None:
            self.draft.allocate(num_blocks)
        self._num_blocks = self.runner.batch.num_cache_blocks = num_blocks
        self._make_program()
        # the first call of an operation may set things up, which must not delay a request; a broken
        # operation fails here
        self.runner.execute_dummy_batch()
        if self.runner.speculation is None:  # else it has slept, and its costs are known
            self.runner.speculation = make_speculation(
                self.config.scheduler_config,
                self.runner.batch,
                self._run_verification,
                self.num_threads,
                *([] if (draft := self.draft) is None else [draft.drafter, draft.run_pass]),
            )
        num_bytes = num_blocks * self.block_bytes
        logger.info(
            "KV cache: %d blocks of %d tokens, %.1f MiB",
            num_blocks,
            self.config.cache_config.block_size,
            num_bytes / 2**20,
        )
        return num_bytes

    def _make_program(self) -> None:
        """Records the model. Call it when weights or cache have moved: a program holds their
        addresses.
        """
        config = self.config
        max_num_seqs = config.scheduler_config.max_num_seqs
        max_num_tokens = resolved(config.scheduler_config.max_num_batched_tokens)
        num_logits = max_num_logits(config.scheduler_config)
        if self.group.stages.count > 1:
            self.model.reserve_stream(max_num_tokens)
        is_divided = not self.group.can_record or self.expert_group.size > 1
        if is_divided or (self.runner.is_stage and self.device.type != "cpu"):
            logger.info("the model runs operation by operation: others have parts of its layers")
        elif self.device.type == "cpu":
            self.runner.program = program = record_step(
                self.model,
                self._builder.ops,
                Limits(max_num_tokens, max(max_num_seqs, num_logits), num_logits),
                len(self.kv_cache_windows),
                self.group.all_agree,
            )
            can_burst = "sample_tokens" in self._builder.ops.native and not self.runner.is_stage
            batch, block_size = self.runner.batch, config.cache_config.block_size
            self.runner.bursts = (
                Bursts(program, batch, block_size, self.runner.host_inputs)
                if program is not None and can_burst
                else None
            )
            if self.draft is not None:
                self.draft.make_rounds(program)
        elif not config.device_config.enforce_eager:
            max_model_len = resolved(config.model_config.max_model_len)
            sizes = max_num_seqs, max_model_len, config.cache_config.block_size
            graphs = GraphedStep(
                self.model,
                self._builder.ops,
                *sizes,
                self.device,
                CudaCapture(),
                len(self.kv_cache_windows),
                self.loras.is_enabled,
            )
            self.runner.program = graphs
            graphs.prepare()

    def initialize_swap_space(self) -> tuple[int, PreemptionCosts]:
        """Allocates host memory for the blocks of preempted requests.

        Returns the number of blocks, and the cost of bringing a request back.
        """
        mode, block_size = (
            self.config.scheduler_config.preemption_mode,
            self.config.cache_config.block_size,
        )
        # ranks would measure different costs, and move other blocks than each other
        if mode != "recompute" and self.group.num_ranks == 1:
            self._num_host_blocks = plan_num_host_blocks(
                self.config,
                self.block_bytes,
                devices.free_bytes(torch.device("cpu")),
                self.kv_cache_windows,
            )
        mover = self._make_block_mover()
        if mode != "auto" or not self._num_host_blocks:
            return self._num_host_blocks, PreemptionCosts()
        scheduler_config = self.config.scheduler_config
        most_tokens = min(
            resolved(scheduler_config.max_num_batched_tokens), scheduler_config.max_num_seqs
        )
        recompute_s = 0.0
        for num_tokens in sorted({min(count, most_tokens) for count in MEASURED_TOKENS}):

            def recompute(num_tokens: int = num_tokens) -> None:
                self.runner.execute_dummy_batch(num_tokens)
                devices.synchronize(self.device)

            pass_s = shortest_time(recompute, budget_s=MEASURING_BUDGET_S)
            recompute_s = pass_s / num_tokens
            # more tokens would take longer and not change the result: swapping is much cheaper
            if pass_s > MEASURING_BUDGET_S / 4:
                break
        swap_s, swap_s_per_block = mover.measure(self.runner.attention_layers())
        # a token has a part of a block in each group
        swap_s_per_token = swap_s_per_block * len(self.kv_cache_windows) / block_size
        costs = PreemptionCosts(recompute_s, swap_s, swap_s_per_token)
        logger.info("swap space: %d blocks; %s", self._num_host_blocks, costs)
        return self._num_host_blocks, costs

    def _run_verification(self, num_tokens: int) -> None:
        """A pass of `num_tokens` with logits of each."""
        self.runner.execute_dummy_batch(num_tokens, num_tokens)

    @property
    def model_name(self) -> str:
        return self._builder.kind.name

    @property
    def burst_weights_bytes(self) -> int:
        """Bytes of weights if a step with lookahead tokens is one call, else 0."""
        return self._builder.weights_bytes if self.runner.bursts is not None else 0

    def _make_block_mover(self) -> BlockMover:
        num_blocks = self._num_host_blocks
        host_caches = []
        if num_blocks:
            host_caches = self._cache.host_caches(self.model.attention_layers(), num_blocks)
            host_caches += [] if self.draft is None else self.draft.host_caches(num_blocks)
        self.runner.block_mover = mover = BlockMover(host_caches, self._builder.ops)
        return mover

    def initialize_offload(self) -> KVOffload | None:
        """Opens the store of blocks that the cache has no room for, if the configuration asks for
        one. Raises InvalidParameterError, NotEnoughMemoryError.
        """
        if self.config.cache_config.kv_offloading_size:
            if self.kv_cache_windows != (0,):
                raise InvalidParameterError(
                    "kv_offloading_size",
                    "layers with sliding windows keep no whole context; "
                    "disable_hybrid_kv_cache_manager=True lets them",
                )
            self.offload = KVOffload(
                self._open_store(), lambda: caches_of(self.runner.attention_layers())
            )
        return self.offload

    def _open_store(self) -> BlockStore:
        layers = self.runner.attention_layers()  # of a drafting model, too
        shapes = [
            [layer.num_kv_heads, layer.head_dim, str(self.kv_cache_dtype)] for layer in layers
        ]
        identity = identity_of(self.config, self._directory, str(self.cpu_isa), shapes, __version__)
        return open_store(
            self.config, self.block_bytes, identity, devices.free_bytes(torch.device("cpu"))
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        run = self.runner.execute_model if self.tracer is None else self.tracer.run
        step = partial(run, scheduler_output)
        return self.expert_group.run(step, self.runner.execute_dummy_batch)

    def join_pass(self) -> None:
        """A pass without data, in which this engine's experts compute rows of the others."""
        self.check_health()
        self.expert_group.run(self.runner.execute_dummy_batch, self.runner.execute_dummy_batch)

    def append_sampled(self, num_sampled: list[int], token_ids: list[int]) -> None:
        """Takes the tokens of the oldest step that has none, as in ModelRunnerOutput. Only a stage
        before the last one is called, before a step that needs these tokens.
        """
        assert self.runner.elsewhere is not None
        self.runner.elsewhere.append(num_sampled, token_ids, self.runner.tables)

    def start_trace(self, num_steps: int) -> None:
        """Records the next steps, which run one after the other, until `end_trace`."""
        self.check_health()
        self.tracer = StepTracer(self.runner, num_steps, self.num_threads)

    def end_trace(self) -> StepTracer | None:
        """What has been recorded, if anything was."""
        self._stop_tracer()
        tracer, self.tracer = self.tracer, None
        return tracer

    def _stop_tracer(self) -> None:
        if self.tracer is not None:
            self.tracer.stop()

    @property
    def launches(self) -> bool:
        """Whether launch_model is supported: the device computes while the host continues."""
        return self.runner.launcher is not None and self.tracer is None

    def launch_model(self, scheduler_output: SchedulerOutput) -> PendingStep | HostStep:
        return self.runner.launch_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        self.check_health()
        self.runner.execute_dummy_batch()

    # ------------------------------------------------------------ between steps

    def check_health(self) -> None:
        """Raises RuntimeError if this rank cannot run steps now."""
        if self.asleep:
            raise RuntimeError(
                f"the worker sleeps: its {' and '.join(sorted(self.asleep))} must be woken first"
            )
        if self.model is None:
            raise RuntimeError("the worker has no model: it was not loaded, or it was shut down")

    def memory_usage(self) -> dict[str, int]:
        """Bytes of weights and cache (on a CPU only written pages take memory), and of the whole
        process.
        """
        return {
            "weights_bytes": 0 if "weights" in self.asleep else self._weights_bytes,
            "kv_cache_bytes": 0
            if "kv_cache" in self.asleep
            else self._num_blocks * self.block_bytes,
            "resident_bytes": devices.resident_bytes(),
        }

    @property
    def _weights_bytes(self) -> int:
        num_bytes = self._builder.weights_bytes
        return num_bytes if self.draft is None else num_bytes + self.draft.weights_bytes

    def expert_load(self) -> dict[int, list[int]]:
        """See model.expert_load."""
        return {} if self.model is None else expert_load(self.model)

    def sleep(self, tags: list[str]) -> None:
        """Releases the memory of "kv_cache" or "weights".

        On a CPU there is no other place for weights: they are dropped.
        """
        self._stop_tracer()
        if "kv_cache" in tags:
            for layer in self.model.attention_layers():
                layer.key_cache = layer.value_cache = None
            self.runner.block_mover = self.runner.program = self.runner.bursts = None
            if self.draft is not None:
                self.draft.release_cache()
        if "weights" in tags:
            self.model = None
            self.runner.use_model(None)
            if self.draft is not None:
                self.draft.release_weights()
        self.asleep.update(tags)
        devices.release_memory()

    def wake_up(self, tags: list[str]) -> None:
        """Reads the weights again from their source, and allocates the cache, which needs the
        weights.

        What fails stays asleep.
        """
        for tag in ("weights", "kv_cache"):
            if tag not in tags or tag not in self.asleep:
                continue
            if tag == "weights":
                self.model = self._builder.build(self._directory, _report_nothing)
                self.runner.use_model(self.model)
                if self.draft is not None:
                    self.draft.reload(_report_nothing)
            else:
                self.initialize_kv_cache(self._num_blocks)
                self._make_block_mover()
            self.asleep.discard(tag)

    def load_weights(self, path: str) -> None:
        """Replaces the weights by those in the directory `path`; on an error the old ones stay
        in use.

        The new model is built while the old one is in memory, so both must fit. Raises
        ModelLoadError, NotEnoughMemoryError.
        """
        directory = Path(path)
        self._builder.check_same_architecture(directory)
        model = self._builder.build(directory, _report_nothing)
        if self.runner.pooler is not None:
            self.runner.pooler.use_dense(directory)
        self._stop_tracer()
        if self.model is not None:
            move_caches(self.model.attention_layers(), model.attention_layers())
        self.model, self._directory = model, directory
        self.runner.use_model(model)
        if self.draft is not None:
            if "weights" in self.asleep:
                self.draft.reload(_report_nothing)
            self.draft.use_model()
        if "kv_cache" not in self.asleep:
            self._make_program()
        self.asleep.discard("weights")
        if self.offload is not None:
            self.offload.use_store(self._open_store())
        devices.release_memory()

    def shutdown(self) -> None:
        """Releases model and cache. May be called twice."""
        if self.grammars is not None:
            self.grammars.shutdown()
        if self.offload is not None:
            self.offload.close()
        self.expert_group.close()
        self.model = self.grammars = self.tracer = self.draft = None
        if hasattr(self, "runner"):
            del self.runner


def _report_nothing(stage: str, fraction: float) -> None:
    pass
