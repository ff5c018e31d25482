"""Requests of every kind continue on a second engine as if undisturbed, with a real model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest
from quire import AsyncLLM, RequestOutput, SamplingParams
from quire.ipc.params import RequestOutputKind, StructuredOutputsParams
from quire.tests.client_forms import make_async_engine

PROMPT = list(range(20, 120))
KINDS = {
    "n": SamplingParams(n=3, temperature=1.0, seed=5, logprobs=2),
    "prompt_logprobs": SamplingParams(temperature=0.0, prompt_logprobs=2),
    "penalties": SamplingParams(temperature=0.9, seed=1, presence_penalty=1.0, top_p=0.8),
    "grammar": SamplingParams(
        temperature=1.0, seed=2, structured_outputs=StructuredOutputsParams(regex="[a-z ]{900}")
    ),
}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


DRAFTS = {"method": "auto", "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def engine(loop: asyncio.Runner) -> Iterator[AsyncLLM]:
    async def start() -> AsyncLLM:
        return make_async_engine("process async", engine_restarts=1000)

    llm = loop.run(start())
    yield llm
    loop.run(llm.shutdown_async())


async def run(llm: AsyncLLM, kind: str, *, is_killed: bool) -> RequestOutput:
    """is_killed: when ten tokens are there."""
    params = msgspec.structs.replace(
        KINDS[kind],
        max_tokens=250,
        ignore_eos=kind != "grammar",
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    async for output in llm.generate({"prompt_token_ids": PROMPT}, params, kind):
        if is_killed and len(output.outputs[0].token_ids) >= 10:
            is_killed = False
            os.kill(llm.client.engine_pid, signal.SIGKILL)
    return output


@pytest.fixture(scope="module")
def undisturbed(loop: asyncio.Runner, engine: AsyncLLM) -> dict[str, RequestOutput]:
    return {kind: loop.run(run(engine, kind, is_killed=False)) for kind in KINDS}


def shown(output: RequestOutput) -> list:
    return [output.prompt_logprobs] + [
        (one.token_ids, one.text, one.logprobs, one.cumulative_logprob, one.finish_reason)
        for one in output.outputs
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_it_continues(
    loop: asyncio.Runner, engine: AsyncLLM, undisturbed: dict[str, RequestOutput], kind: str
) -> None:
    before = engine.client.restarts.by_cause.total()
    output = loop.run(run(engine, kind, is_killed=True))
    assert engine.client.restarts.by_cause.total() == before + 1
    assert engine.client.restarts.num_resumed
    assert shown(output) == shown(undisturbed[kind])
    metrics = output.metrics
    assert metrics.first_token_ts < metrics.last_token_ts - 0.2  # a restart lies between
    assert metrics.prefill_time < metrics.decode_time


def test_streams_with_drafts_continue(
    loop: asyncio.Runner, undisturbed: dict[str, RequestOutput]
) -> None:
    """With speculation, all kinds at once give what an engine without it gives undisturbed."""

    async def run_all() -> None:
        llm = make_async_engine("process async", speculative_config=DRAFTS)
        try:
            streams = (run(llm, kind, is_killed=kind == "penalties") for kind in KINDS)
            for output in await asyncio.gather(*streams):
                assert shown(output) == shown(undisturbed[output.request_id])
            assert llm.client.restarts.by_cause.total() == 1
            assert llm.client.restarts.num_resumed > 1
            metrics = await llm.get_metrics()  # of the second engine
            assert metrics["num_accepted_tokens"] > 20
        finally:
            await llm.shutdown_async()

    loop.run(run_all())
