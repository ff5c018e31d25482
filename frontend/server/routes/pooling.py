"""/v1/embeddings, /score and /rerank: bodies are checked and then rejected with an explanation,
since the engine generates text and does not support pooling.

Must not know: the engine.

To add pooling, remove `refuse` and run each handler's texts with PoolingParams.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..http.call import read_body
from ..http.errors import unsupported
from ..http.openapi import described
from ..state import ServerState
from ..turns.sampling import TokenId

Texts = str | Annotated[list[str], Meta(min_length=1)]


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class ScoreBody(msgspec.Struct, kw_only=True):
    """POST /score: scores each of `text_1` with each of `text_2`."""

    text_1: Texts
    text_2: Texts
    model: str | None = None
    truncate_prompt_tokens: int | None = None


class RerankBody(msgspec.Struct, kw_only=True):
    """POST /rerank: orders the documents by their relevance to the query."""

    query: str
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None


def routes(state: ServerState) -> list[Route]:
    @described(body=EmbeddingBody)
    async def embeddings(request: Request) -> Response:
        """Embeddings of texts (not supported)"""
        body = await read_body(request, state.server_config, EmbeddingBody)
        refuse(state, body.model, "compute embeddings")

    @described(body=ScoreBody)
    async def score(request: Request) -> Response:
        """Scores of pairs of texts (not supported)"""
        body = await read_body(request, state.server_config, ScoreBody)
        refuse(state, body.model, "score texts")

    @described(body=RerankBody)
    async def rerank(request: Request) -> Response:
        """Documents ordered by relevance (not supported)"""
        body = await read_body(request, state.server_config, RerankBody)
        refuse(state, body.model, "rank documents")

    paths = {
        "/v1/embeddings": embeddings,
        "/score": score,
        "/v1/score": score,
        "/rerank": rerank,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
    }
    return [Route(path, handler, methods=["POST"]) for path, handler in paths.items()]


def refuse(state: ServerState, model: str | None, deed: str) -> NoReturn:
    state.ready_engine()
    name = state.check_model(model)
    raise unsupported("model", f"The model {name!r} generates text; this server cannot {deed}.")
