"""RequestSession: one engine client, the text processing for it, and the requests in progress; and
the calls that its faces share.

Must not know: how outputs are awaited: LLMEngine blocks, AsyncLLM runs in an event loop.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ipc.config import EngineConfig, ModelConfig
from ..ipc.counters import SchedulerStats
from ..ipc.errors import EngineDeadError, InvalidParameterError, ModelLoadError, QuireError
from ..ipc.lora import LoRARequest
from ..ipc.messages import EngineCoreOutputs
from ..ipc.params import PoolingParams, SamplingParams
from ..ipc.trace import MAX_STEPS
from .clients.client import EngineClient
from .clients.connect import TokenizerLoad, load_tokenizer
from .model_info.model_files import (
    NO_GENERATION_CONFIG,
    SAMPLING_KEYS,
    default_sampling_arguments,
    eos_token_ids,
    find_model_directory,
    read_generation_config,
    recommended_sampling,
)
from .outputs import RequestMetrics
from .pooling_outputs import AnyOutput
from .requests.input_processor import InputProcessor, ProcessedRequest
from .requests.lora_requests import placed
from .requests.output_processor import OutputProcessor
from .requests.prompts import Prompt
from .telemetry.stats import Telemetry
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .trace.trace import Received, Trace

logger = logging.getLogger(__name__)


class RequestSession:
    """Requests go in through `process` and `submit`, the engine's outputs through `take`.

    config: resolved. client: owned by the session. tokenizer_load: the tokenizer that `connect`
    loads. Reads generation_config.json and the tokenizer. Raises ModelLoadError naming the file
    that is missing or corrupt. No method waits for the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        tokenizer_load: TokenizerLoad | None = None,
    ):
        self.config = config
        self.client = client
        model_config = config.model_config
        self.tokenizer = (
            tokenizer_load.result() if tokenizer_load is not None else load_tokenizer(model_config)
        )
        self.default_sampling_params = default_sampling_params(model_config)
        own_eos_id = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        eos_ids = find_eos_ids(model_config, own_eos_id)
        self.input_processor = InputProcessor(config, self.tokenizer, eos_ids)
        self.output_processor = OutputProcessor(self.tokenizer, client.ready.epoch)
        client.journal = self.output_processor.unfinished
        client.has_requests = self.output_processor.has_unfinished_requests
        self.telemetry = Telemetry(config, client, self.output_processor)
        self.received: list[Received] | None = None  # while a trace is recorded
        self._profile: tuple[Trace, str | None] | None = None  # of start_profile

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        **options: Any,
    ) -> ProcessedRequest:
        """Checks and tokenizes a request. Raises InvalidParameterError. Sends nothing."""
        try:
            return self.input_processor.process_inputs(request_id, prompt, params, **options)
        except InvalidParameterError:
            self.telemetry.num_inputs_refused += 1
            raise

    def process_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: PoolingParams,
        **options: Any,
    ) -> list[ProcessedRequest]:
        """As `process`, for requests that pool; see InputProcessor.process_batch."""
        try:
            return self.input_processor.process_batch(request_ids, prompts, params, **options)
        except InvalidParameterError:
            self.telemetry.num_inputs_refused += 1
            raise

    def submit(
        self, request: ProcessedRequest, trace_headers: dict[str, str] | None = None
    ) -> RequestMetrics:
        """Registers a request and sends it; returns the metrics that its outputs will carry.

        If it cannot be sent, it is not registered. `trace_headers`: see LLMEngine.add_request.
        """
        metrics = self.output_processor.add_request(request)
        self.telemetry.begin(request, trace_headers)
        try:
            self.client.add_request(request.core_request)
        except BaseException:
            self.output_processor.abort_requests([request.request_id])
            raise
        return metrics

    def take(self, outputs: EngineCoreOutputs) -> list[AnyOutput]:
        """Converts the engine's outputs, and aborts the requests that hit a stop string."""
        received_s = time.monotonic()
        self.telemetry.take(outputs)
        processed = self.output_processor.process_outputs(outputs)
        self._abort_in_engine(processed.requests_to_abort)
        if self.received is not None:
            from .trace.trace import received

            self.received.append(received(received_s, outputs, processed.request_outputs))
        return processed.request_outputs

    def abort(self, request_ids: list[str]) -> list[AnyOutput]:
        """Ends requests and returns their last outputs. Unknown ids are ignored."""
        processed = self.output_processor.abort_requests(request_ids)
        self._abort_in_engine(processed.requests_to_abort)
        return processed.request_outputs

    def _abort_in_engine(self, request_ids: list[str]) -> None:
        if not request_ids:
            return
        try:
            self.client.abort_requests(request_ids)
        except EngineDeadError:  # which the next wait for outputs raises
            logger.debug("the engine is gone; its requests are lost")

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def fail(self, error: EngineDeadError) -> None:
        """The engine is gone: its requests will not finish."""
        self.telemetry.fail(error)

    def begin_profile(self, profile_prefix: str | None) -> None:
        """The engine records its next steps, until `end_profile`."""
        from .trace.trace import Trace

        self._profile = Trace(), profile_prefix
        self.received = self._profile[0].received

    def end_profile(self, result: Any, places: dict[str, str]) -> Trace:
        """`result`: of EngineCore.end_trace. `places`: see Trace.complete."""
        assert self._profile is not None
        (trace, profile_prefix), self._profile, self.received = self._profile, None, None
        trace.complete(result, places)
        if profile_prefix is not None:
            trace.to_perfetto(f"{profile_prefix}.json")
        return trace

    def require_profile(self) -> None:
        if self._profile is None:
            raise InvalidParameterError("trace", "is not being recorded: start_profile first")

    def with_own_counters(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The result of EngineCore.observe with this session's counters added."""
        return observation | {"counters": self.telemetry.metrics(observation["counters"])}


class SessionFace:
    """What LLM, LLMEngine and AsyncLLM share."""

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
        """The sampling parameters of requests that bring none. Unless configured otherwise
        (`generation_config`), the model's generation_config.json sets them.
        """
        return self.session.default_sampling_params

    def set_tracer_provider(self, provider: Any) -> None:
        """Records later requests as spans of this opentelemetry.trace.TracerProvider
        (frontend/telemetry/tracing.py). None: stops recording.
        """
        self.session.telemetry.set_tracer_provider(provider)

    def set_meter_provider(self, provider: Any) -> None:
        """Measures later requests with this opentelemetry.metrics.MeterProvider
        (frontend/telemetry/server_metrics.py). None: stops measuring.
        """
        self.session.telemetry.set_meter_provider(provider)


class SchedulerView:
    """The engine's scheduler as seen from outside, under vLLM's names: each attribute asks the
    engine. Nothing can be changed here.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]):
        self._state = state

    @property
    def waiting(self) -> list[str]:
        """The ids of the requests that wait, those that a pause holds back last."""
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


class BlockingCalls(SessionFace, ABC):
    """The calls of LLM and LLMEngine about the engine as a whole. Each waits for the result."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of EngineCore.UTILITIES by name."""

    def get_tokenizer(self) -> Tokenizer | None:
        return self.session.tokenizer

    def get_metrics(self) -> dict[str, int]:
        """Gauges and counters by name; ipc/counters.py lists them."""
        return self.session.telemetry.metrics(self.call_utility("get_metrics"))

    def scheduler_state(self) -> dict[str, Any]:
        """The waiting, running and swapped requests, and whether the engine is paused or asleep."""
        return self.call_utility("scheduler_state")

    def observe(self, since_step: int = -1, max_blocks: int = 4096) -> dict[str, Any]:
        """The engine's last steps with their durations, its requests, and a map of the KV cache;
        see EngineCore.observe.
        """
        observation = self.call_utility("observe", since_step, max_blocks)
        return self.session.with_own_counters(observation)

    def expert_load(self) -> dict[str, Any]:
        """The tokens that each expert of each layer was sent; see core/expert_load.py."""
        return self.call_utility("expert_load")

    @property
    def scheduler(self) -> list[SchedulerView]:
        """One view, as vLLM's engines had one scheduler for each pipeline stage."""
        return [SchedulerView(self.scheduler_state)]

    def do_log_stats(self) -> None:
        """Logs a line of statistics now."""
        self.session.telemetry.log()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Records the engine's next steps, at most 64, until stop_profile, which with
        `profile_prefix` writes PREFIX.json for ui.perfetto.dev.

        Raises InvalidParameterError while another trace is recorded.
        """
        self.call_utility("start_trace", MAX_STEPS)
        self.session.begin_profile(profile_prefix)

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
        """A context in which the engine's next `steps` steps, at most 64, are recorded: what was
        scheduled and why, and every kernel. The trace is complete when the context ends; it holds
        fewer steps if fewer were made. Tokens do not change.

        Raises InvalidParameterError for `steps`, and while another trace is recorded.
        """
        from .trace.stages import blocking_places
        from .trace.trace import Trace

        trace = Trace()
        self.call_utility("start_trace", steps)
        self.session.received = trace.received
        try:
            yield trace
        except BaseException:
            self.session.received = None
            with suppress(QuireError):  # the exception of the body is the one to raise
                self.call_utility("end_trace")
            raise
        self.session.received = None
        trace.complete(self.call_utility("end_trace"), blocking_places(self.session.client))

    # The methods below act on the whole engine, including requests of other programs; core/pause.py
    # documents each.

    def pause(self, mode: str = "abort") -> None:
        """Pauses the engine. New requests wait for resume().

        mode: "abort" ends the requests of all clients; "wait" returns when they have finished;
        "keep" suspends them.
        """
        self.call_utility("pause", mode)

    def resume(self) -> None:
        self.call_utility("resume")

    def is_paused(self) -> bool:
        return self.call_utility("is_paused")

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Removes the KV cache of finished prompts.

        Returns False if blocks are still in use; `reset_running` preempts the requests that use
        them.
        """
        return self.call_utility("reset_prefix_cache", reset_running)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache (level 1), or of the weights too (level 2).

        Requests wait and continue after wake_up.
        """
        self.call_utility("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes the parts in `tags`, "weights" and "kv_cache"; None: all that sleep."""
        self.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        return self.call_utility("is_sleeping")

    def load_weights(self, path: str) -> None:
        """Loads other weights for the same model, from a directory or the hub.

        Raises ModelLoadError and keeps the present weights.
        """
        self.call_utility("load_weights", str(find_model_directory(path)))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter before a request uses it. See core/loras.py, also for the next three.

        Raises InvalidParameterError for files that are not an adapter of this model.
        """
        return self.call_utility("add_lora", placed(lora_request))

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forgets an adapter: its requests finish, then it is freed. False: there is none."""
        return self.call_utility("remove_lora", lora_int_id)

    def list_loras(self) -> set[int]:
        """The ids of the adapters in memory."""
        return set(self.call_utility("list_loras"))

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keeps an adapter that is in memory there, until remove_lora."""
        return self.call_utility("pin_lora", lora_int_id)

    def collective_rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        """Calls a method of each worker (Worker.CALLABLE). Returns the results in rank order."""
        return self.call_utility("collective_rpc", method, args or [])

    def restart_engines(self) -> None:
        """Replaces the engine by a new process, or with data_parallel_size each in turn. Requests
        that are unfinished continue where they were, on the other engines or the next process.

        Raises EngineUsageError if the engine is not a child process that is replaced when it dies
        (on_engine_death).
        """
        self.session.client.restart_engines()


def find_eos_ids(model_config: ModelConfig, own: int | None) -> list[int]:
    """End-of-sequence ids: `own`, the tokenizer's, first. Others are stop reasons, as in vLLM."""
    generation_config = read_generation_config(Path(model_config.model))
    generation_config |= model_config.override_generation_config
    found = eos_token_ids(generation_config, model_config.hf_config)
    return found if own is None else [own, *(token_id for token_id in found if token_id != own)]


def default_sampling_params(model_config: ModelConfig) -> SamplingParams:
    """The defaults of SamplingParams, overridden by the configuration's `generation_config` and
    then by `override_generation_config`.
    """
    overrides = model_config.override_generation_config
    for key in overrides:
        if key not in SAMPLING_KEYS and key != "eos_token_id":
            known = ", ".join([*SAMPLING_KEYS, "eos_token_id"])
            raise InvalidParameterError(
                "override_generation_config", f"has the unknown key {key!r}; the keys are {known}"
            )
    arguments = default_sampling_arguments(overrides)
    try:
        SamplingParams(**arguments)
    except InvalidParameterError as error:
        raise InvalidParameterError("override_generation_config", str(error)) from None
    source = model_config.generation_config
    directory, note = model_config.model if source == "auto" else source, ""
    if source != NO_GENERATION_CONFIG:
        recommended, is_of_gguf = recommended_sampling(Path(directory))
        arguments = recommended | arguments
        if is_of_gguf:
            note = (
                "; the GGUF file names none, and these are usual for such files: "
                f'generation_config="{NO_GENERATION_CONFIG}" samples from all tokens'
            )
    try:
        params = SamplingParams(**arguments)
    except InvalidParameterError as error:
        remedy = f'generation_config="{NO_GENERATION_CONFIG}" leaves it unread'
        raise ModelLoadError(f"generation_config.json in {directory}: {error}; {remedy}") from None
    if arguments:
        logger.info(
            "default sampling parameters: %s%s",
            ", ".join(f"{name}={value}" for name, value in arguments.items()),
            note,
        )
    return params
