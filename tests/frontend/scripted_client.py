"""An engine client with scripted outputs: no scheduler, no model."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
from quire.frontend.clients.client import EngineClient
from quire.frontend.clients.journal import Journal
from quire.ipc.config import EngineConfig
from quire.ipc.counters import SchedulerStats
from quire.ipc.errors import EngineDeadError
from quire.ipc.messages import (
    Array,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    PromptLogprobs,
    Ready,
    TokenLogprobs,
    child_request_id,
)
from quire.ipc.params import child_seed

Answer = list[int] | str  # the output's tokens, or the message of a failure after the first token


class ScriptedClient(EngineClient):
    """Gives each request the output that `answer(request)` returns.

    An output ends with its last token, with a stop token, or at max_tokens. A request with n > 1
    becomes n requests, as in the engine.

    `tokens_per_step` tokens come at a time. The engine is lost after `dies_after` outputs. All
    calls are recorded.
    """

    def __init__(
        self,
        config: EngineConfig,
        answer: Callable[[EngineCoreRequest], Answer],
        *,
        tokens_per_step: int = 1,
        dies_after: int | None = None,
    ):
        self.ready = Ready(config, num_blocks=1, kv_cache_bytes=1)
        self.journal = Journal()
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.rows_per_s: int | None = None  # the requested pace, which has no effect here
        self.calls: list[tuple[Any, ...]] = []
        self.num_shutdowns = 0
        self._answer = answer
        self._tokens_per_step = tokens_per_step
        self._steps_left = dies_after
        self._running: dict[str, tuple[EngineCoreRequest, Answer, int]] = {}
        self._rows: list[EngineCoreOutputs] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check_alive()
        self.requests.append(request)
        for child in children(request):
            self._running[child.request_id] = (child, self._answer(child), 0)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._check_alive()
        self.aborted += request_ids
        for running in list(self._running):
            if any(
                running == request_id or running.endswith(f"_{request_id}")
                for request_id in request_ids
            ):
                del self._running[running]
                self._rows.append(row(running, 0, [], FinishReason.ABORT))

    def pace_outputs(self, rows_per_s: int) -> None:
        self._check_alive()
        self.rows_per_s = rows_per_s

    def get_output(self) -> EngineCoreOutputs:
        self._check_alive()
        assert self._rows or self._running, "get_output with nothing to wait for"
        if self._steps_left is not None:
            self._steps_left -= 1
        rows, self._rows = self._rows, []
        rows += [self._step(*running) for running in list(self._running.values())]
        return joined(rows)

    def _step(self, request: EngineCoreRequest, answer: Answer, start: int) -> EngineCoreOutputs:
        if isinstance(answer, str) and start > 0:
            del self._running[request.request_id]
            return row(request.request_id, start, [], FinishReason.ERROR, error=answer)
        params = request.sampling_params
        ids = ([1] if isinstance(answer, str) else answer[: params.max_tokens])[start:]
        new, reason, stop_reason = ids[: self._tokens_per_step], None, None
        for i, token_id in enumerate(new):
            if token_id in request.eos_token_ids or token_id in (params.stop_token_ids or []):
                new, reason = new[: i + 1], FinishReason.STOP
                stop_reason = None if token_id in request.eos_token_ids[:1] else token_id
                break
        if reason is None and len(new) == len(ids) and not isinstance(answer, str):
            reason = FinishReason.LENGTH
        self._running[request.request_id] = (request, answer, start + len(new))
        if reason is not None:
            del self._running[request.request_id]
        at_first = {}
        if start == 0:
            at_first["num_cached_tokens"] = 5
            if params.prompt_logprobs is not None:
                at_first["prompt_logprobs"] = prompt_logprobs(
                    1, request.prompt_token_ids[1:], params.prompt_logprobs
                )
        return row(
            request.request_id,
            start,
            new,
            reason,
            stop_reason=stop_reason,
            num_logprobs=params.logprobs,
            **at_first,
        )

    async def get_output_async(self) -> EngineCoreOutputs:
        while not (self._rows or self._running):
            self._check_alive()
            await asyncio.sleep(0.001)
        return self.get_output()

    def call_utility(self, method: str, *args: Any) -> Any:
        self._check_alive()
        self.calls.append((method, *args))
        return {"called": method}

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return self.call_utility(method, *args)

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        self._steps_left = 0

    def _check_alive(self) -> None:
        if self._steps_left is not None and self._steps_left <= 0:
            raise EngineDeadError("the scripted engine is gone")


def children(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return the request itself, or one request per completion, as the engine does."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=child_request_id(request.request_id, i),
            params=msgspec.structs.replace(params, n=1, seed=child_seed(params.seed, i)),
        )
        for i in range(params.n)
    ]


def row(
    request_id: str,
    first_index: int,
    token_ids: list[int],
    reason: FinishReason | None = None,
    *,
    stop_reason: int | None = None,
    error: str | None = None,
    parameter: str | None = None,
    num_logprobs: int | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
    num_cached_tokens: int | None = None,
    epoch: int = 0,
) -> EngineCoreOutputs:
    """Return outputs with one row."""
    return EngineCoreOutputs(
        epoch=epoch,
        request_ids=[request_id],
        first_indices=[first_index],
        num_tokens=[len(token_ids)],
        token_ids=token_ids,
        finished=[] if reason is None else [Finished(0, reason, stop_reason, error, parameter)],
        logprobs=[TokenLogprobs(0, *arrays(token_ids, num_logprobs))]
        if num_logprobs is not None and token_ids
        else [],
        num_cached_tokens=[] if num_cached_tokens is None else [(0, num_cached_tokens)],
        prompt_logprobs=[] if prompt_logprobs is None else [prompt_logprobs],
    )


def prompt_logprobs(first_index: int, token_ids: list[int], k: int) -> PromptLogprobs:
    return PromptLogprobs(0, first_index, *arrays(token_ids, k))


def arrays(token_ids: list[int], k: int) -> tuple[Array, Array, Array]:
    """Return scripted log-probabilities: -t / 8 and rank 7 for token t.

    The k candidates are the tokens t+1, t+2, … with log-probabilities -1, -2, …
    """
    shape = (len(token_ids), k + 1)
    ids = array("i", [t + i for t in token_ids for i in range(k + 1)])
    values = array("f", [-t / 8 if i == 0 else float(-i) for t in token_ids for i in range(k + 1)])
    ranks = array("i", [7] * len(token_ids))
    return (
        Array("i4", shape, ids.tobytes()),
        Array("f4", shape, values.tobytes()),
        Array("i4", shape[:1], ranks.tobytes()),
    )


def joined(rows: list[EngineCoreOutputs]) -> EngineCoreOutputs:
    """Join several one-row outputs into one."""
    return EngineCoreOutputs(
        epoch=max((r.epoch for r in rows), default=0),
        request_ids=[i for r in rows for i in r.request_ids],
        first_indices=[i for r in rows for i in r.first_indices],
        num_tokens=[n for r in rows for n in r.num_tokens],
        token_ids=[t for r in rows for t in r.token_ids],
        finished=[
            msgspec.structs.replace(f, row=i) for i, r in enumerate(rows) for f in r.finished
        ],
        logprobs=[
            msgspec.structs.replace(p, row=i) for i, r in enumerate(rows) for p in r.logprobs
        ],
        num_cached_tokens=[(i, n) for i, r in enumerate(rows) for _, n in r.num_cached_tokens],
        prompt_logprobs=[
            msgspec.structs.replace(p, row=i) for i, r in enumerate(rows) for p in r.prompt_logprobs
        ],
        stats=SchedulerStats(num_running=len(rows)),
    )
