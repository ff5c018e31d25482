"""The interface through which the engine core runs a model.

Must not know: the scheduler, requests, torch, how many processes an implementation uses.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from ..ipc.block_offload import BlockOffload
from ..ipc.config import EngineConfig
from ..ipc.lora import LoRARequest
from ..ipc.models.ranks import num_ranks
from ..ipc.params import StructuredOutputsParams
from ..ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from ..ipc.trace import RanksTrace


class PendingOutput(Protocol):
    """The output of a step that may still be running."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step, and returns its output or raises its exception."""
        ...


class Executor(Protocol):
    """Runs a model on all its ranks, in one process or in several.

    Its methods are called in this order: load_model, determine_num_blocks, initialize_kv_cache,
    initialize_swap_space, initialize_offload, then steps, then shutdown. One thread calls all of
    them. An exception of a step is a failure of the engine; a failure of one request is an entry in
    ModelRunnerOutput.errors.
    """

    def load_model(self, report: Callable[[str, float], None]) -> None:
        """Loads the weights and calls report(stage, fraction) as it goes. Raises ModelLoadError."""
        ...

    @property
    def kv_cache_windows(self) -> tuple[int, ...]:
        """For each group of layers that has block tables of its own, the number of positions that a
        token sees; 0: all (ipc/models/kv_layout.py). It is known once the model is loaded.
        """
        ...

    def determine_num_blocks(self) -> int:
        """Returns how many KV-cache blocks memory and configuration allow, with the null block.

        Raises InvalidParameterError when there are too few.
        """
        ...

    def initialize_kv_cache(self, num_blocks: int) -> int:
        """Allocates the cache and returns its size in bytes."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """How many requests can run at a time: the configuration's number, or fewer if that many
        states do not fit the memory. It is known once the cache is initialized.
        """
        ...

    @property
    def num_state_checkpoints(self) -> int | None:
        """How many checkpoints of states there is room for; None: the model keeps no states. It is
        known once the cache is initialized.
        """
        ...

    def initialize_swap_space(self) -> tuple[int, PreemptionCosts]:
        """Sets host memory aside for preempted requests.

        Returns how many KV-cache blocks it holds, and what bringing a request back costs.
        """
        ...

    def initialize_offload(self) -> BlockOffload | None:
        """Returns what keeps blocks that the cache has no room for, if the configuration asks so.

        Raises InvalidParameterError, NotEnoughMemoryError.
        """
        ...

    @property
    def burst_weights_bytes(self) -> int:
        """Bytes of weights that a decoding step reads, where one call runs several such steps; 0
        elsewhere.
        """
        ...

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Calls `on_failure(cause)` once, in any thread, when no step can run any more because a
        rank has died. Until then steps wait for it no longer than for a step.
        """
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step."""
        ...

    def submit_model(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Begins one step. Steps run in the order of these calls. The caller schedules the next one
        meanwhile, and then asks for the result.
        """
        ...

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        """Compiles a grammar for structured output. Never blocks.

        is_known: another engine has compiled the grammar within the limits. owner: whom the grammar
        belongs to; owners take turns.

        The future's exception is the InvalidParameterError of a grammar that cannot be used.
        """
        ...

    # The core decides which LoRA adapters are in memory. It numbers each load of an adapter, and
    # that number is the `lora_int_id` of every LoRARequest that the executor sees. An adapter that
    # has been added never changes: a reload has another number. The requests in slots use at most
    # `max_loras` different adapters at any time.

    def read_lora(self, request: LoRARequest) -> Future[str]:
        """Reads an adapter's files and checks them in a thread. Never blocks.

        The result is a stamp of the files, which differs when they have changed. The future's
        exception is the InvalidParameterError of an adapter that cannot be used.
        """
        ...

    def add_lora(self, request: LoRARequest) -> bool:
        """Takes what `read_lora` has read, waiting for it if need be, so that requests can use it.

        Call it between two steps. It returns False if the adapter is already there, and raises what
        `read_lora` found.
        """
        ...

    def remove_lora(self, lora_int_id: int) -> bool:
        """Frees an adapter, read or added, that no later step uses. Slots that the next step frees
        may still name it.

        Call it between two steps. It returns False if there is no such adapter.
        """
        ...

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that were added and not removed."""
        ...

    def execute_dummy_batch(self) -> None:
        """Runs a forward pass that changes nothing, to warm up and to keep ranks in step."""
        ...

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank by name and returns the results in rank order.

        Raises InvalidParameterError for a method or arguments that ranks do not offer.
        """
        ...

    def start_trace(self, num_steps: int) -> None:
        """Records the next `num_steps` steps, which then run one after the other. No step may be in
        flight here and in `end_trace`.
        """
        ...

    def end_trace(self) -> RanksTrace:
        """Ends the recording and returns what there is."""
        ...

    def check_health(self) -> None:
        """Raises RuntimeError when a rank cannot run steps."""
        ...

    def shutdown(self) -> None:
        """Frees model and cache, after the step that runs. It may be called twice."""
        ...


class SharingExecutor(Executor, Protocol):
    """The executor of one of several engines that share experts (enable_expert_parallel) and run
    each pass of the model together. All three methods raise EngineDeadError when another engine is
    gone.
    """

    def join_engines(self) -> None:
        """Waits until all engines have loaded."""
        ...

    def meet_engines(self, has_work: bool) -> bool:
        """Waits for the other engines. Returns whether any has work; if so, each then calls
        execute_model or join_pass once.
        """
        ...

    def join_pass(self) -> None:
        """Takes part in a pass of the other engines, without data."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """Returns the executor that a resolved configuration asks for. It imports torch, or starts
    processes that do.

    Raises InvalidParameterError for what the executor cannot do.
    """
    if num_ranks(config) > 1:
        from .ranks.multiproc_executor import MultiprocExecutor

        if config.device_config.distributed_executor_backend == "ray":
            from .ranks.ray_ranks import ray_ranks

            return MultiprocExecutor(config, ray_ranks)
        return MultiprocExecutor(config)
    from .worker import Worker

    return Worker(config)
