"""An executor with one rank, in the engine's own process.

Must not know: the scheduler, requests, what a worker does inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..ipc.block_offload import BlockOffload
from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError
from ..ipc.lora import LoRARequest
from ..ipc.params import StructuredOutputsParams
from ..ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from ..ipc.trace import RanksTrace, place_of_function
from .executor import PendingOutput
from .loras import start_reader
from .plugins import naming_plugins
from .ranks.tensor_group import ALONE, TensorGroup
from .runner.model_runner import ModelRunner
from .tracing.measured_limits import measured_limits
from .weights.lora_files import stamp_of
from .worker import Worker


class SingleProcessExecutor:
    """Implements Executor and SharingExecutor (executor/executor.py)."""

    def __init__(self, config: EngineConfig, group: TensorGroup = ALONE):
        """`config` is resolved. `group`: of ranks with which this one shares the layers; they make
        the same calls.

        Raises InvalidParameterError for what one rank on this device cannot do.
        """
        if group is ALONE:
            for name in ("tensor_parallel_size", "pipeline_parallel_size"):
                size = getattr(config.device_config, name)
                if size > 1:
                    raise InvalidParameterError(
                        name, f"must be 1 for an executor with one rank, got {size}"
                    )
        self.worker = Worker(config, group)
        self._thread: ThreadPoolExecutor | None = None  # created by the first overlapped step
        self._reader: ThreadPoolExecutor | None = None  # of adapters; created by the first one
        self._read_loras: dict[int, Future[Any]] = {}  # by number, until they are added

    def load_model(self, report: Callable[[str, float], None]) -> None:
        """Loads the weights; calls report(stage, fraction) as it goes. Raises ModelLoadError."""
        with naming_plugins():
            self.worker.load_model(report)

    @property
    def kv_cache_windows(self) -> tuple[int, ...]:
        """Of each group of layers: see Executor."""
        return self.worker.kv_cache_windows

    def determine_num_blocks(self) -> int:
        """KV-cache blocks that memory and configuration allow, including the null block.

        Raises InvalidParameterError if there are too few.
        """
        return self.worker.determine_num_blocks()

    def initialize_kv_cache(self, num_blocks: int) -> int:
        """Allocates the cache; returns its size in bytes."""
        with naming_plugins():
            return self.worker.initialize_kv_cache(num_blocks)

    def initialize_swap_space(self) -> tuple[int, PreemptionCosts]:
        """Allocates host memory for preempted requests.

        Returns how many KV-cache blocks it holds, and the cost of bringing a request back.
        """
        return self.worker.initialize_swap_space()

    def initialize_offload(self) -> BlockOffload | None:
        """See Executor."""
        return self.worker.initialize_offload()

    @property
    def burst_weights_bytes(self) -> int:
        """Bytes of weights per decoding step if the worker runs several steps in one call, else
        0.
        """
        return self.worker.burst_weights_bytes

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Nothing dies without this process."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step.

        A failure of one request is a row in `errors`; an exception fails the engine.
        """
        return self.worker.execute_model(scheduler_output)

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        """Returns a future that completes when the grammar is compiled. Never blocks.

        The future raises the InvalidParameterError of an invalid grammar. Once it is the owner's
        turn it takes milliseconds, at most a few seconds.
        """
        grammars = self.worker.grammars
        if grammars is None:
            raise RuntimeError("the executor has no model: it was not loaded, or it was shut down")
        return grammars.check(params, is_known=is_known, owner=owner)

    def submit_model(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Starts a step; the caller schedules and submits the next one before it asks for the
        `result()`.

        Steps run in the order of submission. On a GPU the step is launched here, which costs less
        than passing it to a thread; on a CPU a thread computes it.
        """
        if self.worker.launches:
            return self._launch(scheduler_output)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-executor")
        return self._thread.submit(self.worker.execute_model, scheduler_output)

    def _launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        try:
            return self.worker.launch_model(scheduler_output)
        except Exception as error:
            # an error of this step; the rows of the previous one are delivered first
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed

    def read_lora(self, request: LoRARequest) -> Future[str]:
        """See Executor. One adapter is read at a time."""
        if self._reader is None:
            self._reader = start_reader()
        stamp: Future[str] = Future()
        loras = self.worker.loras

        def read() -> Any:
            try:
                files = stamp_of(request.lora_path)
                adapter = loras.read(request)
            except BaseException as error:
                stamp.set_exception(error)
                raise
            stamp.set_result(files)
            return adapter

        self._read_loras[request.lora_int_id] = self._reader.submit(read)
        return stamp

    def add_lora(self, request: LoRARequest) -> bool:
        """See Executor."""
        number = request.lora_int_id
        if number in self.worker.loras.list():
            return False
        if number not in self._read_loras:
            self.read_lora(request)
        self.worker.loras.add(request, self._read_loras.pop(number).result())
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        read = self._read_loras.pop(lora_int_id, None)
        if read is not None:
            read.cancel()
        return self.worker.loras.remove(lora_int_id) or read is not None

    def list_loras(self) -> set[int]:
        """See Executor."""
        return self.worker.loras.list()

    def execute_dummy_batch(self) -> None:
        """A forward pass without effects, to warm up."""
        self.worker.execute_dummy_batch()

    def join_engines(self) -> None:
        """See SharingExecutor."""
        self.worker.expert_group.connect()

    def meet_engines(self, has_work: bool) -> bool:
        """See SharingExecutor."""
        return self.worker.expert_group.meet(has_work)

    def join_pass(self) -> None:
        """See SharingExecutor."""
        self.worker.join_pass()

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of Worker.CALLABLE on every rank; returns the results in rank order.

        Raises InvalidParameterError.
        """
        if method not in Worker.CALLABLE:
            raise InvalidParameterError(
                "method", f"must be one of {', '.join(sorted(Worker.CALLABLE))}, got {method!r}"
            )
        try:
            inspect.signature(getattr(Worker, method)).bind(self.worker, *args)
        except TypeError as error:
            raise InvalidParameterError(
                "args", f"{method} does not take {list(args)!r}: {error}"
            ) from None
        return [getattr(self.worker, method)(*args)]

    def start_trace(self, num_steps: int) -> None:
        """Records the next `num_steps` steps, which then run one after the other. No step may be in
        flight here and in `end_trace`.
        """
        self.worker.start_trace(num_steps)

    def end_trace(self) -> RanksTrace:
        """Ends the recording, and returns what there is. The first call measures the machine, which
        takes tenths of a second.
        """
        worker = self.worker
        if (tracer := worker.end_trace()) is None:
            return RanksTrace()
        functions = (
            SingleProcessExecutor.execute_model,
            Worker.execute_model,
            ModelRunner.execute_model,
        )
        places = {function.__qualname__: place_of_function(function) for function in functions}
        return RanksTrace(
            {step: [rank] for step, rank in tracer.take().items()},
            measured_limits(
                worker.device,
                worker.dtype,
                worker.config.model_config.quantization,
                worker.memory_usage()["weights_bytes"],
                worker.num_threads,
            ),
            places,
            tracer.notes,
            str(worker.cpu_isa) if worker.device.type == "cpu" else str(worker.device),
            worker.model_name,
        )

    def check_health(self) -> None:
        """Raises RuntimeError if a rank cannot run steps.

        The only rank lives in this process: it is healthy until it is shut down.
        """
        self.worker.check_health()

    def shutdown(self) -> None:
        """Frees model and cache after the step in flight. May be called twice."""
        for thread in (self._thread, self._reader):
            if thread is not None:
                thread.shutdown(cancel_futures=True)
        self._thread = self._reader = None
        self._read_loras.clear()
        self.worker.shutdown()
