"""/v2/embed: Cohere's embeddings of texts and images. Its /v2/rerank is in scores.py.

Must not know: how texts are run, how images are read, the engine.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.checks import INT64_MAX
from ....ipc.models.pooling import Pooling
from ....ipc.params import PoolingParams
from ...text.chat_images import Messages, image_part
from ..apis.openai_messages import MessageContent, plain_content
from ..apis.pooling_answer import usage_of, values
from ..http.call import HttpCall, call_of
from ..http.errors import invalid, missing, unsupported
from ..http.openapi import ApiRoute
from ..http.sse import json_of
from ..request_body import read_body
from ..state import ServerState
from ..turns.pooling_run import (
    PoolingJob,
    pooling_of,
    prompts_of_conversations,
    run_pooling,
)
from ..turns.tokenizing import check_number

# The keys are Cohere's input types, and the values the names that prompts of models have.
PROMPT_NAMES = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "corpus", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
InputType = Literal["search_query", "search_document", "classification", "clustering", "image"]

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class CohereInput(msgspec.Struct, kw_only=True):
    """Text and images that have one embedding."""

    content: MessageContent


class CohereEmbedBody(msgspec.Struct, kw_only=True):
    """POST /v2/embed."""

    model: str | None = None
    # Exactly one of these three; images are URLs.
    texts: Annotated[list[str], Meta(min_length=1)] | None = None
    images: Annotated[list[str], Meta(min_length=1)] | None = None
    inputs: Annotated[list[CohereInput], Meta(min_length=1)] | None = None
    input_type: InputType | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    # It says what happens to texts that are too long. NONE refuses them, and by default they lose
    # their end.
    truncate: Literal["NONE", "START", "END"] | None = None
    priority: Annotated[int, Meta(ge=0, le=999)] | None = None


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


def routes(state: ServerState) -> list[ApiRoute]:
    async def embed(request: Request) -> Response:
        """Embeddings of texts and images, in Cohere's format"""
        body = await read_body(request, state.server_config, CohereEmbedBody)
        pooling, call = pooling_of(state, ("embed",), body.model), call_of(request)
        given, kinds = _given(body, state.reads_images), _kinds(body)
        check_number(given, getattr(body, given), state.server_config.max_prompts_per_request)
        names = {"prompt": given, "dimensions": "output_dimension"}
        priority = body.priority or 0
        with ExitStack() as held:
            if body.texts is not None:
                num_kept = -1
                if body.max_tokens is not None:
                    num_kept = min(body.max_tokens, state.max_model_len)
                params = _params(body, num_kept)
                prompt_name = _prompt_name(pooling, body.input_type)
                job = PoolingJob(
                    f"embd-{call.suffix}", body.texts, params, names, prompt_name, priority
                )
            else:  # a part of an image is none, so that nothing is cut
                conversations = _conversations(body, call)
                prompts = await prompts_of_conversations(state, call, conversations, given, held)
                params = _params(body, None)
                job = PoolingJob(f"embd-{call.suffix}", prompts, params, names, priority=priority)
            outputs = await run_pooling(state, call, job)

        def answer() -> CohereEmbeddings:
            units = {"input_tokens": usage_of(outputs).prompt_tokens}
            if body.images is not None:
                units["images"] = len(body.images)
            return CohereEmbeddings(
                id=f"embd-{call.suffix}",
                embeddings={
                    kind: [values(output.outputs.data, kind) for output in outputs]
                    for kind in kinds
                },
                texts=body.texts or [],
                meta={"api_version": {"version": "2"}, "billed_units": units},
            )

        return await json_of(answer, sum(output.outputs.data.size for output in outputs) // 8)

    return [ApiRoute("/v2/embed", embed, body=CohereEmbedBody, answer=CohereEmbeddings)]


def _params(body: CohereEmbedBody, num_kept: int | None) -> PoolingParams:
    return PoolingParams(
        task="embed",
        dimensions=body.output_dimension,
        truncate_prompt_tokens=num_kept,
        must_fit=body.truncate == "NONE",
    )


def _given(body: CohereEmbedBody, reads_images: bool) -> str:
    """Returns which of the three fields has what is embedded. Raises ApiError for what is not
    supported.
    """
    for name in ("images", "inputs"):
        if getattr(body, name) and not reads_images:
            raise unsupported(name, f"'{name}' is not supported: this model embeds texts.")
    if body.input_type == "image" and not reads_images:
        raise unsupported("input_type", "'input_type' cannot be image: this model embeds texts.")
    if body.truncate == "START":
        raise unsupported("truncate", "'truncate' must be NONE or END.")
    given = [name for name in ("texts", "images", "inputs") if getattr(body, name) is not None]
    if not given:
        raise missing("texts")
    if len(given) > 1:
        raise invalid(given[1], f"Only one of '{given[0]}' and '{given[1]}' is allowed.")
    if body.max_tokens is not None and body.texts is None:
        raise unsupported("max_tokens", f"'max_tokens' must not be given with '{given[0]}'.")
    return given[0]


def _kinds(body: CohereEmbedBody) -> list[str]:
    """Returns the types of embeddings. Raises ApiError for what is not supported."""
    kinds = list(dict.fromkeys(body.embedding_types or ["float"]))
    for kind in kinds:
        if kind not in ("float", "base64"):
            raise unsupported(
                "embedding_types", f"'embedding_types' must be float or base64, got {kind}."
            )
    return kinds


def _conversations(body: CohereEmbedBody, call: HttpCall) -> list[Messages]:
    """Returns a message of the user for each image or input. Raises ApiError."""
    contents: list[Any] = [
        plain_content(one.content, f"inputs[{i}]", call, reads_images=True)
        for i, one in enumerate(body.inputs or ())
    ] or [[image_part(url, f"images[{i}]")] for i, url in enumerate(body.images or ())]
    return [[{"role": "user", "content": content}] for content in contents]


def _prompt_name(pooling: Pooling, input_type: str | None) -> str | None:
    """Returns the model's prompt for this type of input; None stands for its default."""
    return next(
        (name for name in PROMPT_NAMES.get(input_type or "", ()) if name in pooling.prompts), None
    )
