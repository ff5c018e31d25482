"""RequestSession: one engine client, the text processing for it, and the requests in progress.

Must not know: how outputs are awaited: LLMEngine blocks, AsyncLLM runs in an event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..ipc.config import EngineConfig, ModelConfig
from ..ipc.counters import ClientCounters
from ..ipc.errors import EngineDeadError, InvalidParameterError, ModelLoadError
from ..ipc.messages import EngineCoreOutputs
from ..ipc.params import PoolingParams, SamplingParams
from .clients.client import EngineClient
from .clients.connect import TokenizerLoad, load_tokenizer
from .model_info.model_files import (
    NO_GENERATION_CONFIG,
    SAMPLING_KEYS,
    default_sampling_arguments,
    eos_token_ids,
    read_generation_config,
    recommended_sampling,
)
from .outputs import RequestMetrics
from .pooling_outputs import AnyOutput
from .requests.input_processor import InputProcessor, ProcessedRequest
from .requests.output_processor import OutputProcessor
from .requests.prompts import Prompt
from .telemetry.stats import Telemetry

if TYPE_CHECKING:
    from .requests.request_state import RequestState
    from .trace.trace import Trace

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
        self.telemetry = Telemetry(config, client.is_shared)
        requests = cast("dict[str, RequestState]", client.journal.requests)
        self.output_processor = OutputProcessor(
            self.tokenizer, client.ready.epoch, self.telemetry.finish, requests
        )
        self.num_inputs_refused = 0
        self._trace: Trace | None = None  # the trace that is being recorded
        self._profile: tuple[Trace, str | None] | None = None  # from start_profile on

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
            self.num_inputs_refused += 1
            raise

    async def prepared(self, prompt: Prompt) -> Prompt:
        """Returns a prompt with its images prepared, in threads; see InputProcessor.prepared."""
        try:
            return await self.input_processor.prepared(prompt)
        except InvalidParameterError:
            self.num_inputs_refused += 1
            raise

    def process_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: PoolingParams,
        **options: Any,
    ) -> list[ProcessedRequest]:
        """Processes requests that pool; see InputProcessor.process_batch."""
        try:
            return self.input_processor.process_batch(request_ids, prompts, params, **options)
        except InvalidParameterError:
            self.num_inputs_refused += 1
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
        if processed.requests_to_abort:
            self._abort_in_engine(processed.requests_to_abort)
        if self._trace is not None:
            self._trace.add(received_s, outputs, processed.request_outputs)
        return processed.request_outputs

    def abort(self, request_ids: list[str]) -> list[AnyOutput]:
        """Ends requests and returns their last outputs. Unknown ids are ignored."""
        processed = self.output_processor.abort_requests(request_ids)
        if processed.requests_to_abort:
            self._abort_in_engine(processed.requests_to_abort)
        return processed.request_outputs

    def _abort_in_engine(self, request_ids: list[str]) -> None:
        try:
            self.client.abort_requests(request_ids)
        except EngineDeadError:  # the next wait for outputs raises it
            logger.debug("the engine is gone; its requests are lost")

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def fail(self, error: EngineDeadError) -> None:
        """Ends the spans of the requests, which will not finish because the engine is gone."""
        self.telemetry.fail(error)

    @property
    def is_recording(self) -> bool:
        return self._trace is not None

    @contextmanager
    def recording(self, trace: Trace) -> Iterator[None]:
        """Adds the outputs that are taken in this context to the trace."""
        self._trace = trace
        try:
            yield
        finally:
            self._trace = None

    def begin_profile(self, profile_prefix: str | None) -> None:
        """Begins a trace of the engine's next steps, which `end_profile` ends."""
        from .trace.trace import Trace

        self._trace = Trace()
        self._profile = self._trace, profile_prefix

    def end_profile(self, result: Any, places: dict[str, str]) -> Trace:
        """Returns the trace. `result` is that of EngineCore.end_trace. `places`: see
        Trace.complete.
        """
        assert self._profile is not None
        trace, profile_prefix = self._profile
        self._profile = self._trace = None
        trace.complete(result, places)
        if profile_prefix is not None:
            trace.to_perfetto(f"{profile_prefix}.json")
        return trace

    def require_profile(self) -> None:
        if self._profile is None:
            raise InvalidParameterError("trace", "is not being recorded: start_profile first")

    def metrics(self, of_the_engine: dict[str, int]) -> dict[str, int]:
        """Returns the engine's metrics with this client's own; ipc/counters.py lists them."""
        restarts = self.client.restarts
        own = ClientCounters(
            num_inputs_refused=self.num_inputs_refused,
            num_bad_engine_frames=self.client.num_bad_frames,
            num_rejected_peers=self.client.num_rejected_peers,
            num_dropped_rows=self.output_processor.num_dropped_rows,
            num_engine_restarts=restarts.by_cause.total(),
            num_requests_resumed=restarts.num_resumed,
            num_requests_quarantined=restarts.num_quarantined,
        )
        return of_the_engine | msgspec.structs.asdict(own)

    def with_own_counters(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Returns the result of Observer.observe with this session's counters added."""
        return observation | {"counters": self.metrics(observation["counters"])}


def find_eos_ids(model_config: ModelConfig, own: int | None) -> list[int]:
    """Returns the end-of-sequence ids: `own`, the tokenizer's, comes first. Others are stop
    reasons, as in vLLM.
    """
    generation_config = read_generation_config(Path(model_config.model))
    generation_config |= model_config.override_generation_config
    found = eos_token_ids(generation_config, model_config.hf_config)
    return found if own is None else [own, *(token_id for token_id in found if token_id != own)]


def default_sampling_params(model_config: ModelConfig) -> SamplingParams:
    """Returns the defaults of SamplingParams, overridden by the configuration's `generation_config`
    and then by `override_generation_config`.
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
