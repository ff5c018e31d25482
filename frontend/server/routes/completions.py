"""/v1/completions: OpenAI's text completion API.

Must not know: chat, tools, the engine.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request

from ....ipc.checks import INT64_MAX
from ....ipc.params import ALL_LOGPROBS, RequestOutputKind
from ...answer_format import detect
from ..apis.completion_answer import Completion, CompletionAnswer
from ..http.call import HttpCall, call_of
from ..http.errors import invalid, unsupported
from ..http.openapi import EVENTS, ApiRoute
from ..request_body import read_body
from ..state import ServerState
from ..turns.answer_run import AnswerRun
from ..turns.generation import GenerationJob, check_context, check_room
from ..turns.response_format import json_options, structured_outputs_of
from ..turns.sampling import (
    MAX_LOGPROBS,
    SamplingBody,
    TokenId,
    check_fields,
    field_names,
    openai_fields,
    sampling_params,
)
from ..turns.tokenizing import prompts_of, tokenize_all

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None


def routes(state: ServerState) -> list[ApiRoute]:
    async def create(request: Request) -> Any:
        """OpenAI's text completions"""
        body = await read_body(request, state.server_config, CompletionBody)
        return await (await prepare(state, call_of(request), body)).respond()

    return [
        ApiRoute("/v1/completions", create, body=CompletionBody, answer=Completion, streams=EVENTS)
    ]


async def prepare(state: ServerState, call: HttpCall, body: CompletionBody) -> CompletionAnswer:
    """Checks the whole body before the engine is called."""
    state.ready_engine()
    model = state.select_model(body.model, call)
    state.check_generates()
    check_fields(body, call)
    if body.suffix:
        raise unsupported(
            "suffix", "This model cannot fill in the middle: 'suffix' is not supported."
        )
    num_runs = _num_completions(body, state.server_config.max_n)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    overrides: dict[str, Any] = {"n": num_runs}
    logprobs = body.logprobs
    if body.echo and logprobs is not None and body.prompt_logprobs != ALL_LOGPROBS:
        overrides["prompt_logprobs"] = (
            logprobs if logprobs == ALL_LOGPROBS else max(logprobs, body.prompt_logprobs or 0)
        )
    if num_runs > (body.n or 1):  # the best are chosen by their log-probabilities
        logprobs = logprobs or 0
    if max_tokens == 0:  # the engine generates at least one token, which is then omitted
        overrides |= {"n": 1, "min_tokens": 0, "output_kind": RequestOutputKind.FINAL_ONLY}
    names = field_names(body) | {"prompt_token_ids": "prompt"}
    params = sampling_params(
        state,
        openai_fields(body),
        json_options(body, state.server_config),
        max_tokens=max_tokens or 1,
        logprobs=logprobs,
        structured_outputs=structured_outputs_of(body),
        streams=body.stream,
        names=names,
        **overrides,
    )
    most = state.server_config.max_prompts_per_request
    prompts = prompts_of(body.prompt, "prompt", most, "prompts")
    jobs = []
    must_fit = params.truncate_prompt_tokens is None
    for index, token_ids in enumerate(
        await _tokenized(state, call, prompts, body.add_special_tokens is not False, must_fit)
    ):
        check_context(state, token_ids, params, names)
        if must_fit:
            check_room(state, token_ids, body.max_tokens, names)
        prompt = prompts[index]
        text = prompt if isinstance(prompt, str) else None
        request_id, priority = f"cmpl-{call.suffix}-{index}", body.priority or 0
        jobs.append(
            GenerationJob(request_id, token_ids, params, text, priority, body.cache_salt, names)
        )
    run = AnswerRun(state, call, jobs, detect(None).parser)
    return CompletionAnswer(state, call, body, model, run, gives_tokens=max_tokens > 0)


def _num_completions(body: CompletionBody, most: int) -> int:
    """Returns the number of completions to generate per prompt: `best_of`, of which the `n` best
    are returned, or `n`.
    """
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise invalid(
            "best_of",
            f"'best_of' must be at least 'n', which is {n}; got {best_of}.",
            "integer_below_min_value",
        )
    # An n that is too large is reported with the other parameters.
    if best_of > most and body.best_of is not None:
        raise invalid(
            "best_of",
            f"'best_of' must be at most {most}, got {best_of}.",
            "integer_above_max_value",
        )
    if best_of > n and body.stream:
        raise unsupported(
            "best_of",
            "'best_of' cannot be streamed: the best completions are known only at the end.",
        )
    return best_of


async def _tokenized(
    state: ServerState,
    call: HttpCall,
    prompts: list[str | list[int]],
    adds_special_tokens: bool,
    must_fit: bool,
) -> list[list[int]]:
    """Returns the token ids of each prompt. Texts are tokenized.

    With `must_fit`, a text that certainly exceeds the context is rejected before it is tokenized.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    encoded = await tokenize_all(
        state,
        call,
        texts,
        add_special_tokens=adds_special_tokens,
        param="prompt",
        must_fit=must_fit,
    )
    of_texts = iter(encoded)
    return [next(of_texts) if isinstance(prompt, str) else prompt for prompt in prompts]
