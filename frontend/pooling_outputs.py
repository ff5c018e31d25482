"""The results of requests that pool, with vLLM's names: PoolingRequestOutput and its three kinds.

Must not know: messages, how a result is computed.

Numbers stay in numpy arrays, which are views of the engine's messages. `embedding` and `probs` make
lists of them, as vLLM has; `data` costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..ipc.errors import QuireError
from .outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """data: f4 [size], or [num_tokens, size] of a task by token; read-only."""

    data: np.ndarray

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain values, for json.dumps, under the name of its property."""
        return {"data": self.data.tolist()}


class EmbeddingOutput(PoolingOutput):
    """The embedding of a text."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {"embedding": self.embedding}

    @property
    def embedding(self) -> list[float]:
        return self.data.tolist()

    @property
    def hidden_size(self) -> int:
        return self.data.shape[-1]


class ClassificationOutput(PoolingOutput):
    """The probability of each class, or its logit with use_activation=False."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {"probs": self.probs}

    @property
    def probs(self) -> list[float]:
        return self.data.tolist()

    @property
    def num_classes(self) -> int:
        return self.data.shape[-1]


class ScoringOutput(PoolingOutput):
    """How well two texts match; data f4 [1]."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {"score": self.score}

    @property
    def score(self) -> float:
        return float(self.data[0])


@dataclass(slots=True)
class PoolingRequestOutput:
    """The end of a request that pools.

    `outputs` raises QuireError for a request without a result: `finish_reason` is then "abort",
    "timeout", or "error" with the reason in `error`.
    """

    request_id: str
    prompt: str | None  # None for a prompt given as token ids
    prompt_token_ids: list[int]
    result: PoolingOutput | None
    finished: bool = True
    finish_reason: str = "stop"
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache
    error: str | None = None
    # the user's parameter that the engine rejected; None for a failure
    error_parameter: str | None = None

    @property
    def outputs(self) -> Any:
        if self.result is None:
            raise QuireError(
                f"request {self.request_id} has no result: it ended with {self.finish_reason}"
                + (f": {self.error}" if self.error else "")
            )
        return self.result

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for json.dumps, with `outputs` instead of `result`:
        None for a request without one.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        result = values.pop("result")
        values["metrics"] = None if self.metrics is None else asdict(self.metrics)
        return values | {"outputs": None if result is None else result.to_dict()}

    def merge(self, newer: Any) -> None:
        """Raises AssertionError, because a request that pools has only one output."""
        raise AssertionError(f"request {self.request_id} has ended already")


class EmbeddingRequestOutput(PoolingRequestOutput):
    """`outputs` is an EmbeddingOutput."""

    __slots__ = ()


class ClassificationRequestOutput(PoolingRequestOutput):
    """`outputs` is a ClassificationOutput."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput):
    """`outputs` is a ScoringOutput. For a score of two embeddings, `prompt_token_ids` are those of
    both texts.
    """

    __slots__ = ()


AnyOutput = RequestOutput | PoolingRequestOutput

# Each task has the class of its output, and the class of its result.
KINDS: dict[str, tuple[type[PoolingRequestOutput], type[PoolingOutput]]] = {
    "embed": (EmbeddingRequestOutput, EmbeddingOutput),
    "classify": (ClassificationRequestOutput, ClassificationOutput),
    "score": (ScoringRequestOutput, ScoringOutput),
}
BY_TOKEN = (PoolingRequestOutput, PoolingOutput)


def converted(output: PoolingRequestOutput, task: str, data: np.ndarray | None) -> Any:
    """Returns `output` as an output of `task`, one of KINDS, with other data."""
    output_type, result_type = KINDS[task]
    values: dict[str, Any] = {field.name: getattr(output, field.name) for field in fields(output)}
    values["result"] = None if data is None else result_type(data)
    return output_type(**values)


class Rows:
    """The results of many requests in one array, f4 [number of requests, size]."""

    def __init__(self, prompts: Sequence[Any]):
        self._num_rows = len(prompts)
        self._rows: np.ndarray | None = None  # made with the first result, whose size is theirs

    def take(self, index: int, output: PoolingRequestOutput) -> None:
        """Raises QuireError for a request without a result."""
        data = output.outputs.data
        if self._rows is None:
            import numpy as np

            self._rows = np.empty((self._num_rows, *data.shape), np.float32)
        self._rows[index] = data

    def array(self) -> np.ndarray:
        import numpy as np

        return np.empty((0, 0), np.float32) if self._rows is None else self._rows
