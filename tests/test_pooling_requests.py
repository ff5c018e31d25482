"""Requests that pool through the frontend and a real engine, with every kind of client."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import psutil
import pytest
import tokenizers
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
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
from quire.tests.tiny_encoders import save_tiny_encoder
from transformers import AutoModelForSequenceClassification

TEXTS = ["the cat", "a dog sat on the mat", "x", "naïve café 你好", "the cat and " * 20]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    with LLM(engine="inproc", **DEFAULTS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm) -> np.ndarray:
    return llm.embed(TEXTS, as_array=True, use_tqdm=False)


@pytest.mark.sampled(step=2)
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


@pytest.mark.sampled(step=2)
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
            assert await engine.wait_until_idle(60)
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
    rows = llm.embed(TEXTS * 20, as_array=True, use_tqdm=False)
    gc.collect()
    assert sum(type(o).__name__ in HELD for o in gc.get_objects()) == before
    assert rows.base is None and rows.shape == (20 * len(TEXTS), rows.shape[1])


def test_an_engine_that_dies_is_replaced_and_texts_are_sent_again(expected, tmp_path) -> None:
    others = set(psutil.Process().children())
    with blocking_engine("process", tmp_path) as engine:
        many = TEXTS * 40
        for i, text in enumerate(many):
            engine.add_request(str(i), text, PoolingParams())
        found = {output.request_id: output for output in engine.step()}
        [child] = set(psutil.Process().children()) - others
        child.kill()
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
        for i in range(len(many)):
            row = expected[i % len(TEXTS)]
            assert found[str(i)].outputs.data.tobytes() == row.tobytes(), i
        assert engine.get_metrics()["num_engine_restarts"] == 1


def test_spans_of_requests_that_pool(llm) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    llm.set_tracer_provider(provider)
    llm.embed(TEXTS[:2], use_tqdm=False)
    llm.set_tracer_provider(None)
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.name == "llm_request"]
    assert len(roots) == 2 and {s.name for s in spans} == {
        "llm_request",
        "queue",
        "prefill",
        "decode",
    }
    for root in roots:
        assert root.attributes["gen_ai.operation.name"] == "embeddings"
        assert root.attributes["quire.pooling.task"] == "embed"
        assert root.attributes["gen_ai.usage.input_tokens"] > 0
        assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    auto = "AutoModelForSequenceClassification"
    directory = tmp_path_factory.mktemp("cross_encoder")
    save_tiny_encoder(directory, "bert", auto, num_labels=1, max_position_embeddings=128)
    with LLM(str(directory), engine="inproc", dtype="float32", num_threads=1) as llm:
        yield llm, directory


def test_a_cross_encoder_reads_pairs(cross_encoder) -> None:
    llm, directory = cross_encoder
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    scores = llm.score(TEXTS[0], TEXTS[1:4], use_tqdm=False)
    raw = PoolingParams(use_activation=False)
    logits = llm.score(TEXTS[0], TEXTS[1:4], pooling_params=raw, use_tqdm=False)
    for text, score, logit in zip(TEXTS[1:4], scores, logits, strict=True):
        pair = tokenizer.encode(TEXTS[0], text)
        assert score.prompt_token_ids == pair.ids and 1 in pair.type_ids
        with torch.inference_mode():
            inputs = (torch.tensor([ids]) for ids in (pair.ids, [1] * len(pair.ids), pair.type_ids))
            right = model(*inputs).logits[0, 0].item()
        assert logit.outputs.score == pytest.approx(right, abs=1e-5)
        assert score.outputs.score == pytest.approx(1 / (1 + np.exp(-right)), abs=1e-5)
    one = llm.classify({"prompt": TEXTS[0], "text_pair": TEXTS[1]}, use_tqdm=False)[0]
    assert one.outputs.probs == [scores[0].outputs.score] and one.outputs.num_classes == 1


def test_a_model_that_only_pools_refuses_to_generate(cross_encoder) -> None:
    llm, _ = cross_encoder
    with pytest.raises(InvalidParameterError, match="must be PoolingParams: this engine runs with"):
        llm.generate("a", GREEDY, use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="task: must be one of classify"):
        llm.embed("a", use_tqdm=False)


HELD = ("RequestState", "CompletionState", "ProcessedRequest", "EmbeddingRequestOutput")
