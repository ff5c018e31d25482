"""/v1/completions: text in, text out.
May know: generation, sampling, the shape of OpenAI's text completions.
Must not know: chat, tools, the engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...outputs import CompletionOutput, RequestOutput
from ..call import Call, call_of, read_body
from ..errors import invalid, missing, unsupported
from ..generation import Job, all_of, check_context, check_room, merged, run, tokenize
from ..sampling import SamplingBody, sampling_params
from ..sse import DONE, EventStream, Json, encode, event
from ..state import ServerState
from ..usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None  # text, texts, token ids, or lists of token ids
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def routes(state: ServerState) -> list[Route]:
    async def create(request: Request) -> Any:
        body = await read_body(request, state.server_config, CompletionBody)
        answer = await prepare(state, call_of(request), body)
        if body.stream:
            return answer.stream()
        return await answer.whole()

    return [Route("/v1/completions", create, methods=["POST"])]


async def prepare(state: ServerState, call: Call, body: CompletionBody) -> CompletionAnswer:
    """Checks everything there is to check before the engine is asked."""
    engine, model = state.ready_engine(), state.check_model(body.model)
    if body.suffix:
        raise unsupported("suffix", "This model cannot fill in the middle: 'suffix' is not supported.")
    if body.best_of not in (None, body.n or 1):
        raise unsupported("best_of", "'best_of' is not supported beyond 'n'; give 'n'.")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, engine.get_default_sampling_params(), state.server_config, max_tokens=max_tokens, logprobs=body.logprobs)
    jobs = []
    for index, prompt in enumerate(_prompts(body.prompt, state.server_config.max_prompts_per_request)):
        token_ids = await tokenize(state, prompt) if isinstance(prompt, str) else prompt
        check_context(state, token_ids, params, {})
        check_room(state, token_ids, body.max_tokens, {})
        text = prompt if isinstance(prompt, str) else None
        jobs.append(Job(f"cmpl-{call.suffix}-{index}", token_ids, params, text, body.priority or 0, body.cache_salt))
    return CompletionAnswer(state, call, body, model, jobs)


def _prompts(prompt: Any, most: int) -> list[str | list[int]]:
    """The four forms of `prompt` as a list of texts and lists of token ids."""
    if prompt is None:
        raise missing("prompt")
    is_single = isinstance(prompt, str) or bool(prompt) and isinstance(prompt[0], int)
    prompts = [prompt] if is_single else prompt
    if not all(isinstance(one, str) or isinstance(one, list) and set(map(type, one)) <= {int} for one in prompts):
        raise invalid("prompt", "'prompt' must be a string, a list of strings, a list of token ids, or a list of those.", "invalid_type")
    if not prompts:
        raise invalid("prompt", "'prompt' must not be an empty list.", "empty_array")
    if len(prompts) > most:
        raise invalid("prompt", f"'prompt' can hold at most {most} prompts, got {len(prompts)}.", "array_above_max_length")
    return prompts


class CompletionAnswer:
    """The answer to one checked body: whole or streamed."""

    def __init__(self, state: ServerState, call: Call, body: CompletionBody, model: str, jobs: list[Job]):
        self._state = state
        self._call = call
        self._body = body
        self._jobs = jobs
        self._n = body.n or 1
        self._usage = Usage()
        self._head = {
            "id": f"cmpl-{call.suffix}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": state.system_fingerprint,
        }

    def _runs(self) -> list[AsyncIterator[RequestOutput]]:
        return [run(self._state, self._call, job) for job in self._jobs]

    async def whole(self) -> Response:
        choices = []
        for index, output in enumerate(await all_of(self._runs())):
            self._usage.add(index, output)
            choices += [self._choice(index, completion) for completion in output.outputs]
        return Json(self._head | {"choices": choices, "usage": self._usage.as_openai()})

    def _choice(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": prompt_index * self._n + completion.index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": finish_reason(completion),
        }

    def stream(self) -> EventStream:
        return self._state.event_stream(self._events(), self._call)

    async def _events(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        wants_usage = bool(options and options.include_usage)
        # All that does not change from chunk to chunk is written once: a chunk is its text between two constants.
        head = encode(self._head)[:-1]
        tail = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null}' if wants_usage else b"}") + b"\n\n"
        starts: dict[int, bytes] = {}
        async with aclosing(merged(self._runs())) as outputs:
            async for prompt_index, output in outputs:
                self._usage.add(prompt_index, output)
                chunks = []
                for completion in output.outputs:
                    index = prompt_index * self._n + completion.index
                    if completion.finish_reason is not None:
                        end = {"usage": None} if wants_usage else {}
                        chunks.append(event(self._head | {"choices": [self._choice(prompt_index, completion)]} | end))
                    elif completion.text:
                        if (start := starts.get(index)) is None:
                            start = starts[index] = b"data: " + head + b',"choices":[{"index":%d,"text":' % index
                        chunks.append(start + encode(completion.text) + tail)
                if chunks:
                    yield b"".join(chunks)
        if wants_usage:
            yield event(self._head | {"choices": [], "usage": self._usage.as_openai()})
        yield DONE


def finish_reason(completion: CompletionOutput) -> str | None:
    """Only what OpenAI's list has: an aborted completion was cut short."""
    return "length" if completion.finish_reason == "abort" else completion.finish_reason
