"""ReplicasClient over engine processes: deaths, restarts, and calls meanwhile. Its contract is
tested with those of the other clients.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import msgspec
import pytest
from quire import AsyncLLM, LLMEngine, SamplingParams
from quire.frontend.clients.blocking_client import BlockingClient
from quire.frontend.clients.client import EngineClient
from quire.frontend.clients.own_loop import run_once
from quire.frontend.clients.replicas.client import ReplicasClient
from quire.frontend.clients.replicas.start import start_replicas
from quire.ipc.errors import EngineDeadError, ModelLoadError
from quire.ipc.lora import LoRARequest
from quire.ipc.messages import EngineCoreRequest
from quire.tests.fake_engine import COMMAND, Hold, open_blocking
from quire.tests.fakes import expected_output, make_config, weights_digest
from quire.tests.frontend.clients.driver import Driver, long_requests
from quire.tests.frontend.supervision.test_supervised_client import (
    POISON,
    assert_expected,
    some_requests,
)


def replicas(number: int = 2, asyncio_mode: bool = True, **settings) -> EngineClient:
    settings = {"startup_timeout_s": 120.0, "engine_restarts": 1000} | settings
    config = make_config(data_parallel_size=number, **settings)
    starting = start_replicas(config, command=COMMAND)
    return run_once(starting) if asyncio_mode else open_blocking(starting)


def inner(client: EngineClient) -> ReplicasClient:
    return client.client if isinstance(client, BlockingClient) else client


def pids(client: EngineClient) -> list[int]:
    return [replica.client.engine_pid for replica in inner(client)._replicas]


def num_requests(client: EngineClient) -> list[int]:
    return [inner(client)._router.num_requests(i) for i in range(client.num_engines)]


async def generate(llm: AsyncLLM, requests) -> dict:
    async def one(request_id, prompt, params):
        async for output in llm.generate(prompt, params, request_id):
            pass
        return request_id, output

    return dict(await asyncio.gather(*(one(key, *value) for key, value in requests.items())))


class Engines:
    """An AsyncLLM over two replicas for several tests."""

    def __init__(self, hold: Hold, **settings):
        self.runner = asyncio.Runner()
        self.hold = hold
        self.client = replicas(2, **settings)
        self.llm = AsyncLLM(self.client.ready.config, self.client)

    def run(self, test) -> None:
        before = self.client.restarts.by_cause.total()
        self.client.restarts.num_resumed = self.client.restarts.num_quarantined = 0

        async def run() -> None:
            await test(self.llm, self.client)
            assert num_requests(self.client) == [0, 0] and not self.client._moved_at
            while self.client.engines_up() != [True, True]:
                await asyncio.sleep(0.005)
            assert await self.llm.call_utility("check_integrity") is True

        self.runner.run(asyncio.wait_for(run(), 100))
        assert self.client.restarts.by_cause.total() > before

    def close(self) -> None:
        self.runner.run(self.llm.shutdown_async())
        self.runner.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    hold = Hold(tmp_path_factory.mktemp("engines"), 20)
    poison = {"token": POISON, "after": 2, "signal": signal.SIGSEGV}
    overrides = {"delay_s": 0.005, "poison": poison} | hold.overrides
    engines = Engines(hold, hf_overrides=overrides, max_num_seqs=64)
    yield engines
    engines.close()


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGABRT, marks=pytest.mark.chaos)]
)
def test_requests_of_a_dead_replica_continue_on_the_other(engines, number: int) -> None:
    async def test(llm: AsyncLLM, client: ReplicasClient) -> None:
        requests = some_requests(24, int(number), max_tokens=120)
        engines.hold.begin()
        generating = asyncio.create_task(generate(llm, requests))
        await until(lambda: min(num_requests(client)) > 4)
        await asyncio.sleep(0.1)
        first, causes = pids(client), client.restarts.by_cause[signal.Signals(number).name]
        client.restarts.gaps_s.clear()
        os.kill(first[1], number)
        await until(lambda: client.restarts.num_resumed)
        assert client.engines_up() == [True, False] and not client.is_replacing
        assert num_requests(client)[1] == 0
        engines.hold.end()
        num_called = len(await client.call_each_async("get_metrics"))
        assert num_called == 1 or all(client.engines_up())  # there is another one already
        assert await llm.call_utility("ping") == "pong"  # the living one answers
        assert_expected(requests, await generating, llm.config)
        assert len(client.restarts.gaps_s) >= client.restarts.num_resumed - 2
        await until(lambda: all(client.engines_up()))
        assert client.restarts.by_cause[signal.Signals(number).name] == causes + 1
        again = {f"again-{key}": value for key, value in requests.items()}
        generating = asyncio.create_task(generate(llm, again))
        await until(lambda: min(num_requests(client)) > 4)  # the new one gets requests, too
        assert_expected(again, await generating, llm.config)
        assert pids(client)[0] == first[0] and pids(client)[1] != first[1]

    engines.run(test)


def test_engines_are_restarted_one_by_one_without_a_failed_request(engines) -> None:
    async def test(llm: AsyncLLM, client: ReplicasClient) -> None:
        first, most_down = pids(client), 0
        requests = some_requests(40, 5, max_tokens=150)
        generating = asyncio.create_task(generate(llm, requests))
        await until(lambda: min(num_requests(client)) > 4)
        restarting = asyncio.create_task(llm.restart_engines(drain_timeout_s=0.1))
        while not restarting.done():
            most_down = max(most_down, client.engines_up().count(False))
            await asyncio.sleep(0.002)
        restarting.result()
        assert_expected(requests, await generating, llm.config)
        assert most_down == 1 and not set(first) & set(pids(client))
        assert client.restarts.num_resumed and client.restarts.by_cause["request"] >= 2

    engines.run(test)


def test_a_poison_request_ends_alone(engines) -> None:
    async def test(llm: AsyncLLM, client: ReplicasClient) -> None:
        requests = some_requests(12, 7, max_tokens=100)
        bad = {"bad": ([1, POISON, 2], SamplingParams(max_tokens=20, temperature=0.0))}
        outputs = await generate(llm, requests | bad)
        assert outputs.pop("bad").outputs[0].finish_reason == "error"
        assert_expected(requests, outputs, llm.config)
        assert client.restarts.num_quarantined == 1

    engines.run(test)


def test_completions_are_aborted_where_they_are(engines) -> None:
    async def test(llm: AsyncLLM, client: ReplicasClient) -> None:
        params = SamplingParams(n=3, max_tokens=200, seed=1, ignore_eos=True)
        engines.hold.begin()
        reading = [asyncio.create_task(generate(llm, {f"n{i}": ([1, i], params)})) for i in (1, 2)]
        await until(lambda: sum(num_requests(client)) == 6)
        await asyncio.sleep(0.05)
        os.kill(pids(client)[0], signal.SIGKILL)
        await until(lambda: client.restarts.num_resumed)
        assert num_requests(client)[1] == 6
        reading[0].cancel()
        await until(lambda: num_requests(client)[1] == 3)
        engines.hold.end()
        outputs = await reading[1]
        assert_expected({"n2": ([1, 2], params)}, outputs, llm.config)

    engines.run(test)


def test_blocking_code_has_the_same(tmp_path) -> None:
    hold = Hold(tmp_path, 30)
    overrides = {"delay_s": 0.005} | hold.overrides
    client = replicas(asyncio_mode=False, hf_overrides=overrides, max_num_seqs=64)
    llm = LLMEngine(client.ready.config, client)
    try:
        requests = some_requests(16, max_tokens=100)
        for request_id, (prompt, params) in requests.items():
            llm.add_request(request_id, prompt, params)
        outputs, num_steps = {}, 0
        hold.begin()
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
            num_steps += 1
            if num_steps == 20:
                os.kill(pids(client)[0], signal.SIGKILL)
                hold.end()
            if num_steps == 60:
                first = pids(client)
                llm.restart_engines()
                assert not set(first) & set(pids(client))
        assert_expected(requests, outputs, llm.config)
        # the killed one may be replaced already
        assert client.restarts.num_resumed and client.restarts.by_cause["request"] >= 1
        assert llm.call_utility("ping") == "pong"

        async def in_a_loop() -> str:  # as in a notebook
            return llm.call_utility("ping")

        assert asyncio.run(in_a_loop()) == "pong"
        closing = threading.Timer(0.2, llm.shutdown)
        llm.call_utility("pause", "keep")
        llm.add_request("late", [1, 2], SamplingParams(max_tokens=5))
        closing.start()
        with pytest.raises(EngineDeadError, match="shut down"):
            client._may_be_stalled = False  # so that it waits, not knowing of the pause
            llm.step()
        closing.join()
    finally:
        llm.shutdown()


def test_a_replica_that_cannot_be_replaced_is_left_out() -> None:
    client = replicas(asyncio_mode=False, engine_restarts=1, hf_overrides={"delay_s": 0.002})
    llm = LLMEngine(client.ready.config, client)
    try:
        for _ in range(2):
            os.kill(pids(client)[1], signal.SIGKILL)
            requests = some_requests(6, max_tokens=100)
            for request_id, (prompt, params) in requests.items():
                llm.add_request(request_id, prompt, params)
            outputs = {}
            while llm.has_unfinished_requests():
                outputs |= {output.request_id: output for output in llm.step()}
            assert_expected(requests, outputs, llm.config)
            wait = time.monotonic() + 60
            while not client.engines_up()[1] and not inner(client)._replicas[1].failure:
                assert time.monotonic() < wait
                client._run(asyncio.sleep, 0.01)
        assert inner(client)._replicas[1].failure is not None
        assert llm.call_utility("ping") == "pong" and llm.get_metrics()["num_engine_restarts"] == 1
        os.kill(pids(client)[0], signal.SIGKILL)
        assert llm.call_utility("ping") == "pong"  # it is restarted
        os.kill(pids(client)[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="engine_restarts=1 allows 1"):
            llm.call_utility("ping")
    finally:
        llm.shutdown()


@pytest.fixture
def driver(tmp_path):
    """Blocking code over two engines in this process."""
    slow = {"delay_s": 0.004}  # so that requests come before the ones before them have ended
    driver = Driver("replicas", tmp_path, enable_lora=True, max_cpu_loras=2, hf_overrides=slow)
    yield driver
    driver.close()


def executors(driver: Driver) -> list:
    return [replica.client._engine.core.executor for replica in inner(driver.client)._replicas]


def test_weights_that_one_engine_cannot_load_end_its_use(driver, monkeypatch) -> None:
    def fail(path: str) -> None:
        raise ModelLoadError(f"{path} is gone")

    with pytest.raises(ModelLoadError, match="/models/missing"):
        driver.call("load_weights", "/models/missing")  # the first one refuses: nothing is changed
    assert driver.client.engines_up() == [True, True]
    monkeypatch.setattr(executors(driver)[1], "load_weights", fail)
    with pytest.raises(ModelLoadError, match="/models/new is gone"):
        driver.call("load_weights", "/models/new")
    assert driver.client.engines_up() == [True, False]
    requests = long_requests(8)
    for request in requests:
        driver.client.add_request(request)
    assert num_requests(driver.client) == [8, 0]
    results, digest = driver.collect(8), weights_digest("/models/new")
    for request in requests:
        arguments = request.prompt_token_ids, request.sampling_params, [], driver.config
        assert results[request.request_id][0] == expected_output(*arguments, digest)[0]


def test_adapters_are_on_all_engines(driver) -> None:
    adapter = LoRARequest("one", 1, "/adapters/one")
    assert driver.call("add_lora", adapter) is True
    assert len(driver.client._run(inner(driver.client).call_each_async, "list_loras")) == 2
    for i, request in enumerate(long_requests(6)):
        driver.client.add_request(
            msgspec.structs.replace(request, lora_request=adapter if i % 2 else None)
        )
    assert min(num_requests(driver.client)) > 0
    assert all(not end.error for _, end in driver.collect(6).values())
    assert driver.call("remove_lora", 1) is True and driver.call("list_loras") == []


def test_new_requests_go_to_the_engine_that_is_traced(driver) -> None:
    driver.call("start_trace", 3)
    for request in long_requests(4, max_tokens=5):
        driver.client.add_request(request)
    assert sorted(num_requests(driver.client)) == [0, 4]
    driver.collect(4)
    assert driver.call("end_trace").steps
    for request in long_requests(4, max_tokens=5):  # of other prompts, which no engine has cached
        prompt = request.prompt_token_ids[::-1]
        driver.client.add_request(msgspec.structs.replace(request, prompt_token_ids=prompt))
    assert num_requests(driver.client) == [2, 2]
    driver.collect(4)


def test_an_owner_gets_its_share_beside_a_flood(driver) -> None:
    """B's requests come behind A's flood on both engines, and do not wait for it."""
    flood = [
        EngineCoreRequest(f"a{i}", [i % 97] * 60, SamplingParams(max_tokens=40, seed=0), owner="a")
        for i in range(80)
    ]
    for request in flood:
        driver.client.add_request(request)
    ended: list[str] = []
    counts: list[int] = []
    for turn in range(2):
        mine = [
            EngineCoreRequest(
                f"b{turn}{i}", [i, turn, 5] * 20, SamplingParams(max_tokens=40, seed=0), owner="b"
            )
            for i in range(4)
        ]
        for request in mine:
            driver.client.add_request(request)
        waiting = {request.request_id for request in mine}
        while waiting:
            outputs = driver.get_output()
            ids = [outputs.request_ids[end.row] for end in outputs.finished]
            ended += ids
            waiting -= set(ids)
        counts.append(sum(name.startswith("a") for name in ended))
    assert counts[0] < 30, counts  # in order of arrival, most of the 80 would come first
    assert counts[1] < 60, counts
