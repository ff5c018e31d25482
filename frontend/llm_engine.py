"""LLMEngine: prompts in, RequestOutputs out, one step at a time, from blocking code and over any engine client.
May know: the input and output processors, the client interface.
Must not know: how a client reaches its engine, torch, progress bars."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ipc.config import EngineConfig, ModelConfig
from ..ipc.errors import EngineDeadError, InvalidParameterError, ModelLoadError
from ..ipc.messages import SchedulerStats
from ..ipc.params import PoolingParams, SamplingParams
from .client import EngineClient
from .engine_args import EngineArgs
from .input_processor import InputProcessor, ProcessedRequest, Prompt
from .model_files import NO_GENERATION_CONFIG, SAMPLING_KEYS, default_sampling_arguments, eos_token_ids, read_generation_config
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TextSide:
    """All that stands between text and token ids, for one model; LLMEngine and AsyncLLM hold one each."""

    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    output_processor: OutputProcessor
    default_sampling_params: SamplingParams  # of requests that give none

    @classmethod
    def for_config(cls, config: EngineConfig, epoch: int = 0) -> TextSide:
        """Reads the tokenizer and generation_config.json. Raises ModelLoadError naming the file that is missing or corrupt."""
        model_config = config.model_config
        generation_config = read_generation_config(Path(model_config.model)) | model_config.override_generation_config
        tokenizer = None if model_config.skip_tokenizer_init else Tokenizer(model_config.tokenizer or model_config.model)
        eos_ids = eos_token_ids(generation_config, model_config.hf_config)
        if tokenizer is not None and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in eos_ids:
            eos_ids = [tokenizer.eos_token_id, *eos_ids]
        defaults = default_sampling_params(model_config)
        return cls(tokenizer, InputProcessor(config, tokenizer, eos_ids), OutputProcessor(tokenizer, epoch), defaults)


def default_sampling_params(model_config: ModelConfig) -> SamplingParams:
    """SamplingParams' own defaults, over them what the configuration's `generation_config` recommends, over that the overrides."""
    overrides = model_config.override_generation_config
    for key in overrides:
        if key not in SAMPLING_KEYS and key != "eos_token_id":
            known = ", ".join([*SAMPLING_KEYS, "eos_token_id"])
            raise InvalidParameterError("override_generation_config", f"has the unknown key {key!r}; the keys are {known}")
    arguments = default_sampling_arguments(overrides)
    try:
        SamplingParams(**arguments)
    except InvalidParameterError as error:
        raise InvalidParameterError("override_generation_config", str(error)) from None
    if model_config.generation_config != NO_GENERATION_CONFIG:
        directory = model_config.model if model_config.generation_config == "auto" else model_config.generation_config
        arguments = default_sampling_arguments(read_generation_config(Path(directory))) | arguments
    try:
        params = SamplingParams(**arguments)
    except InvalidParameterError as error:
        remedy = f'generation_config="{NO_GENERATION_CONFIG}" leaves it unread'
        raise ModelLoadError(f"generation_config.json in {directory}: {error}; {remedy}") from None
    if arguments:
        logger.info("default sampling parameters: %s", ", ".join(f"{name}={value}" for name, value in arguments.items()))
    return params


def make_client(config: EngineConfig, engine: str = "process", *, asyncio_mode: bool = False) -> EngineClient:
    """`engine`: "inproc" (in this process), "process" (a child of this one) or the address of a daemon, "ipc://...".

    `config` is resolved; with an address it is not used, the daemon's own is in `client.ready.config`.
    """
    if engine == "inproc":
        from .inproc_client import InprocClient

        return InprocClient(config)
    from .mp_client import MPClient

    return MPClient(config, engine, asyncio_mode=asyncio_mode)


def connect(args: EngineArgs, engine: str, *, asyncio_mode: bool = False) -> tuple[EngineConfig, EngineClient]:
    """Starts the engine that `args` describe, or attaches to the one at the address `engine`. Gives its configuration and client.

    When attaching, arguments that are neither at their defaults nor the frontend's own must agree with the engine's (EngineArgs.attach_to).
    """
    if engine in ("inproc", "process"):
        config = args.create_engine_config()
        return config, make_client(config, engine, asyncio_mode=asyncio_mode)
    client = make_client(args.tree(), engine, asyncio_mode=asyncio_mode)
    try:
        return args.attach_to(client.ready.config), client
    except BaseException:
        client.shutdown()
        raise


class LLMEngine:
    """`add_request` any number of times, then `step` while `has_unfinished_requests`. For one thread.

    config: resolved, as from EngineArgs.create_engine_config. client: owned from now on; `shutdown` ends it.
    """

    def __init__(self, config: EngineConfig, client: EngineClient):
        self.config = config
        self.client = client
        self.stats: SchedulerStats | None = None  # the engine's, after its last step
        self.text_side = TextSide.for_config(config, client.ready.epoch)
        self._input_processor = self.text_side.input_processor
        self._output_processor = self.text_side.output_processor

    @classmethod
    def from_engine_args(cls, args: EngineArgs, engine: str = "process") -> LLMEngine:
        """`engine`: "process" (a child of this process), "inproc", or the address of a daemon ("ipc://...")."""
        config, client = connect(args, engine)
        try:
            return cls(config, client)
        except BaseException:
            client.shutdown()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.text_side.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        return self.text_side.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests are given that bring no parameters of their own: see the configuration's `generation_config`."""
        return self.text_side.default_sampling_params

    # ------------------------------------------------------------ requests

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, arrival_time: float | None = None, priority: int = 0
    ) -> None:
        """Raises InvalidParameterError before anything is sent. `request_id` must not be that of an unfinished request."""
        self.submit(self.process_inputs(request_id, prompt, params, arrival_time=arrival_time, priority=priority))

    def process_inputs(self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, **options: Any) -> ProcessedRequest:
        """The first half of add_request: checks and tokenizes, and sends nothing."""
        return self._input_processor.process_inputs(request_id, prompt, params, **options)

    def submit(self, request: ProcessedRequest) -> None:
        """The second half of add_request."""
        self._output_processor.add_request(request)
        try:
            self.client.add_request(request.core_request)
        except BaseException:
            self._output_processor.abort_requests([request.request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Waits for the engine's next outputs; what they mean for each request. [] when no request is unfinished.

        Raises EngineDeadError when the engine is gone.
        """
        if not self.has_unfinished_requests():
            return []
        outputs = self.client.get_output()
        self.stats = outputs.stats or self.stats
        processed = self._output_processor.process_outputs(outputs)
        if processed.requests_to_abort:
            self.client.abort_requests(processed.requests_to_abort)
        return processed.request_outputs

    def abort_request(self, request_ids: str | list[str]) -> list[RequestOutput]:
        """Ends requests now; unknown ids are ignored. Their last outputs, finish_reason "abort", are returned here and not by `step`."""
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

    def reset_prefix_cache(self) -> bool:
        """Forgets the KV cache of finished prompts. False if blocks are still in use."""
        return self.client.call_utility("reset_prefix_cache")

    def get_metrics(self) -> dict[str, Any]:
        """The engine's SchedulerStats as a dict."""
        return self.client.call_utility("get_metrics")

    def shutdown(self) -> None:
        """Leaves the engine: a child exits, a daemon stays. May be called twice."""
        self.client.shutdown()
