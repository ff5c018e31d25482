"""data_parallel_size=2 with a real model: the tokens, the prefix hits and the streams of one
engine, also when a replica is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from quire import AsyncLLM, LLMEngine, RequestOutput, SamplingParams
from quire.frontend.clients.replicas.start import start_replicas
from quire.ipc.params import StructuredOutputsParams
from quire.tests import held_engine
from quire.tests.client_forms import closing, engine_args, make_engine
from quire.tests.frontend.server.conftest import running_server

NUM_CONVERSATIONS, NUM_TURNS, NUM_ANSWER = 10, 4, 8
NUM_HELD = 150  # tokens of a request in the KV cache at which an engine waits for its end
SETTINGS = dict(max_model_len=512, num_gpu_blocks_override=1200)


@pytest.fixture(scope="module")
def one_engine() -> Iterator[LLMEngine]:
    with closing(make_engine(**SETTINGS)) as engine:
        yield engine


class Replicas:
    """Two engines. While the file `hold` exists, they wait before their requests end."""

    def __init__(self, hold: Path) -> None:
        self.runner, self.hold = asyncio.Runner(), hold
        args = engine_args(data_parallel_size=2, engine_restarts=100, **SETTINGS)
        config = args.create_engine_config()
        starting = start_replicas(config, command=held_engine.command(hold, NUM_HELD))
        self.llm = AsyncLLM(config, self.runner.run(starting))

    def run(self, coroutine):
        return self.runner.run(asyncio.wait_for(coroutine, 120))

    def close(self) -> None:
        self.runner.run(self.llm.shutdown_async())
        self.runner.close()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    replicas = Replicas(tmp_path_factory.mktemp("replicas") / "hold")
    yield replicas
    replicas.close()


def opening(number: int) -> list[int]:
    """A system prompt that all conversations share, and a message."""
    return [5 + i % 90 for i in range(48)] + message(number, 0)


def message(number: int, turn: int) -> list[int]:
    rng = random.Random(number * 100 + turn)
    return [rng.randrange(5, 400) for _ in range(rng.randint(20, 60))]


def params(number: int, **settings) -> SamplingParams:
    temperature = number % 3 / 2 if settings.get("n", 1) == 1 else 1.0
    return SamplingParams(temperature=temperature, seed=number, **{"ignore_eos": True, **settings})


def hit_rate(before: dict[str, int], after: dict[str, int]) -> float:
    names = ("prefix_cache_hits", "prefix_cache_queries")
    hits, queries = (after[name] - before[name] for name in names)
    return hits / queries


def converse_with_one(engine: LLMEngine) -> list[list[int]]:
    """The tokens of each conversation. All have the same turn at a time."""
    prompts = [opening(number) for number in range(NUM_CONVERSATIONS)]
    for turn in range(1, NUM_TURNS + 1):
        for number, prompt in enumerate(prompts):
            own = params(number, max_tokens=NUM_ANSWER)
            engine.add_request(f"{turn}-{number}", {"prompt_token_ids": prompt}, own)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    number = int(output.request_id.partition("-")[2])
                    answer = output.outputs[0].token_ids
                    prompts[number] = prompts[number] + list(answer) + message(number, turn)
    return prompts


async def converse(llm: AsyncLLM) -> list[list[int]]:
    """The same."""

    async def answer(number: int, turn: int, prompt: list[int]) -> list[int]:
        own = params(number, max_tokens=NUM_ANSWER)
        stream = llm.generate({"prompt_token_ids": prompt}, own, f"{turn}-{number}")
        outputs = [output async for output in stream]
        return prompt + list(outputs[-1].outputs[0].token_ids) + message(number, turn)

    prompts = [opening(number) for number in range(NUM_CONVERSATIONS)]
    for turn in range(1, NUM_TURNS + 1):
        answers = [answer(number, turn, prompt) for number, prompt in enumerate(prompts)]
        prompts = await asyncio.gather(*answers)
    return prompts


@pytest.mark.slow
def test_conversations_hit_the_prefix_cache_as_with_one_engine(one_engine, replicas) -> None:
    before = one_engine.get_metrics()
    expected = converse_with_one(one_engine)
    rate_of_one = hit_rate(before, one_engine.get_metrics())
    assert replicas.run(converse(replicas.llm)) == expected
    each = replicas.run(replicas.llm.client.call_each_async("get_metrics"))
    assert all(one["num_generation_tokens"] > 50 for one in each.values())  # both have worked
    none = dict.fromkeys(before, 0)
    rate = hit_rate(none, replicas.run(replicas.llm.get_metrics()))
    assert rate >= 0.95 * rate_of_one > 0.4, (rate, rate_of_one)


def requests(number: int, max_tokens: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Greedy and sampled, with log-probabilities, a penalty, completions, a grammar."""
    grammar = StructuredOutputsParams(regex="[ab]{20,60}")
    kinds = (
        {"logprobs": 2},
        {"stop": ["zz"], "frequency_penalty": 0.5},
        {"n": 2},
        {"structured_outputs": grammar, "ignore_eos": False},
    )
    return {
        f"r{i}": (opening(i), params(i, max_tokens=max_tokens, **kinds[i % 4]))
        for i in range(number)
    }


def said(output: RequestOutput) -> list:
    """All that a client sees, log-probabilities by their bits."""
    return [
        (
            one.text,
            list(one.token_ids),
            one.finish_reason,
            one.logprobs and [{k: v.logprob for k, v in at.items()} for at in one.logprobs],
        )
        for one in output.outputs
    ]


def expected_of(engine: LLMEngine, wanted: dict) -> dict[str, list]:
    for request_id, (prompt, own) in wanted.items():
        engine.add_request(request_id, {"prompt_token_ids": prompt}, own)
    said_by: dict[str, list] = {}
    while engine.has_unfinished_requests():
        said_by |= {one.request_id: said(one) for one in engine.step() if one.finished}
    return said_by


async def stream_and_kill(replicas: Replicas, wanted: dict, victims: list[int]) -> dict[str, list]:
    """Streams all, and kills these replicas, each when the one before is back. `hold` ends with the
    first.
    """
    llm, client = replicas.llm, replicas.llm.client
    num_tokens = dict.fromkeys(wanted, 0)

    async def one(request_id: str) -> tuple[str, list]:
        prompt, own = wanted[request_id]
        async for output in llm.generate({"prompt_token_ids": prompt}, own, request_id):
            num_tokens[request_id] = len(output.outputs[0].token_ids)
        assert output.error is None, output.error
        return request_id, said(output)

    async def kill() -> None:
        for number, victim in enumerate(victims):
            num_seen = len(wanted) * 5 * (number + 1)
            while sum(num_tokens.values()) < num_seen or not all(client.engines_up()):
                await asyncio.sleep(0.001)
            os.kill(client._replicas[victim].client.engine_pid, signal.SIGKILL)
            replicas.hold.unlink(missing_ok=True)
            while all(client.engines_up()):
                await asyncio.sleep(0.001)

    killing = asyncio.create_task(kill())
    said_by = dict(await asyncio.gather(*map(one, wanted)))
    await killing
    return said_by


def test_no_stream_fails_or_differs_when_a_replica_is_killed(one_engine, replicas) -> None:
    wanted = requests(12, max_tokens=100)
    expected = expected_of(one_engine, wanted)
    replicas.hold.touch()
    assert replicas.run(stream_and_kill(replicas, wanted, [1])) == expected
    restarts = replicas.llm.client.restarts
    assert restarts.num_resumed >= 3 and restarts.num_quarantined == 0


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_under_many_streams(one_engine, replicas, seed: int) -> None:
    rng = random.Random(seed)
    wanted = {f"{seed}-{key}": value for key, value in requests(32, max_tokens=150).items()}
    expected = expected_of(one_engine, wanted)
    victims = [rng.randrange(2) for _ in range(3)]
    assert replicas.run(stream_and_kill(replicas, wanted, victims)) == expected


@pytest.mark.chaos
def test_a_server_restarts_its_engines_and_loses_one_under_streams() -> None:
    """Text of 24 streams, sampled: undisturbed, during a rolling restart, and with a kill."""

    def stream(client: httpx.Client, number: int) -> str:
        body = {"prompt": f"Once upon a time {number}", "seed": number, "stream": True}
        body |= {"temperature": 0.7, "max_tokens": 300, "ignore_eos": True}
        said = ""
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    said += chunk["choices"][0]["text"]
        return said

    flags = ("-dp", "2", "--admin", "--num-threads", "1")
    with running_server(*flags) as client, ThreadPoolExecutor(24) as threads:

        def streams() -> list[Future[str]]:
            return [threads.submit(stream, client, number) for number in range(24)]

        expected = [one.result() for one in streams()]
        running = streams()
        time.sleep(0.5)
        answer = client.post("/restart_engines?drain_timeout=0.2", timeout=60)
        assert answer.json() == {"status": "restarted"}
        assert [one.result() for one in running] == expected
        running = streams()
        time.sleep(0.5)
        psutil.Process(client.process.pid).children()[0].kill()
        while not all(one.done() for one in running):
            assert client.get("/health/ready").status_code == 200
            time.sleep(0.05)
        assert [one.result() for one in running] == expected
        metrics = client.get("/metrics").text
        assert 'quire:engine_restarts_total{cause="request"} 2.0' in metrics
