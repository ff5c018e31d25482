"""/v1/embeddings, /pooling and /classify: what a model makes of each text, in OpenAI's and vLLM's
formats.

Must not know: how texts are run, the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.checks import INT64_MAX
from ....ipc.errors import InvalidParameterError
from ....ipc.params import POOLING_TASKS, PoolingParams
from ...requests.prompts import Prompt
from ..apis.pooling_answer import (
    Classification,
    ClassificationList,
    Embedding,
    EmbeddingList,
    EncodingFormat,
    PooledData,
    PooledList,
    json_rows,
    listed,
    usage_of,
)
from ..http.call import call_of, read_body
from ..http.errors import invalid, refused
from ..http.limits import FieldLimit
from ..http.openapi import ApiRoute
from ..state import ServerState
from ..turns.pooling_run import PoolingJob, pooling_of, run_pooling
from ..turns.sampling import TokenId

FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
# Of 2048 texts of 512 tokens.
INPUT_LIMIT = FieldLimit(1_100_000, None)
Inputs = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all routes that pool share."""

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=INT64_MAX)] | None = None
    # keep this many tokens; -1: as many as the model reads
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None  # refused: its name is use_activation
    prompt_name: str | None = None  # the model's prompt to put in front of each text


class InputBody(PoolingFields, kw_only=True):
    field_limits: ClassVar[dict[str, FieldLimit]] = {"input": INPUT_LIMIT}

    input: Inputs
    encoding_format: EncodingFormat | None = None


class EmbeddingBody(InputBody, kw_only=True):
    """POST /v1/embeddings."""

    dimensions: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None


class PoolingBody(EmbeddingBody, kw_only=True):
    """POST /pooling: any task."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassifyBody(InputBody, kw_only=True):
    """POST /classify."""


def routes(state: ServerState) -> list[ApiRoute]:
    async def run(request: Request, body: Any, tasks: tuple[str, ...], kind: str) -> Any:
        """The task, and the outputs of the body's texts."""
        pooling, call = pooling_of(state, tasks, body.model), call_of(request)
        task = next(task for task in pooling.tasks if task in tasks)
        prompts = read_inputs(body.input, state.server_config.max_prompts_per_request)
        params = pooling_params(body, task, dimensions=getattr(body, "dimensions", None))
        job = PoolingJob(
            f"{kind}-{call.suffix}",
            prompts,
            params,
            {"prompt": "input", "prompt_token_ids": "input"},
            body.prompt_name,
            body.priority or 0,
        )
        return f"{kind}-{call.suffix}", await run_pooling(state, call, job)

    async def embeddings(request: Request) -> Response:
        """Embeddings of texts"""
        body = await read_body(request, state.server_config, EmbeddingBody)
        request_id, outputs = await run(request, body, ("embed",), "embd")

        def answer(rows: list[Any]) -> Any:
            data = [Embedding(index=i, embedding=row) for i, row in enumerate(rows)]
            return listed(EmbeddingList, request_id, state, data, usage_of(outputs))

        return await json_rows(outputs, answer, body.encoding_format)

    async def pool(request: Request) -> Response:
        """The result of any pooling task"""
        body = await read_body(request, state.server_config, PoolingBody)
        tasks = POOLING_TASKS if body.task is None else (body.task,)
        request_id, outputs = await run(request, body, tasks, "pool")

        def answer(rows: list[Any]) -> Any:
            data = [PooledData(index=i, data=row) for i, row in enumerate(rows)]
            return listed(PooledList, request_id, state, data, usage_of(outputs))

        return await json_rows(outputs, answer, body.encoding_format)

    async def classify(request: Request) -> Response:
        """The classes of texts"""
        body = await read_body(request, state.server_config, ClassifyBody)
        request_id, outputs = await run(request, body, ("classify",), "classify")
        labels = pooling_of(state, ("classify",), body.model).labels

        def answer(rows: list[Any]) -> Any:
            data = []
            for i, (row, output) in enumerate(zip(rows, outputs, strict=True)):
                best = int(output.outputs.data.argmax())
                data.append(
                    Classification(
                        index=i,
                        label=labels[best] if best < len(labels) else None,
                        probs=row,
                        num_classes=output.outputs.num_classes,
                    )
                )
            return listed(ClassificationList, request_id, state, data, usage_of(outputs))

        return await json_rows(outputs, answer, body.encoding_format)

    return [
        ApiRoute("/v1/embeddings", embeddings, body=EmbeddingBody, answer=EmbeddingList),
        ApiRoute("/pooling", pool, body=PoolingBody, answer=PooledList),
        ApiRoute("/classify", classify, body=ClassifyBody, answer=ClassificationList),
        ApiRoute("/v1/classify", classify, body=ClassifyBody, answer=ClassificationList),
    ]


def pooling_params(body: Any, task: str, dimensions: int | None = None) -> PoolingParams:
    """The parameters of a body with PoolingFields. Raises ApiError."""
    try:
        return PoolingParams(
            task=task,
            dimensions=dimensions,
            use_activation=body.use_activation,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            normalize=body.normalize,
        )
    except InvalidParameterError as error:
        raise refused(error.parameter, error.problem) from None


def read_inputs(inputs: Any, most: int) -> list[Prompt]:
    """Converts the four forms of `input` to a list of texts and lists of token ids."""
    if isinstance(inputs, str):
        return [inputs]
    kinds = set(map(type, inputs))
    if kinds == {int}:
        return [inputs]
    if int in kinds:
        raise invalid("input", f"'input' must be {FORMS}.", "invalid_type")
    check_number("input", inputs, most)
    return inputs


def check_number(name: str, texts: list[Any], most: int) -> None:
    if len(texts) > most:
        raise invalid(
            name,
            f"'{name}' can have at most {most} texts, got {len(texts)}.",
            "array_above_max_length",
        )
