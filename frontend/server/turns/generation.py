"""One request to the engine for a call: checked against the context, run, and its errors converted
to the API's format.

Must not know: the format of any API's response.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ....ipc.errors import InvalidParameterError
from ....ipc.messages import ImageItem
from ....ipc.params import PoolingParams, SamplingParams
from ...clients.client import QUARANTINED
from ...outputs import RequestMetrics, RequestOutput
from ...pooling_outputs import AnyOutput
from ...requests.prompts import IMAGES, PreparedImages
from ..http.call import HttpCall
from ..http.errors import (
    ENDS,
    ENGINE_CRASH,
    INTERNAL,
    ApiError,
    context_length_exceeded,
    invalid,
    refused,
)
from ..state import ServerState

Params = TypeVar("Params", SamplingParams, PoolingParams)


@dataclass(slots=True)
class GenerationJob:
    """One prompt of a call.

    `names` maps the engine's parameters to the body's fields, for errors; `prompt` also names the
    field of the prompt.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    text: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    # whose tokens are among the ids; None: a prompt that has no place for one
    images: list[ImageItem] | None = None


def check_context(
    state: ServerState, token_ids: list[int], params: SamplingParams, names: dict[str, str]
) -> None:
    """Raises OpenAI's errors for prompts and outputs that do not fit; otherwise the engine would
    reduce max_tokens to what fits.
    """
    max_model_len, num_prompt_tokens = state.max_model_len, len(token_ids)
    param = names.get("prompt", "prompt")
    if params.truncate_prompt_tokens is not None:
        return
    if not num_prompt_tokens:
        raise invalid(param, f"'{param}' must not be empty.")
    if num_prompt_tokens >= max_model_len:
        raise context_length_exceeded(param, max_model_len, num_prompt_tokens)


def check_room(
    state: ServerState, token_ids: list[int], max_tokens: int | None, names: dict[str, str]
) -> None:
    """Rejects an explicit output length that exceeds the context, as OpenAI and vLLM do."""
    if max_tokens is not None and len(token_ids) + max_tokens > state.max_model_len:
        raise context_length_exceeded(
            names.get("prompt", "prompt"), state.max_model_len, len(token_ids), max_tokens
        )


@contextmanager
def running_id(state: ServerState, wanted: str) -> Iterator[str]:
    """Gives the id of a request of the engine: `wanted`, or one like it while a request has that.
    A proxy that retries sends the same x-request-id while the first attempt still runs.
    """
    request_id = wanted
    while request_id in state.running_ids:
        request_id = f"{wanted}-{secrets.token_hex(4)}"
    state.running_ids.add(request_id)
    try:
        yield request_id
    finally:
        state.running_ids.discard(request_id)


async def run(
    state: ServerState,
    call: HttpCall,
    job: GenerationJob,
    take_at_once: Callable[[RequestOutput], bool] | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yields the engine's outputs for one prompt.

    Closing the generator, or cancelling its reader, aborts the request. Raises ApiError.

    `take_at_once` is as for AsyncLLM.generate.
    """
    engine = state.ready_engine()
    salt = job.cache_salt
    if state.server_config.salt_per_key and call.tenant:
        salt = f"{call.tenant}:{salt or ''}"
    prompt = (
        {"prompt_token_ids": job.token_ids}
        | ({"prompt": job.text} if job.text is not None else {})
        | ({"cache_salt": salt} if salt else {})
        | ({} if job.images is None else {IMAGES: PreparedImages(job.images)})
    )
    last = None
    metrics: list[RequestMetrics] = []
    slot = state.ready_admission().slot(
        call.tenant, id(call), job.params.n, len(job.token_ids), job.priority, call.deadline
    )
    more = {
        "priority": job.priority,
        "owner": call.tenant,
        "owner_weight": call.weight,
        "on_submitted": metrics.append,
        "take_at_once": take_at_once,
        "lora_request": call.lora_request,
    }
    num_bytes = sum(len(item.pixels.data) for item in job.images or ())
    with (
        state.held_pixels.holding(call.tenant, num_bytes),
        running_id(state, job.request_id) as request_id,
    ):
        try:
            async with slot:
                params = until(call.deadline, job.params)
                async with aclosing(engine.generate(prompt, params, request_id, **more)) as outputs:
                    async for last in outputs:
                        if last.error is not None:
                            raise failure(last, job.names)
                        yield last
        except InvalidParameterError as error:
            raise refused(error.parameter, error.problem, job.names) from None
        finally:
            if metrics:
                # Without a final output, the client has disconnected.
                reason = (last and finish_reason(last)) or ("error" if engine.errored else "abort")
                state.request_log.add(request_id, metrics[0], summary_of(state, call, reason))
                state.meters.request_ended(job.params, metrics[0], reason, slot.queued_s)


def summary_of(state: ServerState, call: HttpCall, reason: str) -> dict[str, Any]:
    """Returns what the log of requests says of one, besides its times."""
    return {
        "x_request_id": call.request_id,
        "model": call.lora_request.lora_name if call.lora_request else state.model_name,
        "finish_reason": reason,
    }


def until(deadline: float | None, params: Params) -> Params:
    """Returns `params` with what is left until the deadline as timeout_s."""
    if deadline is None:
        return params
    timeout_s = max(0.001, deadline - time.monotonic())
    return msgspec.structs.replace(params, timeout_s=timeout_s)


def finish_reason(output: RequestOutput) -> str | None:
    """Returns the last finish reason in this output. With n > 1 each completion has its own."""
    return next(
        (
            completion.finish_reason
            for completion in reversed(output.outputs)
            if completion.finish_reason
        ),
        None,
    )


def failure(output: AnyOutput, names: dict[str, str]) -> ApiError:
    """Returns the error of a request that the engine ended: a user error with the parameter's name,
    or an internal error.
    """
    if output.error == QUARANTINED:
        return ApiError(500, ENGINE_CRASH, code="engine_crash", cause=output.error)
    if output.error is None or output.error_parameter is None:
        cause = output.error or "it ended without a result"
        return ApiError(500, INTERNAL, code="internal_error", cause=cause)
    problem = output.error.removeprefix(f"{output.error_parameter}: ")
    return refused(output.error_parameter, problem, names)


async def merged(
    runs: list[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yields (index of the run, output) of several concurrent runs as they arrive. The first
    failure ends all of them.
    """
    if len(runs) == 1:
        async with aclosing(runs[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | None, BaseException | None]] = asyncio.Queue(
        maxsize=2 * len(runs)
    )

    async def pump(index: int, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        error = None
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    await queue.put((index, output, None))
        except ENDS:
            raise
        except BaseException as failed:
            error = failed
        await queue.put((index, None, error))

    tasks = [asyncio.ensure_future(pump(index, outputs)) for index, outputs in enumerate(runs)]
    try:
        num_running = len(tasks)
        while num_running:
            index, output, error = await queue.get()
            if error is not None:
                raise error
            if output is None:
                num_running -= 1
            else:
                yield index, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
