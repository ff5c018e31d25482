"""Requests that pool through the frontend and a real engine, with every kind of client."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from quire import (
    LLM,
    EmbeddingRequestOutput,
    InvalidParameterError,
    PoolingParams,
    SamplingParams,
)
from quire.tests.client_forms import (
    ASYNCIO,
    BLOCKING,
    DEFAULTS,
    blocking_engine,
    make_async_engine,
)

TEXTS = ["the cat", "a dog sat on the mat", "x", "naïve café 你好", "the cat and " * 20]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    with LLM(engine="inproc", **DEFAULTS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm) -> np.ndarray:
    return llm.embed(TEXTS, as_array=True, use_tqdm=False)


@pytest.mark.parametrize("client", BLOCKING)
def test_every_blocking_client_gives_the_same_bits(client, expected, tmp_path) -> None:
    with blocking_engine(client, tmp_path) as engine:
        for i, text in enumerate(TEXTS):
            engine.add_request(f"p{i}", text, PoolingParams())
        engine.add_request("g", "hello", GREEDY)
        engine.add_request("late", TEXTS[-1] * 3, PoolingParams(timeout_s=1e-6))
        last = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
        for i, row in enumerate(expected):
            output = last[f"p{i}"]
            assert type(output) is EmbeddingRequestOutput and output.finish_reason == "stop"
            assert output.outputs.data.tobytes() == row.tobytes()
            assert output.metrics.num_prompt_tokens == len(output.prompt_token_ids)
            assert 0 < output.metrics.time_to_first_token <= output.metrics.e2e_latency
            assert output.metrics.queued_time is not None and output.num_cached_tokens is not None
        assert len(last["g"].outputs[0].token_ids) == 4
        assert last["late"].finish_reason == "timeout"
        engine.add_request("gone", TEXTS[0], PoolingParams())
        [output] = engine.abort_request("gone")
        assert output.finish_reason == "abort" and not engine.has_unfinished_requests()
        metrics = engine.get_metrics()
        assert metrics["num_finished_stop"] >= len(TEXTS)
        assert metrics["num_finished_timeout"] == 1


@pytest.mark.parametrize("client", ASYNCIO)
def test_every_asyncio_client_gives_the_same_bits(client, expected) -> None:
    async def main() -> None:
        engine = make_async_engine(client)
        try:
            async for output in engine.encode(TEXTS[0], PoolingParams(), "one"):
                assert output.outputs.data.tobytes() == expected[0].tobytes()
            many = TEXTS * 40  # several windows
            ids = [f"{i}" for i in range(len(many))]
            found = await engine.encode_batch(many, PoolingParams(), ids)
            for i, output in enumerate(found):
                assert output.request_id == ids[i]
                assert output.outputs.data.tobytes() == expected[i % len(TEXTS)].tobytes()
            with pytest.raises(InvalidParameterError, match="request 1 of 2"):
                await engine.encode_batch(["a", [10**6]], PoolingParams(), ["a", "b"])
            task = asyncio.create_task(engine.encode_batch(many, PoolingParams(), ids))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not engine.has_unfinished_requests()
            assert await engine.wait_until_idle(1)
        finally:
            engine.shutdown()

    asyncio.run(main())


def test_forms_of_results(llm, expected) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert np.stack([o.outputs.data for o in outputs]).tobytes() == expected.tobytes()
    assert outputs[0].outputs.embedding == expected[0].tolist()
    rows = llm.encode(TEXTS[1], pooling_task="token_embed", use_tqdm=False)[0]
    assert rows.outputs.data.shape == (len(rows.prompt_token_ids), expected.shape[1])
    score = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    assert [round(s.outputs.score, 5) for s in score] == [
        round(float(expected[0] @ row), 5) for row in expected
    ]
    assert score[0].outputs.score == pytest.approx(1, abs=1e-6)
    assert llm.embed([], use_tqdm=False) == []


def test_refusals_leave_nothing_behind(llm) -> None:
    with pytest.raises(InvalidParameterError, match="request 300 of 301"):
        llm.embed(["a"] * 300 + [[10**6]], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    for params, problem in (
        (PoolingParams(task="token_embed"), "pooling_params: have the task token_embed"),
        ([PoolingParams()], "one per prompt"),
        (SamplingParams(), "pooling_params: must be PoolingParams"),
    ):
        with pytest.raises(InvalidParameterError, match=problem):
            llm.embed(["a", "b"], pooling_params=params, use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="task: must be one of"):
        llm.classify("a", use_tqdm=False)


def test_results_of_many_texts_hold_nothing_else(llm) -> None:
    """The states of requests are gone with their results; an array holds only its numbers."""
    gc.collect()
    before = sum(type(o).__name__ in HELD for o in gc.get_objects())
    rows = llm.embed(TEXTS * 200, as_array=True, use_tqdm=False)
    gc.collect()
    assert sum(type(o).__name__ in HELD for o in gc.get_objects()) == before
    assert rows.base is None and rows.shape == (200 * len(TEXTS), rows.shape[1])


HELD = ("RequestState", "CompletionState", "ProcessedRequest", "EmbeddingRequestOutput")
