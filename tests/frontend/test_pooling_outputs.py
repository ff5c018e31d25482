"""The results of requests that pool."""

from __future__ import annotations

import json

import numpy as np
import pytest
from quire import ClassificationRequestOutput, EmbeddingRequestOutput, PoolingRequestOutput
from quire.frontend.outputs import RequestMetrics
from quire.frontend.pooling_outputs import Rows, ScoringRequestOutput, converted
from quire.frontend.requests.output_processor import pooling_output
from quire.frontend.requests.request_state import CompletionState, RequestState
from quire.frontend.text.detokenizer import NO_TEXT
from quire.ipc.errors import QuireError
from quire.ipc.messages import Array, EngineCoreRequest, FinishReason
from quire.ipc.params import PoolingParams

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def output(task: str, values: np.ndarray | None, reason=FinishReason.STOP, error=None):
    core_request = EngineCoreRequest("e", [1, 2], PoolingParams(task=task))
    completion = CompletionState(0, "e", NO_TEXT, None, finish_reason=reason)
    state = RequestState("r", "text", core_request, 0.0, RequestMetrics(0.0), [completion])
    state.task, state.error = task, error
    if values is not None:
        state.pooled = Array("f4", values.shape, values.tobytes())
    return pooling_output(state)


def test_each_task_has_its_class() -> None:
    embedding = output("embed", VALUES[0])
    assert type(embedding) is EmbeddingRequestOutput and embedding.finished
    assert embedding.outputs.embedding == [0.0, 1.0, 2.0] and embedding.outputs.hidden_size == 3
    classes = output("classify", VALUES[1])
    assert type(classes) is ClassificationRequestOutput
    assert classes.outputs.probs == [3.0, 4.0, 5.0] and classes.outputs.num_classes == 3
    rows = output("token_embed", VALUES)
    assert type(rows) is PoolingRequestOutput and (rows.outputs.data == VALUES).all()
    score = converted(output("classify", VALUES[0, 1:2]), "score", VALUES[0, 1:2])
    assert type(score) is ScoringRequestOutput and score.outputs.score == 1.0
    assert score.request_id == "r" and score.prompt_token_ids == [1, 2]


def test_a_result_as_a_dict_is_plain_and_under_the_name_of_its_task() -> None:
    score = converted(output("classify", VALUES[0, 1:2]), "score", VALUES[0, 1:2])
    for found, named in (
        (output("embed", VALUES[0]), {"embedding": [0.0, 1.0, 2.0]}),
        (output("classify", VALUES[1]), {"probs": [3.0, 4.0, 5.0]}),
        (output("token_embed", VALUES), {"data": VALUES.tolist()}),
        (score, {"score": 1.0}),
        (output("embed", None, FinishReason.ABORT), None),
    ):
        plain = found.to_dict()
        assert json.loads(json.dumps(plain)) == plain
        assert (plain["outputs"], plain["request_id"], "result" in plain) == (named, "r", False)
        assert plain["metrics"]["arrival_time"] == 0.0


def test_data_is_a_view_that_nobody_changes() -> None:
    data = output("embed", VALUES[0]).outputs.data
    assert data.dtype == np.float32 and data.base is not None
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1.0


def test_a_request_without_a_result_says_why() -> None:
    failed = output("embed", None, FinishReason.ERROR, "not finite")
    assert (failed.finish_reason, failed.error) == ("error", "not finite")
    with pytest.raises(QuireError, match="request r has no result: it ended with error: not fin"):
        failed.outputs
    with pytest.raises(QuireError, match="ended with abort"):
        output("embed", None, FinishReason.ABORT).outputs


def test_rows_in_one_array() -> None:
    rows = Rows(["a", "b"])
    for index in (1, 0):
        rows.take(index, output("embed", VALUES[index]))
    assert (rows.array() == VALUES).all() and rows.array().flags.c_contiguous
    assert Rows([]).array().shape == (0, 0)
