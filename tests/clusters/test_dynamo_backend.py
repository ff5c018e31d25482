"""examples/dynamo/quire_backend.py with the bundled model, driven as Dynamo's worker drives it."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import quire
import zmq
import zmq.asyncio
from quire.tests.clusters import fake_dynamo
from quire.tests.clusters.fake_dynamo import Context

ROOT = Path(quire.__file__).parent
EXAMPLE = ROOT / "examples" / "dynamo" / "quire_backend.py"
MODEL = str(ROOT / "frontend" / "bundled_model")
PROMPT = [1, 329, 201, 395, 2, 201, 1, 330, 201] * 4
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """The example's module."""
    fake_dynamo.install()
    spec = importlib.util.spec_from_file_location("quire_backend", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    fake_dynamo.remove()


@dataclass
class Started:
    engine: Any
    config: fake_dynamo.EngineConfig
    worker: fake_dynamo.WorkerConfig
    publisher: fake_dynamo.Publisher
    events: zmq.asyncio.Socket
    runner: asyncio.Runner

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 60))

    async def read(self, name: str, prompt: list[int] = PROMPT, **request: Any) -> list[Any]:
        request = {"token_ids": prompt} | request
        return [chunk async for chunk in self.engine.generate(request, Context(name))]

    def generate(self, name: str, **request: Any) -> list[dict[str, Any]]:
        return self.run(self.read(name, **request))


@pytest.fixture(scope="module")
def started(backend: Any) -> Iterator[Started]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = ["--model", MODEL, "--served-model-name", "m", "--kv-events-port", str(port)]
    words += ["--engine-args", '{"max_num_seqs": 8, "max_model_len": 1024}']
    words += ["--discovery-backend", "file"]
    with asyncio.Runner() as runner:
        engine, worker = runner.run(backend.QuireEngine.from_args(words))
        runner.run(engine.cleanup())  # nothing has been started
        [source] = runner.run(engine.kv_event_sources())

        async def subscribe() -> zmq.asyncio.Socket:
            events = zmq.asyncio.Context.instance().socket(zmq.SUB)
            events.subscribe(source.topic)
            events.connect(source.endpoint)
            return events

        events = runner.run(subscribe())
        config = runner.run(engine.start(worker_id=7))
        publisher = fake_dynamo.Publisher()
        assert engine.component_metrics_dp_ranks() == [source.dp_rank]
        engine.attach_snapshot_publisher(publisher)
        yield Started(engine, config, worker, publisher, events, runner)
        runner.run(engine.cleanup())
        runner.run(engine.cleanup())
        events.close(linger=0)
        with pytest.raises(fake_dynamo.EngineShutdown):
            runner.run(anext(engine.generate({"token_ids": PROMPT}, Context("late"))))


def tokens(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk["index"] == index for token in chunk["token_ids"]]


@pytest.mark.slow
def test_registration(started: Started) -> None:
    worker, llm = started.worker, started.config.llm
    assert (worker.model_name, worker.served_model_name) == (MODEL, "m")
    assert (worker.namespace, worker.discovery_backend) == ("dynamo", "file")
    assert started.config.model == MODEL and llm is not None
    assert (llm.context_length, llm.kv_cache_block_size, llm.max_num_seqs) == (1024, 16, 8)
    assert llm.total_kv_blocks > 64 and llm.max_num_batched_tokens >= 1


def test_tokens_are_those_of_quire(started: Started) -> None:
    stops = {"max_tokens": 12, "ignore_eos": True, "stop_token_ids_hidden": None, "stop": ["x"]}
    chunks = started.generate("greedy", sampling_options=GREEDY, stop_conditions=stops)
    params = quire.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)

    async def direct() -> quire.CompletionOutput:
        """With Quire's own tokenizer and without deltas."""
        prompt = {"prompt_token_ids": PROMPT}
        outputs = [one async for one in started.engine._engine.generate(prompt, params, "direct")]
        return outputs[-1].outputs[0]

    completion = started.run(direct())
    assert tokens(chunks) == completion.token_ids
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 12,
        "total_tokens": len(PROMPT) + 12,
    }
    assert all("completion_usage" not in chunk for chunk in chunks[:-1])

    options = {"logprobs": 2, "prompt_logprobs": None}
    chunks = started.generate(
        "logprobs", sampling_options=GREEDY, stop_conditions=stops, output_options=options
    )
    assert tokens(chunks) == completion.token_ids
    found = [one for chunk in chunks for one in chunk["log_probs"]]
    tops = [one for chunk in chunks for one in chunk["top_logprobs"]]
    for token, logprob, top, position in zip(
        completion.token_ids, found, tops, completion.logprobs, strict=True
    ):
        assert logprob == pytest.approx(position[token].logprob)
        assert {one["token_id"]: one["rank"] for one in top} == {
            candidate: one.rank for candidate, one in position.items()
        }


def test_stop_tokens_and_choices(started: Started) -> None:
    stops = {"max_tokens": 8, "ignore_eos": True}
    plain = tokens(started.generate("a", sampling_options=GREEDY, stop_conditions=stops))
    stops |= {"stop_token_ids_hidden": [plain[3]]}
    chunks = started.generate("b", sampling_options=GREEDY, stop_conditions=stops)
    first = plain.index(plain[3])
    assert tokens(chunks) == plain[: first + 1] and chunks[-1]["finish_reason"] == "stop"
    two = {"n": 2, "temperature": 1.0, "seed": 5}
    chunks = started.generate("c", sampling_options=two, stop_conditions={"max_tokens": 6})
    ends = {chunk["index"]: chunk["finish_reason"] for chunk in chunks if "finish_reason" in chunk}
    assert set(ends) == {0, 1} and tokens(chunks, 0) != tokens(chunks, 1)
    usage = [chunk["completion_usage"] for chunk in chunks if "completion_usage" in chunk]
    assert [one["completion_tokens"] for one in usage] == [
        len(tokens(chunks, 0)) + len(tokens(chunks, 1))
    ]


def test_guided_decoding(started: Started) -> None:
    options = GREEDY | {"guided_decoding": {"choice": ["yes", "no"], "regex": None}}
    chunks = started.generate("guided", sampling_options=options)
    assert chunks[-1]["finish_reason"] == "stop" and 1 <= len(tokens(chunks)) <= 5


@pytest.mark.parametrize(
    ("request_fields", "named"),
    [
        ({"sampling_options": {"temperature": -1.0}}, "temperature"),
        ({"prompt": [1] * 2000}, "max_model_len"),
        ({"sampling_options": {"guided_decoding": {"regex": "(a"}}}, "regex"),
    ],
)
def test_what_quire_refuses_is_an_invalid_argument(
    started: Started, request_fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(fake_dynamo.InvalidArgument, match=named):
        started.generate(f"refused-{named}", **request_fields)


LONG = {"sampling_options": GREEDY, "stop_conditions": {"max_tokens": 900, "ignore_eos": True}}


def test_abort_and_leaving(started: Started) -> None:
    async def abort() -> tuple[dict[str, Any], bool]:
        context, last = Context("aborted"), {}
        async for chunk in started.engine.generate({"token_ids": PROMPT} | LONG, context):
            if not last:
                assert await started.engine.is_quiescent() is False
                await started.engine.abort(context)
            last = chunk
        return last, await started.engine.is_quiescent()

    last, is_quiescent = started.run(abort())
    assert last["finish_reason"] == "cancelled" and is_quiescent

    async def leave() -> bool:
        chunks = started.engine.generate({"token_ids": PROMPT} | LONG, Context("left"))
        await anext(chunks)
        await chunks.aclose()
        return await started.engine.is_quiescent()

    assert started.run(leave())


def test_drain_waits_for_what_runs(started: Started) -> None:
    async def drain() -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []

        async def collect() -> None:
            request = {"token_ids": PROMPT} | LONG
            async for chunk in started.engine.generate(request, Context("last")):
                chunks.append(chunk)

        running = asyncio.create_task(collect())
        while not chunks:
            await asyncio.sleep(0.001)
        await started.engine.drain()
        assert len(tokens(chunks)) == 900  # before the reader has ended, too
        await running
        return chunks

    assert started.run(drain())[-1]["finish_reason"] == "length"


def test_a_router_hears_of_blocks_and_load(started: Started) -> None:
    async def hear() -> None:
        """Sends prompts until a block with 100, 101, 102 is stored: the first events are lost if
        they come before the subscription.
        """
        for number in range(100):
            prompt = [number, *range(100, 148)]
            await started.read(f"heard-{number}", prompt, stop_conditions={"max_tokens": 2})
            while await started.events.poll(200):
                _, _, batch = await started.events.recv_multipart()
                if b"BlockStored" in batch and bytes([100, 101, 102]) in batch:
                    return

    started.run(hear())
    last = started.publisher.published[-1]
    assert last.kv_total_blocks == started.config.llm.total_kv_blocks - 1
    assert 0 <= last.kv_used_blocks < last.kv_total_blocks
    assert last.gpu_cache_usage == last.kv_used_blocks / last.kv_total_blocks
    assert max(one.kv_used_blocks for one in started.publisher.published) > 0
