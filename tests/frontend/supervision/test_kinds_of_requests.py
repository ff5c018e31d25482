"""Requests of every kind continue on a second engine as if undisturbed, with a real model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from quire import AsyncLLM, RequestOutput, SamplingParams
from quire.frontend.clients.client import Restarts
from quire.frontend.clients.mp_client import MPClient
from quire.frontend.clients.own_loop import run_once
from quire.frontend.supervision.supervised_client import SupervisedClient
from quire.ipc.params import RequestOutputKind, StructuredOutputsParams
from quire.tests import held_engine
from quire.tests.client_forms import engine_args

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
NUM_SEEN = 10  # tokens, when the engine is killed
NUM_HELD = 60  # tokens of a request at which the engine waits for its end, if it is to be killed


class Engine:
    """An engine that is killed in the middle of its requests.

    hold: a file. While it exists, the engine waits before a request has all its tokens.
    """

    def __init__(self, hold: Path, **settings):
        config = engine_args(**settings).create_engine_config()
        command = held_engine.command(hold, len(PROMPT) + NUM_HELD)

        async def start() -> SupervisedClient:
            first = await MPClient.start(config, command=command)
            return SupervisedClient(first, config, command=command)

        self.hold = hold
        self.llm = AsyncLLM(config, run_once(start()))

    @property
    def restarts(self) -> Restarts:
        return self.llm.client.restarts

    def will_be_killed(self) -> None:
        """Call it before the requests are sent: from here on the engine does not finish them."""
        self.hold.touch()

    async def run(self, kind: str, *, is_killed: bool) -> RequestOutput:
        """is_killed: after NUM_SEEN tokens."""
        params = msgspec.structs.replace(
            KINDS[kind],
            max_tokens=250,
            ignore_eos=kind != "grammar",
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        async for output in self.llm.generate({"prompt_token_ids": PROMPT}, params, kind):
            if is_killed and len(output.outputs[0].token_ids) >= NUM_SEEN:
                is_killed = False
                os.kill(self.llm.client.engine_pid, signal.SIGKILL)
                self.hold.unlink()  # for the next engine
        return output


@pytest.fixture(scope="module")
def engine(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine") / "hold", engine_restarts=1000)
    yield engine
    loop.run(engine.llm.shutdown_async())


@pytest.fixture(scope="module")
def undisturbed(loop: asyncio.Runner, engine: Engine) -> dict[str, RequestOutput]:
    return {kind: loop.run(engine.run(kind, is_killed=False)) for kind in KINDS}


def shown(output: RequestOutput) -> list:
    return [output.prompt_logprobs] + [
        (one.token_ids, one.text, one.logprobs, one.cumulative_logprob, one.finish_reason)
        for one in output.outputs
    ]


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("kind", KINDS)
def test_it_continues(
    loop: asyncio.Runner, engine: Engine, undisturbed: dict[str, RequestOutput], kind: str
) -> None:
    before = engine.restarts.by_cause.total()
    engine.will_be_killed()
    output = loop.run(engine.run(kind, is_killed=True))
    assert engine.restarts.by_cause.total() == before + 1
    assert engine.restarts.num_resumed
    assert shown(output) == shown(undisturbed[kind])
    metrics = output.metrics
    assert metrics.first_token_ts < metrics.last_token_ts - 0.2  # a restart lies between
    assert metrics.prefill_time < metrics.decode_time


@pytest.mark.slow
def test_streams_with_drafts_continue(
    loop: asyncio.Runner, undisturbed: dict[str, RequestOutput], tmp_path: Path
) -> None:
    """With speculation, all kinds at once give what an engine without it gives undisturbed."""

    async def run_all() -> None:
        engine = Engine(tmp_path / "hold", speculative_config=DRAFTS)
        llm = engine.llm
        try:
            engine.will_be_killed()
            await llm.pause("keep")  # so that all begin at once, and none ends before the others
            streams = [
                asyncio.create_task(engine.run(kind, is_killed=kind == "penalties"))
                for kind in KINDS
            ]
            num_completions = sum(params.n for params in KINDS.values())
            while len((await llm.scheduler_state())["held"]) < num_completions:
                await asyncio.sleep(0.01)
            await llm.resume()
            for output in await asyncio.gather(*streams):
                assert shown(output) == shown(undisturbed[output.request_id])
            assert engine.restarts.by_cause.total() == 1
            assert engine.restarts.num_resumed > 1
            metrics = await llm.get_metrics()  # of the second engine
            assert metrics["num_accepted_tokens"] > 20
        finally:
            await llm.shutdown_async()

    loop.run(run_all())
