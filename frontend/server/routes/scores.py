"""/score, /rerank and their other paths: how well pairs of texts match, in vLLM's, Jina's and
Cohere's formats.

Must not know: how a model scores (frontend/requests/scoring.py), the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.errors import InvalidParameterError
from ...pooling_outputs import ScoringRequestOutput
from ...requests.scoring import (
    SCORING_TASKS,
    pair_up,
    score_prompts,
    scores_of,
    scoring_task,
)
from ..apis.pooling_answer import (
    PoolingUsage,
    RankedList,
    Score,
    ScoreList,
    listed,
    ranked,
    usage_of,
)
from ..http.bodies import FieldLimit
from ..http.call import HttpCall, call_of
from ..http.errors import invalid, missing, refused, unsupported
from ..http.openapi import ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import MEDIA, read_body
from ..state import ServerState
from ..turns.pooling_run import PoolingJob, pooling_of, run_pooling
from ..turns.tokenizing import check_number
from .pooling import PoolingFields, pooling_params

Texts = str | Annotated[list[str], Meta(min_length=1)]
# Both sides have these names, vLLM's first.
FIRST, SECOND = ("text_1", "data_1", "queries"), ("text_2", "data_2", "documents", "items")


class ScoreBody(PoolingFields, kw_only=True):
    """POST /score: scores one text with each of several, or two lists text by text."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    # These are other names of the same.
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class RerankBody(PoolingFields, kw_only=True):
    """POST /rerank: orders the documents by their relevance to the query."""

    field_limits: ClassVar[dict[str, FieldLimit]] = {}

    query: str
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None  # Cohere's; without effect


def routes(state: ServerState) -> list[ApiRoute]:
    async def score(request: Request) -> Response:
        """Scores of pairs of texts"""
        body = await read_body(request, state.server_config, ScoreBody)
        call = call_of(request)
        (first_name, first), (second_name, second) = (_side(body, n) for n in (FIRST, SECOND))
        outputs, usage = await run_scores(
            state, call, body, "score", first, second, (first_name, second_name)
        )
        data = [Score(index=i, score=o.outputs.score) for i, o in enumerate(outputs)]
        return JsonAnswer(listed(ScoreList, f"score-{call.suffix}", state, data, usage))

    async def rank(request: Request, with_documents: bool) -> Response:
        body = await read_body(request, state.server_config, RerankBody)
        call = call_of(request)
        documents = [_document(i, document) for i, document in enumerate(body.documents)]
        if body.max_tokens_per_doc is not None:
            call.ignored_params.append("max_tokens_per_doc")
        outputs, usage = await run_scores(
            state, call, body, "rerank", [body.query], documents, ("query", "documents")
        )
        if body.return_documents is not None:
            with_documents = body.return_documents
        scores = [output.outputs.score for output in outputs]
        return JsonAnswer(
            RankedList(
                id=f"rerank-{call.suffix}",
                model=state.model_name,
                usage=usage,
                results=ranked(scores, documents, body.top_n, with_documents),
                meta={"billed_units": {"search_units": 1}},
            )
        )

    async def rerank(request: Request) -> Response:
        """Documents ordered by relevance, with their texts"""
        return await rank(request, with_documents=True)

    async def cohere_rerank(request: Request) -> Response:
        """Documents ordered by relevance, as Cohere answers"""
        return await rank(request, with_documents=False)

    paths = {
        "/score": score,
        "/v1/score": score,
        "/rerank": rerank,
        "/v1/rerank": rerank,
        "/v2/rerank": cohere_rerank,
    }
    return [ApiRoute(path, handler, methods=["POST"]) for path, handler in paths.items()]


async def run_scores(
    state: ServerState,
    call: HttpCall,
    body: Any,
    kind: str,
    first: list[str],
    second: list[str],
    names: tuple[str, str],
) -> tuple[list[ScoringRequestOutput], PoolingUsage]:
    """Returns the scores of the pairs, and the tokens that were read for them."""
    pooling = pooling_of(state, SCORING_TASKS, body.model)
    most = state.server_config.max_prompts_per_request
    for name, texts in zip(names, (first, second)):
        check_number(name, texts, most)
    try:
        pairs = pair_up(first, second, names)
    except InvalidParameterError as error:
        raise invalid(error.parameter, f"'{error.parameter}' {error.problem}.") from None
    try:
        task = scoring_task(pooling)
    except InvalidParameterError as error:
        raise unsupported("model", f"The model {state.model_name!r}: {error.problem}.") from None
    prompts = score_prompts(task, first, second, pairs)
    job = PoolingJob(
        f"{kind}-{call.suffix}",
        prompts,
        pooling_params(body, task),
        {"prompt": names[1], "prompt_token_ids": names[1]},
        body.prompt_name,
        body.priority or 0,
    )
    outputs = await run_pooling(state, call, job)
    return scores_of(task, outputs, len(first), pairs, pooling), usage_of(outputs)


def _side(body: ScoreBody, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Returns the name that was used for one side of the pairs, and its texts."""
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise missing(names[0])
    if len(given) > 1:
        raise refused(given[1], f"is another name of {given[0]}; give one of them")
    texts = getattr(body, given[0])
    return given[0], [texts] if isinstance(texts, str) else texts


def _document(index: int, document: str | dict[str, Any]) -> str:
    """Returns the text of a document: itself, or its field `text`."""
    if isinstance(document, str):
        return document
    text = document.get("text")
    if media := sorted(MEDIA & document.keys()):
        name = f"documents[{index}].{media[0]}"
        raise unsupported(name, f"'{name}' is not supported: documents are texts.")
    if not isinstance(text, str):
        raise invalid(
            f"documents[{index}]",
            f"'documents[{index}]' must be a text, or an object whose 'text' is one.",
            "invalid_type",
        )
    return text
