"""LLMEngine: blocking requests and outputs, one engine step at a time.

Must not know: how a client connects to its engine, torch, progress bars.
"""

from __future__ import annotations

import logging
from typing import Any

from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError
from ..ipc.messages import SchedulerStats
from ..ipc.params import PoolingParams, SamplingParams
from .clients.client import EngineClient
from .clients.connect import TokenizerLoad, connect
from .engine_args import EngineArgs
from .model_info.model_files import find_model_directory
from .outputs import RequestOutput
from .requests.input_processor import ProcessedRequest, Prompt
from .session import RequestSession
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Call `add_request` any number of times, then `step` while `has_unfinished_requests`.

    For one thread.

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
        """`engine`: "process" (a child of this process), "inproc", or the address of a daemon
        ("ipc://...").
        """
        config, client, tokenizer_load = connect(engine_args, engine)
        try:
            return cls(config, client, tokenizer_load)
        except BaseException:
            client.shutdown()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.session.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        return self.session.tokenizer

    @property
    def stats(self) -> SchedulerStats | None:
        """Statistics of the engine after its last step."""
        return self.session.telemetry.stats

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of requests that bring none; see the configuration's
        `generation_config`.
        """
        return self.session.default_sampling_params

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
        """Checks, tokenizes and sends a request. Raises InvalidParameterError before anything is
        sent.

        `request_id` must not be the id of an unfinished request.

        `trace_headers`: the caller's trace context as HTTP headers carry it (W3C traceparent).
        Without it the current span is the parent.
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
        """The first half of add_request: checks and tokenizes without sending."""
        return self.session.process(request_id, prompt, params, **options)

    def submit(
        self, request: ProcessedRequest, trace_headers: dict[str, str] | None = None
    ) -> None:
        """The second half of add_request: registers and sends."""
        self.session.submit(request, trace_headers)

    def step(self) -> list[RequestOutput]:
        """Waits for the engine's next outputs and returns them by request. Returns [] if no request
        is unfinished.

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

    def abort_request(self, request_ids: str | list[str]) -> list[RequestOutput]:
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
        """Calls one of EngineCore.UTILITIES by name."""
        return self.client.call_utility(method, *args)

    def get_metrics(self) -> dict[str, int]:
        """Gauges and counters by name; frontend/telemetry/stats.py lists them."""
        return self.session.telemetry.metrics(self.client.call_utility("get_metrics"))

    def scheduler_state(self) -> dict[str, Any]:
        """The waiting, running and swapped requests, and whether the engine is paused or asleep."""
        return self.client.call_utility("scheduler_state")

    def observe(self, since_step: int = -1, max_blocks: int = 4096) -> dict[str, Any]:
        """The engine's last steps with their durations, its requests, and a map of the KV cache;
        see EngineCore.observe.
        """
        observation = self.client.call_utility("observe", since_step, max_blocks)
        return self.session.with_own_counters(observation)

    def set_tracer_provider(self, provider: Any) -> None:
        """Records later requests as spans of this opentelemetry.trace.TracerProvider
        (frontend/telemetry/tracing.py). None: stops recording.
        """
        self.session.telemetry.set_tracer_provider(provider)

    # The methods below act on the whole engine, including requests of other programs; core/pause.py
    # documents each.

    def pause(self, mode: str = "abort") -> None:
        """Pauses the engine. New requests wait for resume().

        mode: "abort" ends the requests of all clients; "wait" returns when they have finished;
        "keep" suspends them.
        """
        self.client.call_utility("pause", mode)

    def resume(self) -> None:
        self.client.call_utility("resume")

    def is_paused(self) -> bool:
        return self.client.call_utility("is_paused")

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Removes the KV cache of finished prompts.

        Returns False if blocks are still in use; `reset_running` preempts the requests that use
        them.
        """
        return self.client.call_utility("reset_prefix_cache", reset_running)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache (level 1), or of the weights too (level 2).

        Requests wait and continue after wake_up.
        """
        self.client.call_utility("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes the parts in `tags`, "weights" and "kv_cache"; None: all that sleep."""
        self.client.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        return self.client.call_utility("is_sleeping")

    def load_weights(self, path: str) -> None:
        """Loads other weights for the same model, from a directory or the hub.

        Raises ModelLoadError and keeps the present weights.
        """
        self.client.call_utility("load_weights", str(find_model_directory(path)))

    def collective_rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        """Calls a method of each worker (Worker.CALLABLE). Returns the results in rank order."""
        return self.client.call_utility("collective_rpc", method, args or [])

    def shutdown(self) -> None:
        """Disconnects: a child exits, a daemon keeps running. May be called twice."""
        self.client.shutdown()
        self.session.telemetry.fail(EngineDeadError("LLMEngine.shutdown was called"))
        self.session.telemetry.close()
