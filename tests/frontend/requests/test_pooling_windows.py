"""Windows of requests that pool, over an engine that answers at once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from quire import InvalidParameterError, PoolingParams, PoolingRequestOutput
from quire.frontend.llm_engine import CHUNK, run_in_windows
from quire.frontend.pooling_outputs import PoolingOutput
from quire.frontend.requests.input_processor import InputProcessor
from quire.ipc.models.pooling import Pooling
from quire.tests.frontend.requests.test_pooling_inputs import make_processor

ANY = PoolingParams()


class Engine:
    """Answers the newest half of its requests with each step: the length of the prompt."""

    def __init__(self, processor: InputProcessor):
        self.session = SimpleNamespace(process_batch=processor.process_batch, submit=self.submit)
        self.config = SimpleNamespace(num_seqs_at_once=8)
        self.requests = []
        self.num_submitted = self.most = 0
        self.dimensions = []

    def submit(self, request, trace_headers) -> None:
        self.requests.append(request)
        self.num_submitted += 1
        self.most = max(self.most, len(self.requests))
        self.dimensions.append(request.core_request.params.dimensions)

    def step(self) -> list[PoolingRequestOutput]:
        half = (len(self.requests) + 1) // 2
        ended, self.requests = self.requests[-half:], self.requests[:-half]
        return [
            PoolingRequestOutput(
                request.request_id,
                request.prompt,
                request.core_request.prompt_token_ids,
                PoolingOutput(np.array([len(request.core_request.prompt_token_ids)])),
            )
            for request in ended
        ]


@pytest.fixture
def engine() -> Engine:
    return Engine(make_processor(Pooling(is_matryoshka=True)))


def test_results_come_by_index_and_few_are_in_flight(engine) -> None:
    prompts = [[1] * (1 + i % 60) for i in range(1000)]
    found = {}
    run_in_windows(
        engine,
        [(prompt, ANY) for prompt in prompts],
        1000,
        7000,
        lambda index, output: found.update({index: int(output.outputs.data[0])}),
    )
    assert [found[i] for i in range(1000)] == [len(prompt) for prompt in prompts]
    assert engine.num_submitted == 1000 and engine.most <= 2 * CHUNK


def test_each_prompt_has_its_parameters(engine) -> None:
    params = [PoolingParams(dimensions=1 + i % 3) for i in range(20)]
    run_in_windows(engine, [("a", one) for one in params], 20, 0, lambda index, output: None)
    assert engine.dimensions == [p.dimensions for p in params]


def test_a_refused_prompt_is_named_by_its_index_among_all(engine) -> None:
    prompts = [(prompt, ANY) for prompt in ["a"] * 300 + [[99999]]]
    for number, words in ((301, "300 of 301"), (None, "300")):
        with pytest.raises(InvalidParameterError, match=rf"\(in request {words}, counted from 0\)"):
            run_in_windows(engine, iter(prompts), number, 0, lambda i, o: None)
    with pytest.raises(InvalidParameterError) as raised:
        run_in_windows(engine, [([99999], ANY)], 1, 0, lambda i, o: None)
    assert "request" not in str(raised.value)
