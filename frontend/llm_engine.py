"""LLMEngine: blocking requests and outputs, one engine step at a time.

Must not know: how a client connects to its engine, torch, progress bars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby, islice
from typing import Any

from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError
from ..ipc.lora import LoRARequest
from ..ipc.params import PoolingParams, SamplingParams
from .clients.client import EngineClient
from .clients.connect import TokenizerLoad, connect
from .engine_args import EngineArgs
from .engine_calls import BlockingCalls
from .pooling_outputs import AnyOutput, PoolingRequestOutput
from .requests.image_inputs import ImageInputs
from .requests.prompts import Prompt
from .session import RequestSession

CHUNK = 128  # texts that are tokenized together


class LLMEngine(BlockingCalls):
    """Call `add_request` any number of times, then `step` while `has_unfinished_requests`.

    One thread uses it.

    config: resolved, as from EngineArgs.create_engine_config. client: LLMEngine owns it; `shutdown`
    ends it. tokenizer_load: see clients/connect.py.
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

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, engine: str = "process") -> LLMEngine:
        """Blocks until the engine is ready. `engine` is "process" (a child of this process),
        "inproc", or the address of a daemon ("ipc://...").
        """
        config, client, tokenizer_load = connect(engine_args, engine)
        try:
            return cls(config, client, tokenizer_load)
        except BaseException:
            client.shutdown()
            raise

    # ------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        trace_headers: dict[str, str] | None = None,
        *,
        owner: str = "",
        owner_weight: float = 1.0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Checks, tokenizes and sends a request. Raises InvalidParameterError before anything is
        sent.

        `request_id` must not be the id of an unfinished request.

        `trace_headers`: the caller's trace context as HTTP headers carry it (W3C traceparent).
        Without it the current span is the parent.

        `owner`: for whom it is, at most 256 characters. Owners share the engine fairly, in
        proportion to `owner_weight` (0.001 to 1000); 0: in the background, it computes what others
        leave. `priority` orders the requests of one owner.

        `lora_request`: the adapter, which the engine reads if it is not in memory; with
        load_inplace it is read again now.
        """
        request = self.session.process(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            owner=owner,
            owner_weight=owner_weight,
            lora_request=lora_request,
        )
        if lora_request is not None and lora_request.load_inplace:
            self.add_lora(lora_request)
        self.session.submit(request, trace_headers)

    @property
    def images(self) -> ImageInputs:
        """What prepares the images of prompts."""
        return self.session.input_processor.images

    def step(self) -> list[AnyOutput]:
        """Waits for the engine's next outputs and returns them by request: RequestOutput, or
        PoolingRequestOutput for requests that pool. Returns [] if no request is unfinished.

        Raises EngineDeadError when the engine is gone.
        """
        if not self.has_unfinished_requests():
            return []
        try:
            outputs = self.client.get_output()
        except EngineDeadError as error:
            self.session.fail(error)
            raise
        return self.session.take(outputs)

    def abort_request(self, request_ids: str | list[str]) -> list[AnyOutput]:
        """Ends requests. Unknown ids are ignored.

        Returns their last outputs, with finish_reason "abort"; `step` does not return them.
        """
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        return self.session.abort(ids)

    def abort_all_requests(self) -> None:
        """Ends every request."""
        self.session.abort(self.session.output_processor.unfinished_request_ids())

    def has_unfinished_requests(self) -> bool:
        return self.session.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.session.output_processor.num_unfinished_requests()

    # ------------------------------------------------------------ the engine itself

    def call_utility(self, method: str, *args: Any) -> Any:
        return self.client.call_utility(method, *args)

    def shutdown(self) -> None:
        """Disconnects: a child exits, a daemon keeps running. May be called twice."""
        self.client.shutdown()
        self.session.telemetry.fail(EngineDeadError("LLMEngine.shutdown was called"))
        self.session.telemetry.close()


def run_in_windows(
    engine: LLMEngine,
    prompts: Iterable[tuple[Prompt, PoolingParams]],
    num_prompts: int | None,
    first_id: int,
    take: Callable[[int, PoolingRequestOutput], None],
    trace_headers: dict[str, str] | None = None,
    num_before: int = 0,
    **options: Any,
) -> None:
    """Runs many requests that pool, and calls `take` with each prompt's index and output, as they
    come. Texts are tokenized in chunks and submitted in windows, so that memory depends on the
    results alone.

    `num_prompts` is for error messages, and None means unknown. `num_before`, also for messages, is
    how many prompts of the caller's list precede these. The requests have the ids from `first_id`
    on. `options` are those of InputProcessor.process_batch. Raises InvalidParameterError with the
    prompt's index; prompts before it may have been computed. The caller aborts what is unfinished
    after an exception.
    """
    window = 2 * max(engine.config.num_seqs_at_once, CHUNK)
    more, num_submitted, num_taken, is_at_end = iter(prompts), 0, 0, False
    while not is_at_end or num_taken < num_submitted:
        while not is_at_end and num_submitted - num_taken <= window - CHUNK:
            chunk = list(islice(more, CHUNK))
            is_at_end = len(chunk) < CHUNK
            # process_batch takes prompts with the same parameters
            for _, some in groupby(chunk, lambda entry: id(entry[1])):
                texts, params = zip(*some)
                requests = engine.session.process_batch(
                    [str(first_id + num_submitted + i) for i in range(len(texts))],
                    texts,
                    params[0],
                    part=(num_before + num_submitted, num_prompts),
                    **options,
                )
                for request in requests:
                    engine.session.submit(request, trace_headers)
                num_submitted += len(texts)
        for output in engine.step():
            assert isinstance(output, PoolingRequestOutput)  # the caller's are the only requests
            take(int(output.request_id) - first_id, output)
            num_taken += 1
