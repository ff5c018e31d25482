"""AsyncLLM: requests as async iterators, for servers and for anything that runs many requests from one event loop.
May know: the input and output processors, the client interface, asyncio.
Must not know: how a client reaches its engine, HTTP, torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError
from ..ipc.messages import SchedulerStats
from ..ipc.params import PoolingParams, SamplingParams
from .client import EngineClient
from .engine_args import EngineArgs
from .input_processor import Prompt
from .llm_engine import TextSide, connect
from .output_processor import ProcessedOutputs
from .outputs import RequestOutput
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RequestStream:
    """What one reader has not read yet, in a single place: news merge there, so a slow reader costs no more than its text."""

    def __init__(self) -> None:
        self._unread: RequestOutput | None = None
        self._error: EngineDeadError | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._unread is None:
            self._unread = output
        else:
            self._unread.merge(output)
        self._news.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        """Waits for news. What came before a failure is read before it raises."""
        await self._news.wait()
        if self._unread is None:
            raise EngineDeadError(*self._error.args) from self._error
        output, self._unread = self._unread, None
        if self._error is None:
            self._news.clear()
        return output


class AsyncLLM:
    """For one event loop. One task, begun with the first request, reads the engine's outputs and hands them to the readers.

    config: resolved. client: made with asyncio_mode=True, owned from now on.
    """

    def __init__(self, config: EngineConfig, client: EngineClient):
        self.config = config
        self.client = client
        self.stats: SchedulerStats | None = None  # the engine's, after its last step
        self.text_side = TextSide.for_config(config, client.ready.epoch)
        self._output_processor = self.text_side.output_processor
        self._streams: dict[str, RequestStream] = {}  # by request id; from generate's start to its end
        self._output_task: asyncio.Task | None = None
        self._dead_error: EngineDeadError | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs, engine: str = "process") -> AsyncLLM:
        """Blocks until the engine is ready. `engine`: "process" (a child), "inproc", or the address of a daemon ("ipc://...")."""
        config, client = connect(args, engine, asyncio_mode=True)
        try:
            return cls(config, client)
        except BaseException:
            client.shutdown()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.text_side.tokenizer

    async def get_tokenizer(self) -> Tokenizer | None:
        return self.text_side.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.text_side.default_sampling_params

    # ------------------------------------------------------------ requests

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """The request's outputs, in the form that sampling_params.output_kind asks for; the last one is finished.

        Raises InvalidParameterError before anything is sent, and EngineDeadError when the engine is gone. Leaving the iterator, by
        cancellation or `aclose`, aborts the request. A reader slower than the engine gets several steps' news in one output.
        """
        stream = self._submit(request_id, prompt, sampling_params, priority)
        try:
            while not (output := await stream.get()).finished:
                yield output
        finally:
            if self._streams.get(request_id) is stream:  # else the id has been used again after an abort
                del self._streams[request_id]
                self._abort([request_id])
        yield output

    def _submit(self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, priority: int) -> RequestStream:
        self.check_health()
        request = self.text_side.input_processor.process_inputs(request_id, prompt, params, priority=priority)
        self._output_processor.add_request(request)
        stream = self._streams[request_id] = RequestStream()
        try:
            self._ensure_output_task()
            self.client.add_request(request.core_request)
        except BaseException:
            del self._streams[request_id]
            self._output_processor.abort_requests([request_id])
            raise
        return stream

    async def abort(self, request_id: str | list[str]) -> None:
        """Ends requests; unknown ids are ignored. Their iterators give a last output with finish_reason "abort"."""
        self._abort([request_id] if isinstance(request_id, str) else request_id)

    def _abort(self, request_ids: list[str]) -> None:
        try:
            self._deliver(self._output_processor.abort_requests(request_ids))
        except EngineDeadError:
            logger.debug("the engine is gone, and its requests with it")

    def has_unfinished_requests(self) -> bool:
        return self._output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self._output_processor.num_unfinished_requests()

    # ------------------------------------------------------------ outputs

    def _ensure_output_task(self) -> None:
        if self._output_task is None:
            self._output_task = asyncio.get_running_loop().create_task(self._read_outputs(), name="quire outputs")

    async def _read_outputs(self) -> None:
        try:
            while True:
                outputs = await self.client.get_output_async()
                self.stats = outputs.stats or self.stats
                self._deliver(self._output_processor.process_outputs(outputs))
                await asyncio.sleep(0)  # readers run after every step, even if the next outputs are there already
        except asyncio.CancelledError:
            raise
        except EngineDeadError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the task that reads the engine's outputs failed")
            dead = EngineDeadError(f"reading the engine's outputs failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self._fail(dead)

    def _deliver(self, processed: ProcessedOutputs) -> None:
        for output in processed.request_outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)
        if processed.requests_to_abort:
            self.client.abort_requests(processed.requests_to_abort)

    def _fail(self, error: EngineDeadError) -> None:
        """Every reader, now and later, gets the error."""
        self._dead_error = error
        for stream in self._streams.values():
            stream.fail(error)

    # ------------------------------------------------------------ the engine itself

    @property
    def errored(self) -> bool:
        return self._dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._dead_error

    def check_health(self) -> None:
        """Raises EngineDeadError, with the cause, when the engine is gone."""
        if self._dead_error is not None:
            raise EngineDeadError(*self._dead_error.args) from self._dead_error

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Any of EngineCore.UTILITIES, by name."""
        self.check_health()
        self._ensure_output_task()
        return await self.client.call_utility_async(method, *args)

    async def reset_prefix_cache(self) -> bool:
        """Forgets the KV cache of finished prompts. False if blocks are still in use."""
        return await self.call_utility("reset_prefix_cache")

    async def get_metrics(self) -> dict[str, Any]:
        """The engine's SchedulerStats as a dict."""
        return await self.call_utility("get_metrics")

    def shutdown(self) -> None:
        """Leaves the engine: a child exits, a daemon stays. Readers get EngineDeadError. May be called twice."""
        task, self._output_task = self._output_task, None
        if task is not None and not task.get_loop().is_closed():
            task.cancel()
        if self._dead_error is None:
            self._fail(EngineDeadError("AsyncLLM.shutdown was called"))
        self.client.shutdown()
