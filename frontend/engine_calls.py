"""EngineCalls: the calls about the engine as a whole, each stated once. BlockingCalls, for LLM and
LLMEngine, waits for their results; AsyncCalls, for AsyncLLM, returns awaitables of them.

Must not know: requests, how a call reaches the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from ..ipc.counters import SchedulerStats
from ..ipc.errors import QuireError
from ..ipc.lora import LoRARequest
from ..ipc.params import SamplingParams
from ..ipc.trace import MAX_STEPS
from .clients.client import EngineClient
from .model_info.model_files import find_model_directory
from .requests.lora_requests import placed
from .requests.output_processor import OutputProcessor
from .session import RequestSession
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .trace.trace import Trace

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


class EngineCall(Protocol[Arguments, Result]):
    """The type of a call: it returns a Result, or with AsyncCalls a coroutine of one."""

    @overload
    def __get__(
        self, calls: AsyncCalls, owner: Any
    ) -> Callable[Arguments, Coroutine[Any, Any, Result]]: ...

    @overload
    def __get__(self, calls: BlockingCalls, owner: Any) -> Callable[Arguments, Result]: ...


def engine_call(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> EngineCall[Arguments, Result]:
    """Gives a method that ends with `self._call` its two types. It changes nothing else."""
    return cast(Any, method)


class SchedulerView:
    """Shows the engine's scheduler under vLLM's names: each attribute asks the engine. Nothing can
    be changed here.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]):
        self._state = state

    @property
    def waiting(self) -> list[str]:
        """Lists the ids of the requests that wait. Those that a pause holds back come last."""
        state = self._state()
        return [*state["waiting"], *state["held"]]

    @property
    def running(self) -> list[str]:
        return self._state()["running"]

    @property
    def swapped(self) -> list[str]:
        return self._state()["swapped"]

    def get_num_unfinished_requests(self) -> int:
        state = self._state()
        return sum(len(state[name]) for name in ("waiting", "held", "running", "swapped"))

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0


class EngineCalls(ABC):
    """Has the calls that LLM, LLMEngine and AsyncLLM share.

    The calls act on the whole engine, including requests of other programs.
    """

    session: RequestSession

    def __repr__(self) -> str:
        model = self.session.config.model_config
        shown = {"model": model.served_model_name or model.model, "dtype": model.dtype}
        shown |= {"quantization": model.quantization, "max_model_len": model.max_model_len}
        given = ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)
        return f"{type(self).__name__}({given})"

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.session.tokenizer

    @property
    def engine_core(self) -> EngineClient:
        """The client of the engine, under vLLM's name."""
        return self.session.client

    @property
    def output_processor(self) -> OutputProcessor:
        return self.session.output_processor

    @property
    def stats(self) -> SchedulerStats | None:
        """Statistics of the engine after its last step."""
        return self.session.telemetry.stats

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters of requests that bring none. Unless configured otherwise
        (`generation_config`), the model's generation_config.json sets them.
        """
        return self.session.default_sampling_params

    def set_tracer_provider(self, provider: Any) -> None:
        """Records later requests as spans of this opentelemetry.trace.TracerProvider
        (frontend/telemetry/tracing.py). None stops recording.
        """
        self.session.telemetry.set_tracer_provider(provider)

    def set_meter_provider(self, provider: Any) -> None:
        """Measures later requests with this opentelemetry.metrics.MeterProvider
        (frontend/telemetry/server_metrics.py). None stops measuring.
        """
        self.session.telemetry.set_meter_provider(provider)

    # ------------------------------------------------------------ calls

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of the utilities (core/utilities.py) by name."""

    @abstractmethod
    def _call(self, method: str, *args: Any, then: Callable[[Any], Any] | None = None) -> Any:
        """Returns the result of a utility, or what `then` makes of it. AsyncCalls returns a
        coroutine.
        """

    @engine_call
    def get_metrics(self) -> dict[str, int]:
        """Returns gauges and counters by name; ipc/counters.py lists them."""
        return self._call("get_metrics", then=self.session.metrics)

    @engine_call
    def scheduler_state(self) -> dict[str, Any]:
        """Returns the waiting, running and swapped requests, and whether the engine is paused or
        asleep.
        """
        return self._call("scheduler_state")

    @engine_call
    def observe(self, since_step: int = -1, max_blocks: int = 4096) -> dict[str, Any]:
        """Returns the engine's last steps with their durations, its requests, and a map of the KV
        cache; see Observer.observe.
        """
        return self._call("observe", since_step, max_blocks, then=self.session.with_own_counters)

    @engine_call
    def expert_load(self) -> dict[str, Any]:
        """Returns the tokens that each expert of each layer was sent; see Observer.expert_load."""
        return self._call("expert_load")

    @engine_call
    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Records the engine's next steps, at most 64, until stop_profile, which with
        `profile_prefix` writes PREFIX.json for ui.perfetto.dev.

        Raises InvalidParameterError while another trace is recorded.
        """
        return self._call(
            "start_trace", MAX_STEPS, then=lambda _: self.session.begin_profile(profile_prefix)
        )

    # core/pause.py documents the next ones.

    @engine_call
    def pause(self, mode: str = "abort") -> None:
        """Pauses the engine. New requests wait for resume().

        mode: "abort" ends the requests of all clients; "wait" returns when they have finished, and
        if AsyncLLM's is cancelled meanwhile, the engine stays paused; "keep" suspends them.
        """
        return self._call("pause", mode)

    @engine_call
    def resume(self) -> None:
        return self._call("resume")

    @engine_call
    def is_paused(self) -> bool:
        return self._call("is_paused")

    @engine_call
    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Removes the KV cache of finished prompts.

        Returns False if blocks are still in use; `reset_running` preempts the requests that use
        them.
        """
        return self._call("reset_prefix_cache", reset_running)

    @engine_call
    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache (level 1), or of the weights too (level 2).

        Requests wait and continue after wake_up.
        """
        return self._call("sleep", level)

    @engine_call
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes the parts in `tags`, "weights" and "kv_cache". None wakes all that sleep."""
        return self._call("wake_up", tags)

    @engine_call
    def is_sleeping(self) -> bool:
        return self._call("is_sleeping")

    @engine_call
    def load_weights(self, path: str) -> None:
        """Loads other weights for the same model, from a directory or the hub.

        Raises ModelLoadError and keeps the present weights.
        """
        return self._call("load_weights", str(find_model_directory(path)))

    @engine_call
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter before a request uses it. See core/loras.py, also for the next three.

        Raises InvalidParameterError for files that are not an adapter of this model.
        """
        return self._call("add_lora", placed(lora_request))

    @engine_call
    def remove_lora(self, lora_int_id: int) -> bool:
        """Forgets an adapter: its requests finish, then it is freed. Returns False if there is
        none.
        """
        return self._call("remove_lora", lora_int_id)

    @engine_call
    def list_loras(self) -> set[int]:
        """Returns the ids of the adapters in memory."""
        return self._call("list_loras", then=set)

    @engine_call
    def pin_lora(self, lora_int_id: int) -> bool:
        """Keeps an adapter that is in memory there, until remove_lora."""
        return self._call("pin_lora", lora_int_id)

    @engine_call
    def collective_rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        """Calls a method of each worker (Worker.CALLABLE). Returns the results in rank order."""
        return self._call("collective_rpc", method, args or [])


class BlockingCalls(EngineCalls):
    """Each call waits for its result."""

    def _call(self, method: str, *args: Any, then: Callable[[Any], Any] | None = None) -> Any:
        result = self.call_utility(method, *args)
        return result if then is None else then(result)

    def get_tokenizer(self) -> Tokenizer | None:
        return self.session.tokenizer

    @property
    def scheduler(self) -> list[SchedulerView]:
        """Holds one view, because vLLM's engines had one scheduler for each pipeline stage."""
        return [SchedulerView(self.scheduler_state)]

    def do_log_stats(self) -> None:
        """Logs a line of statistics now."""
        self.session.telemetry.log()

    def stop_profile(self) -> Trace:
        """Ends what start_profile began and returns it. Raises InvalidParameterError if it has not
        been called.
        """
        from .trace.stages import blocking_places

        self.session.require_profile()
        result = self.call_utility("end_trace")
        return self.session.end_profile(result, blocking_places(self.session.client))

    @contextmanager
    def trace(self, steps: int = 4) -> Iterator[Trace]:
        """Opens a context in which the engine's next `steps` steps, at most 64, are recorded: what
        was scheduled and why, and every kernel. The trace is complete when the context ends; it
        holds fewer steps if fewer were made. Tokens do not change.

        Raises InvalidParameterError for `steps`, and while another trace is recorded.
        """
        from .trace.stages import blocking_places
        from .trace.trace import Trace

        trace = Trace()
        self.call_utility("start_trace", steps)
        try:
            with self.session.recording(trace):
                yield trace
        except BaseException:
            with suppress(QuireError):  # the exception of the body is the one to raise
                self.call_utility("end_trace")
            raise
        trace.complete(self.call_utility("end_trace"), blocking_places(self.session.client))

    def restart_engines(self) -> None:
        """Replaces the engine by a new process, or with data_parallel_size each in turn. Requests
        that are unfinished continue where they were, on the other engines or the next process.

        Raises EngineUsageError if the engine is not a child process that is replaced when it dies
        (on_engine_death).
        """
        self.session.client.restart_engines()


class AsyncCalls(EngineCalls):
    """Each call returns a coroutine of its result. See BlockingCalls for what is not documented
    here.
    """

    async def _call(self, method: str, *args: Any, then: Callable[[Any], Any] | None = None) -> Any:
        result = await self.call_utility(method, *args)
        return result if then is None else then(result)

    async def get_tokenizer(self) -> Tokenizer | None:
        return self.session.tokenizer

    async def do_log_stats(self) -> None:
        self.session.telemetry.log()

    async def stop_profile(self) -> Trace:
        from .trace.stages import async_places

        self.session.require_profile()
        result = await self.call_utility("end_trace")
        return self.session.end_profile(result, async_places(self.session.client))

    @asynccontextmanager
    async def trace(self, steps: int = 4) -> AsyncIterator[Trace]:
        from .trace.stages import async_places
        from .trace.trace import Trace

        trace = Trace()
        await self.call_utility("start_trace", steps)
        try:
            with self.session.recording(trace):
                yield trace
        except BaseException:
            with suppress(QuireError):  # the exception of the body is the one to raise
                await self.call_utility("end_trace")
            raise
        result = await self.call_utility("end_trace")
        trace.complete(result, async_places(self.session.client))

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        """Calls `pause`, under vLLM's name. `wait_for_inflight_requests` is vLLM's former name of
        mode="wait". `clear_cache` clears the prefix cache, except with mode="keep".
        """
        await self.pause("wait" if wait_for_inflight_requests else mode)
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        await self.resume()

    async def restart_engines(self, drain_timeout_s: float = 30.0) -> None:
        """Replaces the engine by a new process, or with data_parallel_size each in turn while the
        others take requests. No request fails.

        An engine gets no new requests, and has `drain_timeout_s` seconds for those that it has;
        then they continue elsewhere. A single engine's requests continue on its next process.
        Raises EngineUsageError if this is in progress, or if the engine is not a child process that
        is replaced when it dies (on_engine_death).
        """
        await self.session.client.restart_engines_async(drain_timeout_s)
