"""/api/embed and /api/embeddings: Ollama's embeddings.

Must not know: how texts are run, the engine.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.checks import INT64_MAX
from ....ipc.params import PoolingParams
from ...pooling_outputs import PoolingRequestOutput
from ..apis.ollama_turn import plain_name
from ..apis.pooling_answer import json_rows, usage_of
from ..http.call import HttpCall, call_of
from ..http.errors import missing
from ..http.openapi import ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState
from ..turns.pooling_run import PoolingJob, pooling_of, run_pooling
from ..turns.tokenizing import check_number


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """POST /api/embed."""

    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None  # true by default: longer texts are cut at their end, else refused
    dimensions: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    options: dict[str, Any] | None = None  # without effect
    keep_alive: float | str | None = None


class OllamaEmbeddingsBody(msgspec.Struct, kw_only=True):
    """POST /api/embeddings, the older form of one text."""

    model: str | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None  # without effect
    keep_alive: float | str | None = None


class OllamaEmbedded(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[Any]
    total_duration: int  # nanoseconds, as all durations of this API
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    embedding: Any


def routes(state: ServerState) -> list[ApiRoute]:
    async def run(
        call: HttpCall, body: Any, texts: list[str], field: str, **more: Any
    ) -> list[PoolingRequestOutput]:
        truncates = getattr(body, "truncate", None) is not False
        params = PoolingParams(
            task="embed", truncate_prompt_tokens=-1, must_fit=not truncates, **more
        )
        check_number(field, texts, state.server_config.max_prompts_per_request)
        names = {"prompt": field, "prompt_token_ids": field}
        return await run_pooling(
            state, call, PoolingJob(f"embed-{call.suffix}", texts, params, names)
        )

    async def embed(request: Request) -> Response:
        """Ollama's embeddings of texts"""
        body = await read_body(request, state.server_config, OllamaEmbedBody)
        call, began = call_of(request), time.monotonic()
        model = check(state, call, body)
        texts = [body.input] if isinstance(body.input, str) else body.input or []

        def answer(rows: list[Any]) -> OllamaEmbedded:
            return OllamaEmbedded(
                model=model,
                embeddings=rows,
                total_duration=int(1e9 * (time.monotonic() - began)),
                prompt_eval_count=usage_of(outputs).prompt_tokens,
            )

        outputs: list[PoolingRequestOutput] = []
        if not texts:  # clients load a model with it
            return JsonAnswer(answer([]))
        outputs = await run(call, body, texts, "input", dimensions=body.dimensions)
        return await json_rows(outputs, answer)

    async def embeddings(request: Request) -> Response:
        """Ollama's embedding of one text"""
        body = await read_body(request, state.server_config, OllamaEmbeddingsBody)
        call = call_of(request)
        check(state, call, body)
        if not body.prompt:
            return JsonAnswer(OllamaEmbedding(embedding=[]))
        outputs = await run(call, body, [body.prompt], "prompt")
        return await json_rows(outputs, lambda rows: OllamaEmbedding(embedding=rows[0]))

    return [
        ApiRoute("/api/embed", embed, body=OllamaEmbedBody, answer=OllamaEmbedded),
        ApiRoute("/api/embeddings", embeddings, body=OllamaEmbeddingsBody, answer=OllamaEmbedding),
    ]


def check(state: ServerState, call: HttpCall, body: Any) -> str:
    """Checks the common fields and returns the model's name as requested. Raises ApiError."""
    state.ready_engine()
    if not body.model:
        raise missing("model")
    pooling_of(state, ("embed",), plain_name(body.model, state.model_names))
    call.ignored_params += [f"options.{name}" for name in body.options or ()]
    if body.keep_alive is not None and not state.is_on_demand:
        call.ignored_params.append("keep_alive")
    return body.model
