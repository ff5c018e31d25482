"""/v1/embeddings, /pooling and /classify: what a model makes of each text, in OpenAI's and vLLM's
formats.

Must not know: how texts are run, the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.checks import INT64_MAX
from ....ipc.errors import InvalidParameterError
from ....ipc.models.pooling import Pooling
from ....ipc.params import POOLING_TASKS, PoolingParams
from ...pooling_outputs import PoolingRequestOutput
from ...requests.prompts import Prompt
from ..apis.openai_messages import OpenAIMessage, plain_messages
from ..apis.pooling_answer import (
    Classification,
    ClassificationList,
    Embedding,
    EmbeddingList,
    EncodingFormat,
    PooledData,
    PooledList,
    PoolingList,
    json_rows,
    listed,
    usage_of,
)
from ..http.bodies import FieldLimit
from ..http.call import HttpCall, call_of
from ..http.errors import invalid, missing, refused
from ..http.openapi import ApiRoute
from ..request_body import read_body
from ..state import ServerState
from ..turns.pooling_run import (
    PoolingJob,
    pooling_of,
    prompts_of_conversations,
    run_pooling,
)
from ..turns.sampling import TokenId
from ..turns.tokenizing import prompts_of

# The limit is enough for 2048 texts of 512 tokens.
INPUT_LIMIT = FieldLimit(1_100_000, None)
Inputs = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all routes that pool share."""

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=INT64_MAX)] | None = None
    # The text keeps this many tokens. -1 stands for as many as the model reads.
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None  # refused: its name is use_activation
    prompt_name: str | None = None  # the model's prompt to put in front of each text


class InputBody(PoolingFields, kw_only=True):
    field_limits: ClassVar[dict[str, FieldLimit]] = {"input": INPUT_LIMIT}

    input: Inputs | None = None
    # In place of `input`: a conversation, which becomes one text. Its messages may have images.
    messages: Annotated[list[OpenAIMessage], Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None  # of `messages`; false by default
    encoding_format: EncodingFormat | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Returns what may be done with the texts. The model chooses."""
        raise NotImplementedError


class EmbeddingBody(InputBody, kw_only=True):
    """POST /v1/embeddings."""

    dimensions: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("embed",)


class PoolingBody(EmbeddingBody, kw_only=True):
    """POST /pooling: any task."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return POOLING_TASKS if self.task is None else (self.task,)


class ClassifyBody(InputBody, kw_only=True):
    """POST /classify."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("classify",)


def routes(state: ServerState) -> list[ApiRoute]:
    async def embeddings(request: Request) -> Response:
        """Embeddings of texts"""
        return await pooled(state, request, EmbeddingBody, "embd", EmbeddingList, _embedding)

    async def pool(request: Request) -> Response:
        """The result of any pooling task"""
        return await pooled(state, request, PoolingBody, "pool", PooledList, _pooled_data)

    async def classify(request: Request) -> Response:
        """The classes of texts"""
        kind = "classify"
        return await pooled(state, request, ClassifyBody, kind, ClassificationList, _classification)

    return [
        ApiRoute("/v1/embeddings", embeddings, body=EmbeddingBody, answer=EmbeddingList),
        ApiRoute("/pooling", pool, body=PoolingBody, answer=PooledList),
        ApiRoute("/classify", classify, body=ClassifyBody, answer=ClassificationList),
        ApiRoute("/v1/classify", classify, body=ClassifyBody, answer=ClassificationList),
    ]


async def pooled(
    state: ServerState,
    request: Request,
    body_type: type[InputBody],
    kind: str,
    list_type: type[PoolingList],
    entry: Callable[[int, Any, PoolingRequestOutput, Pooling], msgspec.Struct],
) -> Response:
    """Returns the response with an `entry` for each text: of its index, its numbers as JSON has
    them, its output, and how the model pools. `kind` begins its id.
    """
    body, call = await read_body(request, state.server_config, body_type), call_of(request)
    tasks = body.tasks
    pooling = pooling_of(state, tasks, body.model)
    task = next(task for task in pooling.tasks if task in tasks)
    dimensions = body.dimensions if isinstance(body, EmbeddingBody) else None
    with ExitStack() as held:
        job = PoolingJob(
            f"{kind}-{call.suffix}",
            await _prompts(state, call, body, held),
            pooling_params(body, task, dimensions),
            dict.fromkeys(
                ("prompt", "prompt_token_ids"), "input" if body.messages is None else "messages"
            ),
            body.prompt_name,
            body.priority or 0,
        )
        outputs = await run_pooling(state, call, job)

    def whole(rows: list[Any]) -> PoolingList:
        pairs = enumerate(zip(rows, outputs, strict=True))
        data = [entry(i, row, output, pooling) for i, (row, output) in pairs]
        return listed(list_type, job.prefix, state, data, usage_of(outputs))

    return await json_rows(outputs, whole, body.encoding_format)


async def _prompts(
    state: ServerState, call: HttpCall, body: InputBody, held: ExitStack
) -> Sequence[Prompt]:
    if body.messages is None:
        if body.input is None:
            raise missing("input")
        return prompts_of(body.input, "input", state.server_config.max_prompts_per_request)
    if body.input is not None:
        raise invalid("messages", "Only one of 'input' and 'messages' is allowed.")
    messages = plain_messages(body.messages, call, state.reads_images)
    return await prompts_of_conversations(
        *(state, call, [messages], "messages", held),
        add_generation_prompt=bool(body.add_generation_prompt),
    )


def _embedding(index: int, row: Any, output: PoolingRequestOutput, pooling: Pooling) -> Embedding:
    return Embedding(index=index, embedding=row)


def _pooled_data(
    index: int, row: Any, output: PoolingRequestOutput, pooling: Pooling
) -> PooledData:
    return PooledData(index=index, data=row)


def _classification(
    index: int, row: Any, output: PoolingRequestOutput, pooling: Pooling
) -> Classification:
    best, labels = int(output.outputs.data.argmax()), pooling.labels
    return Classification(
        index=index,
        label=labels[best] if best < len(labels) else None,
        probs=row,
        num_classes=output.outputs.num_classes,
    )


def pooling_params(body: Any, task: str, dimensions: int | None = None) -> PoolingParams:
    """Returns the parameters of a body with PoolingFields. Raises ApiError."""
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
