"""Responses of the routes that pool, in the formats of OpenAI, vLLM and Cohere.

Must not know: bodies, the engine.

Numbers go from the engine's arrays to JSON row by row, without a Python object for each field; as
base64 they are the array's bytes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...pooling_outputs import PoolingRequestOutput
from ..http.sse import JsonAnswer, encode, json_of
from ..state import ServerState

if TYPE_CHECKING:
    import numpy as np

EncodingFormat = Literal["float", "base64"]
NUMBERS_PER_ENTRY = 8  # of json_of: so many numbers take the time of one of its entries


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Any  # a list of numbers, or base64 of little-endian 32-bit floats


class PooledData(msgspec.Struct, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: Any  # numbers, a list of them for each token, or base64 of their bytes


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str | None
    probs: Any
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class RankedDocument(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class PoolingList(msgspec.Struct, kw_only=True):
    """OpenAI's list, of any of the objects above."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Any]
    usage: PoolingUsage


class EmbeddingList(PoolingList, kw_only=True):
    data: list[Embedding]


class PooledList(PoolingList, kw_only=True):
    data: list[PooledData]


class ClassificationList(PoolingList, kw_only=True):
    data: list[Classification]


class ScoreList(PoolingList, kw_only=True):
    data: list[Score]


class RankedList(msgspec.Struct, kw_only=True):
    """Jina's and Cohere's results."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]
    meta: dict[str, Any]


def usage_of(outputs: Iterable[PoolingRequestOutput]) -> PoolingUsage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(num_tokens, num_tokens)


def values(data: np.ndarray, encoding: str | None) -> Any:
    """Returns f4 [...] as JSON, or as base64 of its little-endian bytes."""
    if encoding == "base64":
        return b64encode(data.tobytes()).decode()
    return msgspec.Raw(encode(data.tolist()))


async def json_rows(
    outputs: Sequence[PoolingRequestOutput], make: Any, encoding: str | None = None
) -> JsonAnswer:
    """Returns the response `make(rows)`, where a row is what JSON has of an output's numbers. A
    large one is made in a thread, which lets the event loop run between rows.
    """
    num_numbers = sum(output.outputs.data.size for output in outputs)

    def whole() -> Any:
        return make([values(output.outputs.data, encoding) for output in outputs])

    return await json_of(whole, num_numbers // NUMBERS_PER_ENTRY)


def listed(
    kind: type[PoolingList],
    request_id: str,
    state: ServerState,
    data: list[Any],
    usage: PoolingUsage,
) -> PoolingList:
    return kind(
        id=request_id, created=int(state.now()), model=state.model_name, data=data, usage=usage
    )


def ranked(
    scores: Sequence[float], documents: Sequence[str], top_n: int | None, with_documents: bool
) -> list[Ranked]:
    """Orders the best first. Documents with equal scores stay in their order."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [
        Ranked(
            index=i,
            relevance_score=scores[i],
            document=RankedDocument(documents[i]) if with_documents else None,
        )
        for i in order[: top_n or len(order)]
    ]
