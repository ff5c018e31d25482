"""LLMEngine: prompts in, RequestOutputs out, one step at a time, from blocking code and over any
engine client.

Must not know: how a client reaches its engine, torch, progress bars.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ipc.config import EngineConfig, ModelConfig
from ..ipc.errors import EngineDeadError, InvalidParameterError, ModelLoadError
from ..ipc.handshake import Report, report_nothing
from ..ipc.messages import SchedulerStats
from ..ipc.params import PoolingParams, SamplingParams
from ..ipc.threads import begin, in_thread
from .clients.client import EngineClient
from .engine_args import EngineArgs
from .input_processor import InputProcessor, ProcessedRequest, Prompt
from .model_info.model_files import (
    NO_GENERATION_CONFIG,
    SAMPLING_KEYS,
    default_sampling_arguments,
    eos_token_ids,
    find_model_directory,
    read_ahead,
    read_generation_config,
)
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .stats import Telemetry
from .text.tokenizer import Tokenizer
from .tracing import check_endpoint

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TextSide:
    """All that stands between text and token ids, for one model; LLMEngine and AsyncLLM hold one
    each.
    """

    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    output_processor: OutputProcessor
    default_sampling_params: SamplingParams  # of requests that give none

    @classmethod
    def for_config(
        cls, config: EngineConfig, epoch: int = 0, beside: TokenizerBeside | None = None
    ) -> TextSide:
        """Reads generation_config.json and the tokenizer, unless it is being read beside the
        engine's start. Raises ModelLoadError naming the file that is missing or corrupt.
        """
        model_config = config.model_config
        generation_config = (
            read_generation_config(Path(model_config.model))
            | model_config.override_generation_config
        )
        tokenizer = beside.result() if beside is not None else load_tokenizer(model_config)
        eos_ids = eos_token_ids(generation_config, model_config.hf_config)
        if tokenizer is not None and (own := tokenizer.eos_token_id) is not None:
            # first: the others are stop reasons, as in vLLM
            eos_ids = [own, *(token_id for token_id in eos_ids if token_id != own)]
        defaults = default_sampling_params(model_config)
        return cls(
            tokenizer,
            InputProcessor(config, tokenizer, eos_ids),
            OutputProcessor(tokenizer, epoch),
            defaults,
        )


def load_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    return (
        None
        if model_config.skip_tokenizer_init
        else Tokenizer(model_config.tokenizer or model_config.model)
    )


class TokenizerBeside:
    """Reads the tokenizer while the engine loads, and asks for the weights' files before that.

    Not while we start the engine and send it its configuration: the library that reads a tokenizer
    lets no other thread of this process run.

        this process    config ─▶ spawn ─▶ HELLO, CONFIG ─▶ tokenizer ───────────────────▶ result
        the system               weight files into the page cache
        the engine                imports ─▶ HELLO ─▶ torch ─▶ weights ─▶ KV cache ─▶ READY
    """

    def __init__(self, config: EngineConfig, on_progress: Report = report_nothing):
        self._model_config = config.model_config
        self._on_progress = on_progress
        self._tokenizer: Future[Tokenizer | None] | None = None
        if config.load_config.load_format != "dummy":
            begin(lambda: read_ahead(Path(config.model_config.model)))

    def on_progress(self, stage: str, fraction: float) -> None:
        """Of the engine's start: its first stage says that it has the configuration."""
        if self._tokenizer is None and stage != "start":
            self._tokenizer = begin(lambda: load_tokenizer(self._model_config))
        self._on_progress(stage, fraction)

    def result(self) -> Tokenizer | None:
        return (
            load_tokenizer(self._model_config)
            if self._tokenizer is None
            else self._tokenizer.result()
        )


def default_sampling_params(model_config: ModelConfig) -> SamplingParams:
    """SamplingParams' own defaults, over them what the configuration's `generation_config`
    recommends, over that the overrides.
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
    if model_config.generation_config != NO_GENERATION_CONFIG:
        directory = (
            model_config.model
            if model_config.generation_config == "auto"
            else model_config.generation_config
        )
        arguments = default_sampling_arguments(read_generation_config(Path(directory))) | arguments
    try:
        params = SamplingParams(**arguments)
    except InvalidParameterError as error:
        remedy = f'generation_config="{NO_GENERATION_CONFIG}" leaves it unread'
        raise ModelLoadError(f"generation_config.json in {directory}: {error}; {remedy}") from None
    if arguments:
        logger.info(
            "default sampling parameters: %s",
            ", ".join(f"{name}={value}" for name, value in arguments.items()),
        )
    return params


def make_client(
    config: EngineConfig,
    engine: str = "process",
    *,
    asyncio_mode: bool = False,
    on_progress: Report = report_nothing,
) -> EngineClient:
    """`engine`: "inproc" (in this process), "process" (a child of this one) or the address of a
    daemon, "ipc://...".

    `config` is resolved; with an address it is not used, the daemon's own is in
    `client.ready.config`. `on_progress` hears how far an engine in another process is.
    """
    if engine == "inproc":
        from .clients.inproc_client import InprocClient

        return InprocClient(config)
    from .clients.mp_client import MPClient

    return MPClient(config, engine, asyncio_mode=asyncio_mode, on_progress=on_progress)


Connected = tuple[EngineConfig, EngineClient, TokenizerBeside | None]


def connect(args: EngineArgs, engine: str, *, asyncio_mode: bool = False) -> Connected:
    """Starts the engine that `args` describe, or attaches to the one at the address `engine`.

    Gives its configuration and client, and the
    tokenizer that was read meanwhile, if one was.

    When attaching, arguments that are neither at their defaults nor the frontend's own must agree
    with the engine's (EngineArgs.attach_to).
    """
    check_endpoint(args.otlp_traces_endpoint)
    if engine in ("inproc", "process"):
        config = args.create_engine_config()
        beside = TokenizerBeside(config)
        return (
            config,
            make_client(config, engine, asyncio_mode=asyncio_mode, on_progress=beside.on_progress),
            beside,
        )
    client = make_client(args.tree(), engine, asyncio_mode=asyncio_mode)
    try:
        return args.attach_to(client.ready.config), client, None
    except BaseException:
        client.shutdown()
        raise


async def connect_async(args: EngineArgs, engine: str, on_progress: Report) -> Connected:
    """As connect in asyncio_mode, while the running loop goes on; see AsyncLLM.start."""
    check_endpoint(args.otlp_traces_endpoint)
    if engine not in ("inproc", "process"):
        from .clients.mp_client import MPClient

        client = await MPClient.start(args.tree(), engine, on_progress)
        try:
            return (
                await in_thread(lambda: args.attach_to(client.ready.config), may_abandon=True),
                client,
                None,
            )
        except BaseException:
            await client.shutdown_async()
            raise
    on_progress("model files", 0.0)
    config = await in_thread(args.create_engine_config, may_abandon=True)  # perhaps a download
    on_progress("model files", 1.0)
    beside = TokenizerBeside(config, on_progress)
    if engine == "inproc":
        from .clients.inproc_client import InprocClient

        return config, await InprocClient.start(config, beside.on_progress), beside
    from .clients.mp_client import MPClient

    return config, await MPClient.start(config, engine, beside.on_progress), beside


class LLMEngine:
    """`add_request` any number of times, then `step` while `has_unfinished_requests`.

    For one thread.

    config: resolved, as from EngineArgs.create_engine_config. client: owned from now on; `shutdown`
    ends it. beside: see `connect`.
    """

    def __init__(
        self, config: EngineConfig, client: EngineClient, beside: TokenizerBeside | None = None
    ):
        self.config = config
        self.client = client
        self.text_side = TextSide.for_config(config, client.ready.epoch, beside)
        self._input_processor = self.text_side.input_processor
        self._output_processor = self.text_side.output_processor
        self._telemetry = Telemetry(config, client, self._output_processor)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, engine: str = "process") -> LLMEngine:
        """`engine`: "process" (a child of this process), "inproc", or the address of a daemon
        ("ipc://...").
        """
        config, client, beside = connect(engine_args, engine)
        try:
            return cls(config, client, beside)
        except BaseException:
            client.shutdown()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.text_side.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        return self.text_side.tokenizer

    @property
    def stats(self) -> SchedulerStats | None:
        """The engine's, after its last step."""
        return self._telemetry.stats

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests are given that bring no parameters of their own: see the configuration's
        `generation_config`.
        """
        return self.text_side.default_sampling_params

    # ------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        trace_headers: dict[str, str] | None = None,
    ) -> None:
        """Raises InvalidParameterError before anything is sent.

        `request_id` must not be that of an unfinished request.

        `trace_headers`: the caller's trace context as HTTP headers carry it (W3C traceparent);
        without, its current span is the parent.
        """
        self.submit(
            self.process_inputs(
                request_id, prompt, params, arrival_time=arrival_time, priority=priority
            ),
            trace_headers,
        )

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        **options: Any,
    ) -> ProcessedRequest:
        """The first half of add_request: checks and tokenizes, and sends nothing."""
        try:
            return self._input_processor.process_inputs(request_id, prompt, params, **options)
        except InvalidParameterError:
            self._telemetry.num_inputs_refused += 1
            raise

    def submit(
        self, request: ProcessedRequest, trace_headers: dict[str, str] | None = None
    ) -> None:
        """The second half of add_request."""
        self._output_processor.add_request(request)
        self._telemetry.begin(request, trace_headers)
        try:
            self.client.add_request(request.core_request)
        except BaseException:
            self._output_processor.abort_requests([request.request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Waits for the engine's next outputs; what they mean for each request. [] when no request
        is unfinished.

        Raises EngineDeadError when the engine is gone.
        """
        if not self.has_unfinished_requests():
            return []
        try:
            outputs = self.client.get_output()
        except EngineDeadError as error:
            self._telemetry.fail(error)
            raise
        self._telemetry.take(outputs)
        processed = self._output_processor.process_outputs(outputs)
        if processed.requests_to_abort:
            self.client.abort_requests(processed.requests_to_abort)
        return processed.request_outputs

    def abort_request(self, request_ids: str | list[str]) -> list[RequestOutput]:
        """Ends requests now; unknown ids are ignored.

        Their last outputs, finish_reason "abort", are returned here and not by `step`.
        """
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        processed = self._output_processor.abort_requests(ids)
        if processed.requests_to_abort:
            self.client.abort_requests(processed.requests_to_abort)
        return processed.request_outputs

    def abort_all_requests(self) -> None:
        """For cleaning up: leaves no request behind, and does not mind if the engine is gone."""
        try:
            self.abort_request(self._output_processor.unfinished_request_ids())
        except EngineDeadError:
            logger.debug("the engine is gone, and its requests with it")

    def has_unfinished_requests(self) -> bool:
        return self._output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self._output_processor.num_unfinished_requests()

    # ------------------------------------------------------------ the engine itself

    def call_utility(self, method: str, *args: Any) -> Any:
        """Any of EngineCore.UTILITIES, by name."""
        return self.client.call_utility(method, *args)

    def get_metrics(self) -> dict[str, int]:
        """Gauges and counters by name; the table of them is in frontend/stats.py."""
        return self._telemetry.metrics(self.client.call_utility("get_metrics"))

    def scheduler_state(self) -> dict[str, Any]:
        """What waits, runs and is swapped, request by request; whether the engine is paused or
        asleep.
        """
        return self.client.call_utility("scheduler_state")

    def observe(self, since_step: int = -1, max_blocks: int = 4096) -> dict[str, Any]:
        """The engine at work: its last steps and where their time went, its requests, a map of the
        KV cache; see EngineCore.observe.
        """
        observation = self.client.call_utility("observe", since_step, max_blocks)
        return observation | {"counters": self._telemetry.metrics(observation["counters"])}

    def set_tracer_provider(self, provider: Any) -> None:
        """Requests from now on become spans of this opentelemetry.trace.TracerProvider
        (frontend/tracing.py); None: they no longer do.
        """
        self._telemetry.set_tracer_provider(provider)

    # What follows acts on the whole engine, other programs' requests included; core/pause.py says
    # what each does.

    def pause(self, mode: str = "abort") -> None:
        """ "abort": everybody's requests end; "wait": returns when they have finished; "keep": they
        freeze. New ones wait for resume().
        """
        self.client.call_utility("pause", mode)

    def resume(self) -> None:
        self.client.call_utility("resume")

    def is_paused(self) -> bool:
        return self.client.call_utility("is_paused")

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forgets the KV cache of finished prompts.

        False if blocks are still in use; `reset_running` preempts who uses them.
        """
        return self.client.call_utility("reset_prefix_cache", reset_running)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache (1), of the weights too (2).

        Requests wait, and go on after wake_up.
        """
        self.client.call_utility("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """`tags`: of "weights" and "kv_cache"; None: all that sleeps."""
        self.client.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        return self.client.call_utility("is_sleeping")

    def load_weights(self, path: str) -> None:
        """Other weights for the same model, from a directory or the hub.

        Raises ModelLoadError; then the old ones go on serving.
        """
        self.client.call_utility("load_weights", str(find_model_directory(path)))

    def collective_rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        """Calls one of the workers' own methods (Worker.CALLABLE); the results in rank order."""
        return self.client.call_utility("collective_rpc", method, args or [])

    def shutdown(self) -> None:
        """Leaves the engine: a child exits, a daemon stays. May be called twice."""
        self.client.shutdown()
        self._telemetry.fail(EngineDeadError("LLMEngine.shutdown was called"))
        self._telemetry.close()
