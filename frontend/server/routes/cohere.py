"""/v2/embed: Cohere's embeddings. Its /v2/rerank is in scores.py.

Must not know: how texts are run, the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.checks import INT64_MAX
from ....ipc.models.pooling import Pooling
from ....ipc.params import PoolingParams
from ..apis.pooling_answer import usage_of, values
from ..http.call import call_of
from ..http.errors import missing, unsupported
from ..http.openapi import ApiRoute
from ..http.sse import json_of
from ..request_body import read_body
from ..state import ServerState
from ..turns.pooling_run import PoolingJob, pooling_of, run_pooling
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


class CohereEmbedBody(msgspec.Struct, kw_only=True):
    """POST /v2/embed."""

    model: str | None = None
    texts: Annotated[list[str], Meta(min_length=1)] | None = None
    input_type: InputType | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    # It says what happens to texts that are too long. NONE refuses them, and by default they lose
    # their end.
    truncate: Literal["NONE", "START", "END"] | None = None
    images: list[Any] | None = None
    inputs: list[Any] | None = None
    priority: Annotated[int, Meta(ge=0, le=999)] | None = None


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


def routes(state: ServerState) -> list[ApiRoute]:
    async def embed(request: Request) -> Response:
        """Embeddings of texts, in Cohere's format"""
        body = await read_body(request, state.server_config, CohereEmbedBody)
        pooling, call = pooling_of(state, ("embed",), body.model), call_of(request)
        texts, kinds = _checked(body)
        check_number("texts", texts, state.server_config.max_prompts_per_request)
        num_kept = -1 if body.max_tokens is None else min(body.max_tokens, state.max_model_len)
        params = PoolingParams(
            task="embed",
            dimensions=body.output_dimension,
            truncate_prompt_tokens=num_kept,
            must_fit=body.truncate == "NONE",
        )
        names = {"prompt": "texts", "dimensions": "output_dimension"}
        prompt_name = _prompt_name(pooling, body.input_type)
        job = PoolingJob(
            f"embd-{call.suffix}", texts, params, names, prompt_name, body.priority or 0
        )
        outputs = await run_pooling(state, call, job)

        def answer() -> CohereEmbeddings:
            num_tokens = usage_of(outputs).prompt_tokens
            return CohereEmbeddings(
                id=f"embd-{call.suffix}",
                embeddings={
                    kind: [values(output.outputs.data, kind) for output in outputs]
                    for kind in kinds
                },
                texts=texts,
                meta={
                    "api_version": {"version": "2"},
                    "billed_units": {"input_tokens": num_tokens},
                },
            )

        return await json_of(answer, sum(output.outputs.data.size for output in outputs) // 8)

    return [ApiRoute("/v2/embed", embed, body=CohereEmbedBody, answer=CohereEmbeddings)]


def _checked(body: CohereEmbedBody) -> tuple[list[str], list[str]]:
    """Returns the texts and the types of embeddings. Raises ApiError for what is not supported."""
    for name in ("images", "inputs"):
        if getattr(body, name):
            raise unsupported(name, f"'{name}' is not supported: this model embeds texts.")
    if body.input_type == "image":
        raise unsupported("input_type", "'input_type' cannot be image: this model embeds texts.")
    if body.truncate == "START":
        raise unsupported("truncate", "'truncate' must be NONE or END.")
    if body.texts is None:
        raise missing("texts")
    kinds = list(dict.fromkeys(body.embedding_types or ["float"]))
    for kind in kinds:
        if kind not in ("float", "base64"):
            raise unsupported(
                "embedding_types", f"'embedding_types' must be float or base64, got {kind}."
            )
    return body.texts, kinds


def _prompt_name(pooling: Pooling, input_type: str | None) -> str | None:
    """Returns the model's prompt for this type of input; None stands for its default."""
    return next(
        (name for name in PROMPT_NAMES.get(input_type or "", ()) if name in pooling.prompts), None
    )
