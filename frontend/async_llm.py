"""AsyncLLM: requests as async iterators, for servers and programs that run many requests in one
event loop.

Must not know: how a client connects to its engine, HTTP, torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from ..ipc.checks import INT64_MAX, require_int
from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError
from ..ipc.lora import LoRARequest
from ..ipc.params import PoolingParams, SamplingParams
from ..ipc.threads import in_thread
from .clients.client import EngineClient
from .clients.connect import TokenizerLoad, connect_async
from .clients.own_loop import run_once
from .engine_args import AsyncLLMArguments, EngineArgs, takes
from .engine_calls import AsyncCalls
from .outputs import RequestMetrics, RequestOutput
from .pooling_outputs import AnyOutput, PoolingRequestOutput
from .requests.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, first_params
from .requests.image_inputs import ImageInputs
from .requests.input_processor import ProcessedRequest
from .requests.prompts import Prompt, has_images
from .requests.request_stream import BatchStream, RequestStream
from .session import RequestSession

logger = logging.getLogger(__name__)
# A batch within both limits is tokenized at once, which takes about one millisecond.
SHORT_CHARACTERS = 4000
SHORT_BATCH = 32


class AsyncLLM(AsyncCalls):
    """Serves one event loop.

    One task, started with the first request, reads the engine's outputs and passes them to the
    readers.

    config: resolved. client: for asyncio; AsyncLLM owns it. tokenizer_load: see
    clients/connect.py.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        tokenizer_load: TokenizerLoad | None = None,
    ):
        self.config = config
        self.client = client
        self.session = RequestSession(config, client, tokenizer_load)
        # by request id, from the start of `generate` to its end
        self._streams: dict[str, RequestStream | BatchStream] = {}
        self._output_task: asyncio.Task | None = None
        self._dead_error: EngineDeadError | None = None
        self._last_output_time = 0.0  # time.monotonic()
        self._max_outputs_per_s = 0
        self._idle = asyncio.Event()  # set while no stream is open
        self._idle.set()

    @classmethod
    @takes(AsyncLLMArguments)
    def from_engine_args(
        cls,
        engine_args: EngineArgs | None = None,
        engine: str = "process",
        *,
        model: str = "bundled",
        **arguments: Any,
    ) -> AsyncLLM:
        """Blocks until the engine is ready.

        The model is given by its arguments or as EngineArgs. `engine` is "process" (a child),
        "inproc", or the address of a daemon ("ipc://...").
        """
        if engine_args is None:
            engine_args = EngineArgs(model, **arguments)
        elif arguments or model != "bundled":
            raise TypeError("from_engine_args takes EngineArgs or its arguments, not both")
        config, client, tokenizer_load = run_once(connect_async(engine_args, engine))
        try:
            return cls(config, client, tokenizer_load)
        except BaseException:
            client.shutdown()
            raise

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        engine: str = "process",
        on_progress: Callable[[str, float], None] | None = None,
    ) -> AsyncLLM:
        """Does what from_engine_args does, without blocking the running loop.

        Raises the engine's own exception if it cannot start.

        `on_progress(stage, fraction)` is called in the loop's thread with fractions from 0 to 1.
        The stages are, in order: "model files" (found or downloaded), "start" (the engine's
        process), "import" (its libraries), "load weights", "kv cache", "tokenizer". An engine
        reports only the stages that it has. A daemon that is already loading reports only the
        remaining ones.

        Loading a large tokenizer.json still blocks the loop, because the tokenizer library holds
        the GIL: 0.5 s for 150,000 tokens.

        If cancelled, it ends the child process, or stops loading in this process at the next
        progress report, before it raises. A download continues.
        """
        report = on_progress or (lambda stage, fraction: None)
        config, client, tokenizer_load = await connect_async(args, engine, report)
        try:
            report("tokenizer", 0.0)
            llm = await in_thread(lambda: cls(config, client, tokenizer_load))
            report("tokenizer", 1.0)
            # from here on the task detects the engine's death even without requests
            llm._ensure_output_task()
            return llm
        except BaseException:
            await client.shutdown_async()
            raise

    @property
    def images(self) -> ImageInputs:
        """What prepares the images of prompts."""
        return self.session.input_processor.images

    def set_record_token_times(self, is_wanted: bool) -> None:
        """Sets whether RequestMetrics.token_ts records the time of each token. It is off by default
        and costs one float per token.
        """
        self.session.output_processor.set_record_token_times(is_wanted)

    @property
    def max_outputs_per_s(self) -> int:
        """See set_max_outputs_per_s."""
        return self._max_outputs_per_s

    def set_max_outputs_per_s(self, number: int) -> None:
        """Sets the approximate number of outputs per second for all readers together. With 0 (the
        default), each token is one output.

        Otherwise each of n streams gets the tokens of several steps in one output, every n /
        max_outputs_per_s seconds, but at least every 50 ms. Below 5 ms each token is sent at once.
        First tokens and ends reported by the engine are never delayed. Stop strings are detected
        later by the same interval. It is meant for servers, where most of a token's cost is the
        cost of its output.
        """
        require_int("max_outputs_per_s", number, 0, INT64_MAX)
        self._max_outputs_per_s = number
        self.client.pace_outputs(number)

    # ------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        owner: str = "",
        owner_weight: float = 1.0,
        trace_headers: dict[str, str] | None = None,
        on_submitted: Callable[[RequestMetrics], None] | None = None,
        take_at_once: Callable[[RequestOutput], bool] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's outputs in the form of sampling_params.output_kind. The last output
        is finished.

        Raises InvalidParameterError before anything is sent, and EngineDeadError when the engine is
        gone. Leaving the iterator, by cancellation or `aclose`, aborts the request. If the reader
        is slower than the engine, several steps are merged into one output.

        owner, owner_weight, trace_headers, lora_request: as for LLMEngine.add_request.
        on_submitted: called with the metrics that all outputs carry; they are thus available for a
        request that ends before its first output.
        take_at_once: called with each output while the reader waits, except for errors and the last
        output. If it returns True, the output is consumed and the iterator does not yield it. This
        saves a server one task switch per token.
        """
        self.check_health()
        if has_images(prompt):
            prompt = await self.session.prepared(prompt)
        request = self.session.process(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            owner=owner,
            owner_weight=owner_weight,
            lora_request=lora_request,
        )
        if lora_request is not None and lora_request.load_inplace:
            await self.add_lora(lora_request)
        stream = RequestStream(take_at_once)
        metrics = self._submit(request, trace_headers, stream)
        try:
            if on_submitted is not None:
                on_submitted(metrics)
            while not (output := await stream.get()).finished:
                yield output
        finally:
            if self._end_own_stream(request_id, stream):
                self._abort([request_id])
        yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        owner: str = "",
        owner_weight: float = 1.0,
        prompt_name: str | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yields the one output of a request that pools. Parameters and errors are those of
        `generate`, and `prompt_name` is that of LLM.encode.
        """
        [output] = await self.encode_batch(
            [prompt],
            pooling_params,
            [request_id],
            priority=priority,
            owner=owner,
            owner_weight=owner_weight,
            prompt_name=prompt_name,
            trace_headers=trace_headers,
        )
        yield output

    async def encode_batch(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams,
        request_ids: Sequence[str],
        *,
        trace_headers: dict[str, str] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Returns the outputs of several requests that pool, with the same parameters, in their
        order.

        The texts are tokenized together, in a thread unless they are short. Raises
        InvalidParameterError, with the index of the request, before anything is sent, and
        EngineDeadError when the engine is gone. `options` are those of
        InputProcessor.process_batch.
        """
        self.check_health()
        read = partial(self.session.process_batch, request_ids, prompts, pooling_params, **options)
        num_characters = sum(len(p) for p in prompts if isinstance(p, str))
        is_short = num_characters < SHORT_CHARACTERS and len(prompts) <= SHORT_BATCH
        is_short = is_short and not any(map(has_images, prompts))
        requests = read() if is_short else await asyncio.to_thread(read)
        return await self.run_batch(requests, trace_headers)

    async def run_batch(
        self,
        requests: Sequence[ProcessedRequest],
        trace_headers: dict[str, str] | None = None,
        on_submitted: Callable[[RequestMetrics], None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Does the second half of encode_batch. It submits the requests in windows, so that others
        come between them. If it is cancelled, all are aborted.

        on_submitted: called with the metrics of each request, in their order.
        """
        self.check_health()
        batch, unfinished, num_submitted = BatchStream(), set(), 0
        window = 2 * self.config.num_seqs_at_once
        try:
            while len(batch.outputs) < len(requests):
                while num_submitted < len(requests) and len(unfinished) < window:
                    request = requests[num_submitted]
                    metrics = self._submit(request, trace_headers, batch)
                    unfinished.add(request.request_id)
                    num_submitted += 1
                    if on_submitted is not None:
                        on_submitted(metrics)
                for request_id in await batch.wait():
                    unfinished.discard(request_id)
                    self._end_own_stream(request_id, batch)
        finally:
            if unfinished:
                for request_id in unfinished:
                    self._end_own_stream(request_id, batch)
                self._abort(list(unfinished))
        return [batch.outputs[request.request_id] for request in requests]

    def _submit(
        self,
        request: ProcessedRequest,
        trace_headers: dict[str, str] | None,
        stream: RequestStream | BatchStream,
    ) -> RequestMetrics:
        self._ensure_output_task()
        metrics = self.session.submit(request, trace_headers)
        self._streams[request.request_id] = stream
        self._idle.clear()
        return metrics

    def _end_own_stream(self, request_id: str, stream: RequestStream | BatchStream) -> bool:
        """Returns False if the id was reused after an abort."""
        if self._streams.get(request_id) is not stream:
            return False
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()
        return True

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """Returns the params.beam_width most likely continuations of the prompt, best first.

        Each step is submitted as ordinary requests.
        """
        if has_images(prompt):
            prompt = await self.session.prepared(prompt)
        request = self.session.input_processor.process_inputs(
            request_id, prompt, first_params(params), lora_request=lora_request
        )
        lora_request = request.core_request.lora_request  # not loaded again for each step
        search, num_steps = BeamSearch(request, params, self.config.model_config), 0
        while not search.is_done:
            step = [
                self._last(p, search.step_params, f"{request_id}-{num_steps}-{i}", lora_request)
                for i, p in enumerate(search.step_prompts)
            ]
            tasks = [asyncio.ensure_future(last) for last in step]
            try:
                search.advance(await asyncio.gather(*tasks))
            finally:  # after a failure or a cancellation, end the requests of the other beams too
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            num_steps += 1
        return search.output(self.tokenizer)

    async def _last(
        self, prompt: Prompt, params: SamplingParams, request_id: str, lora: LoRARequest | None
    ) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in self.generate(prompt, params, request_id, lora_request=lora):
            last = output
        assert last is not None  # a stream ends with a finished output, or raises
        return last

    async def abort(self, request_id: str | list[str]) -> None:
        """Ends requests. Unknown ids are ignored.

        Their iterators yield a last output with finish_reason "abort".
        """
        self._abort([request_id] if isinstance(request_id, str) else request_id)

    def _abort(self, request_ids: list[str]) -> None:
        self._deliver(self.session.abort(request_ids))

    def has_unfinished_requests(self) -> bool:
        return self.session.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.session.output_processor.num_unfinished_requests()

    async def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Waits until every stream has been read to its end or closed. Returns False if some are
        still open after `timeout_s`.

        It does not stop or abort requests: to drain, the caller rejects new requests and aborts the
        remaining ones.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------ outputs

    def _ensure_output_task(self) -> None:
        if self._output_task is None:
            self._output_task = asyncio.get_running_loop().create_task(
                self._read_outputs(), name="quire outputs"
            )

    async def _read_outputs(self) -> None:
        try:
            while True:
                outputs = await self.client.get_output_async()
                self._last_output_time = time.monotonic()
                self._deliver(self.session.take(outputs))
                # let readers run after every step, even if the next outputs are already available
                await asyncio.sleep(0)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except EngineDeadError as error:
            self._fail(error)
        except BaseException as error:  # a library in Rust panics with one that is no Exception
            logger.exception("the task that reads the engine's outputs failed")
            dead = EngineDeadError(
                f"reading the engine's outputs failed: {type(error).__name__}: {error}"
            )
            dead.__cause__ = error
            self._fail(dead)

    def _deliver(self, outputs: list[AnyOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    def _fail(self, error: EngineDeadError) -> None:
        """Fails all current and future readers with the error, after the outputs before it."""
        self._dead_error = error
        self.session.fail(error)
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

    async def is_responsive(self, timeout_s: float) -> bool:
        """Returns whether the engine is running, for a readiness check.

        It returns True if outputs arrived within the last `timeout_s`, or if the engine answers a
        call within `timeout_s`. The engine answers between two steps, also while it is paused,
        asleep or idle. False therefore means that it is dead or that one step takes longer than
        `timeout_s`.
        """
        if self._dead_error is None and time.monotonic() - self._last_output_time < timeout_s:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self.call_utility("ping")
        except (TimeoutError, EngineDeadError):
            return False
        return True

    async def call_utility(self, method: str, *args: Any) -> Any:
        self.check_health()
        self._ensure_output_task()
        return await self.client.call_utility_async(method, *args)

    def shutdown(self) -> None:
        """Disconnects from the engine: a child exits, a daemon keeps running.

        Readers get EngineDeadError. May be called twice.
        """
        self._stop_reading()
        self.client.shutdown()
        self.session.telemetry.close()

    async def shutdown_async(self) -> None:
        """Shuts down without blocking the loop. A cancellation is raised when the shutdown is
        complete.
        """
        self._stop_reading()
        try:
            await self.client.shutdown_async()
        finally:
            await in_thread(self.session.telemetry.close)  # may send spans

    def _stop_reading(self) -> None:
        task, self._output_task = self._output_task, None
        if task is not None and not task.get_loop().is_closed():
            task.cancel()
        if self._dead_error is None:
            self._fail(EngineDeadError("AsyncLLM.shutdown was called"))


AsyncLLMEngine = AsyncLLM  # vLLM's other name for it
