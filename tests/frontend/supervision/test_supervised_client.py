"""SupervisedClient: engines die, and requests and state continue on the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from quire import AsyncLLM, LLMEngine, RequestOutput, SamplingParams
from quire.frontend.clients.mp_client import MPClient
from quire.frontend.clients.own_loop import run_once
from quire.frontend.supervision.supervised_client import SupervisedClient
from quire.ipc.errors import (
    EngineDeadError,
    EngineRestartedError,
    EngineStartError,
)
from quire.ipc.params import RequestOutputKind, child_seed
from quire.tests.fake_engine import COMMAND, Hold, daemon, open_blocking, wait_until
from quire.tests.fakes import expected_output, make_config, weights_digest

pytestmark = pytest.mark.sampled(step=2)  # blocking code in one test, asyncio's in the next

POISON = 96  # the token that ends the engine; other prompts do not have it


def supervised(asyncio_mode: bool = False, engine: str = "process", **settings) -> SupervisedClient:
    config = make_config(**{"startup_timeout_s": 120.0, "engine_restarts": 1000, **settings})
    command = COMMAND if engine == "process" else None

    async def start() -> SupervisedClient:
        first = await MPClient.start(config, engine, command=command)
        return SupervisedClient(first, config, engine, command=command)

    return run_once(start()) if asyncio_mode else open_blocking(start())


def some_requests(number: int, seed: int = 0, max_tokens: int = 60):
    """Prompts with their parameters; some have two completions."""
    rng = random.Random(seed)
    return {
        f"r{i}": (
            [rng.randrange(POISON) for _ in range(rng.randint(1, 60))],
            SamplingParams(
                temperature=float(i % 3 > 0),
                seed=rng.randrange(2**40),
                max_tokens=rng.randint(max_tokens // 2, max_tokens),
                n=1 + (i % 3 > 1),
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        for i in range(number)
    }


def assert_expected(requests, outputs: dict[str, RequestOutput], config, weights=0) -> None:
    for request_id, (prompt, params) in requests.items():
        output = outputs[request_id]
        assert output.error is None, output.error
        for completion in output.outputs:
            own = params
            if params.n > 1:
                seed = child_seed(params.seed, completion.index)
                own = SamplingParams(
                    temperature=params.temperature, seed=seed, max_tokens=params.max_tokens
                )
            expected = expected_output(prompt, own, [], config, weights)[0]
            assert completion.token_ids == expected, (request_id, completion.index)
            assert completion.finish_reason == "length"


class Blocking:
    """LLMEngine over a supervised client, used like Asyncio below."""

    def __init__(self, engine: str = "process", **settings):
        self.client = supervised(engine=engine, **settings)
        self.inner = self.client.client
        self.llm = LLMEngine(self.client.ready.config, self.client)

    def generate(self, requests, on_output: Callable[[], None] = lambda: None):
        for request_id, (prompt, params) in requests.items():
            self.llm.add_request(request_id, prompt, params)
        finished = {}
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                finished[output.request_id] = output
                on_output()
        return finished

    def call(self, method: str, *args):
        return self.llm.call_utility(method, *args)

    def close(self) -> None:
        self.llm.shutdown()


class Asyncio:
    def __init__(self, engine: str = "process", **settings):
        self.runner = asyncio.Runner()
        self.client = self.inner = supervised(True, engine, **settings)
        self.llm = AsyncLLM(self.client.ready.config, self.client)

    def generate(self, requests, on_output: Callable[[], None] = lambda: None):
        async def one(request_id, prompt, params):
            async for output in self.llm.generate(prompt, params, request_id):
                on_output()
            return request_id, output

        async def every():
            return dict(
                await asyncio.gather(*(one(key, *value) for key, value in requests.items()))
            )

        return self.runner.run(asyncio.wait_for(every(), 100))

    def call(self, method: str, *args):
        return self.runner.run(asyncio.wait_for(self.llm.call_utility(method, *args), 60))

    def close(self) -> None:
        self.runner.run(self.llm.shutdown_async())
        self.runner.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.fixture(params=[Blocking, Asyncio])
def open_engine(request):
    opened = []

    def open_(**settings):
        opened.append(request.param(**settings))
        return opened[-1]

    yield open_
    for engine in opened:
        engine.close()


def kill(client: SupervisedClient, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(client.engine_pid, number)
    except ProcessLookupError:
        pass


class Killer(threading.Thread):
    """Ends the engine `times` times, each at a random moment after the next one has its requests:
    earlier, a request would be alone in it more than once. No engine ends its requests before.
    """

    def __init__(self, client: SupervisedClient, times: int, seed: int, hold: Hold):
        super().__init__(daemon=True)
        self.client, self.times, self.rng = client, times, random.Random(seed)
        self.hold = hold

    def num_unfinished(self) -> int:
        while True:
            try:
                return len(self.client.journal.entries())
            except RuntimeError:  # it has changed meanwhile
                pass

    def run(self) -> None:
        try:
            self.kill_often()
        finally:
            self.hold.end()

    def kill_often(self) -> None:
        wait_until(lambda: self.num_unfinished() >= 20)
        for i in range(self.times):
            wait_until(lambda: sum(self.client.restarts.by_cause.values()) == i, 60)
            wait_until(lambda: not self.client._resubmission.is_active, 60)
            self.hold.begin()
            time.sleep(self.rng.uniform(0.02, 0.2))
            if self.num_unfinished() < 4:  # the last one alone would look like the cause
                return
            kill(self.client, self.rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]))
            self.hold.end()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_requests_continue_after_deaths_at_random_moments(open_engine, tmp_path, seed: int) -> None:
    hold = Hold(tmp_path, 40)
    engine = open_engine(hf_overrides={"delay_s": 0.005} | hold.overrides)
    requests = some_requests(24, seed, max_tokens=190)
    killer = Killer(engine.inner, 4, seed, hold)
    killer.start()
    assert_expected(requests, engine.generate(requests), engine.client.ready.config)
    assert sum(engine.client.restarts.by_cause.values()) >= 2
    assert engine.client.restarts.num_resumed and engine.client.restarts.num_quarantined == 0
    assert engine.client.ready.epoch == sum(engine.client.restarts.by_cause.values())
    assert len(engine.client.restarts.gaps_s) >= 2
    killer.join()
    assert engine.call("check_integrity") is True


def test_an_idle_engine_is_replaced_by_the_next_call(open_engine) -> None:
    engine = open_engine()
    kill(engine.client)
    assert engine.call("ping") == "pong"
    kill(engine.client)
    requests = some_requests(3)
    assert_expected(requests, engine.generate(requests), engine.client.ready.config)


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
@pytest.mark.parametrize("after", [1, 5])
def test_a_poison_request_ends_alone(open_engine, number: int, after: int) -> None:
    poison = {"token": POISON, "after": after, "signal": number}
    engine = open_engine(hf_overrides={"poison": poison, "delay_s": 0.002})
    requests = some_requests(7, max_tokens=100)
    bad = {"bad": ([1, POISON, 2], SamplingParams(max_tokens=20, temperature=0.0))}
    outputs = engine.generate(requests | bad)
    assert_expected(requests, outputs, engine.client.ready.config)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert outputs["bad"].error is not None and "the engine died" in outputs["bad"].error
    assert engine.client.restarts.num_quarantined == 1
    assert sum(engine.client.restarts.by_cause.values()) <= 6


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("hang", ["stopped", "sleeping"])
def test_a_hanging_engine_is_replaced(open_engine, hang: str, capfd, tmp_path) -> None:
    """One that is stopped, and one whose thread is in a step without an end."""
    hold = Hold(tmp_path, 10)  # until it is stopped
    trouble = {"hang_once": str(tmp_path / "hung")} if hang == "sleeping" else hold.overrides
    engine = open_engine(step_timeout_s=1.0, hf_overrides={"delay_s": 0.005} | trouble)
    hold.begin()
    requests = some_requests(5, max_tokens=90)
    is_first = iter([True])

    def stop() -> None:
        if hang == "stopped" and next(is_first, False):
            os.kill(engine.client.engine_pid, signal.SIGSTOP)
            hold.end()

    streams = {
        key: (prompt, msgspec.structs.replace(params, output_kind=RequestOutputKind.CUMULATIVE))
        for key, (prompt, params) in requests.items()
    }
    began = time.monotonic()
    assert_expected(requests, engine.generate(streams, stop), engine.client.ready.config)
    assert engine.client.restarts.by_cause["hang"] >= 1
    if hang == "sleeping":
        assert "execute_model" in capfd.readouterr().err  # the stacks of its threads
    assert max(engine.client.restarts.gaps_s) < time.monotonic() - began


@pytest.mark.slow
def test_a_long_call_is_no_hang(open_engine) -> None:
    engine = open_engine(step_timeout_s=1.0, hf_overrides={"slow_call_s": 3.5})
    assert engine.call("collective_rpc", "check_health")
    assert engine.client.restarts.by_cause == {}


def test_a_request_alone_ends_after_two_deaths(open_engine) -> None:
    poison = {"token": POISON, "after": 1, "signal": signal.SIGSEGV}
    engine = open_engine(hf_overrides={"poison": poison})
    outputs = engine.generate({"bad": ([POISON], SamplingParams(max_tokens=9))})
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert engine.client.restarts.by_cause == {"SIGSEGV": 2}
    requests = some_requests(2)
    assert_expected(requests, engine.generate(requests), engine.client.ready.config)


def test_the_budget_ends(open_engine) -> None:
    engine = open_engine(engine_restarts=1)
    kill(engine.client)
    assert engine.call("ping") == "pong"
    kill(engine.client)
    with pytest.raises(EngineDeadError, match=r"SIGKILL.*engine_restarts=1 allows 1 in 10 min"):
        engine.call("ping")
    with pytest.raises(EngineDeadError, match="engine_restarts=1"):
        engine.generate(some_requests(1))


def test_starts_that_fail_slowly_are_not_repeated_for_ever(open_engine, monkeypatch) -> None:
    """Each takes longer than the period of the budget, so that no two are in one."""
    monkeypatch.setattr("quire.frontend.supervision.restart_budget.PERIOD_S", 0.0)
    engine = open_engine(engine_restarts=2, step_timeout_s=60.0)
    no_room = "import sys; sys.exit('no room')"
    engine.inner._successors.command = [sys.executable, "-c", no_room]
    kill(engine.client)
    with pytest.raises(EngineDeadError, match=r"(?s)no room.*allows 2 in 10 minutes, or as many"):
        engine.generate(some_requests(2))
    with pytest.raises(EngineDeadError, match="no room"):
        engine.call("ping")


def test_state_that_was_set_is_set_again(open_engine) -> None:
    engine = open_engine()
    engine.call("load_weights", "other")
    engine.call("pause", "keep")
    kill(engine.client)
    assert engine.call("is_paused") is True
    engine.call("resume")
    engine.call("sleep", 1)
    kill(engine.client)
    assert engine.call("is_sleeping") is True
    engine.call("wake_up")
    requests = some_requests(3)
    outputs = engine.generate(requests)
    assert_expected(requests, outputs, engine.client.ready.config, weights_digest("other"))


def test_a_call_that_is_not_repeatable_says_so(open_engine) -> None:
    engine = open_engine()
    kill(engine.client)
    with pytest.raises(EngineRestartedError, match="died during collective_rpc"):
        engine.call("collective_rpc", "check_health")
    assert engine.call("collective_rpc", "check_health")


def test_completions_of_a_resumed_request_can_be_aborted() -> None:
    engine = Blocking(hf_overrides={"delay_s": 0.01})
    try:
        engine.llm.add_request("two", [1, 2], SamplingParams(n=2, max_tokens=200, seed=1))
        while not any(output.outputs[0].token_ids for output in engine.llm.step()):
            pass
        kill(engine.client)
        engine.llm.step()
        engine.llm.abort_request("two")
        assert engine.call("scheduler_state")["requests"] == []
    finally:
        engine.close()


def test_requests_may_come_and_go_while_no_engine_is_there() -> None:
    async def main() -> None:
        client = supervised(True, hf_overrides={"delay_s": 0.01})
        llm = AsyncLLM(client.ready.config, client)
        requests = some_requests(3)

        async def run(request_id: str, prompt, params) -> RequestOutput:
            async for output in llm.generate(prompt, params, request_id):
                pass
            return output

        first = asyncio.create_task(run("r0", *requests["r0"]))
        gone = asyncio.create_task(run("gone", [5], SamplingParams(max_tokens=200)))
        await asyncio.sleep(0.1)
        kill(client)
        await asyncio.sleep(0.05)
        late = [asyncio.create_task(run(key, *requests[key])) for key in ("r1", "r2")]
        gone.cancel()
        outputs = await asyncio.gather(first, *late)
        assert_expected(requests, dict(zip(requests, outputs)), client.ready.config)
        state = await llm.call_utility("scheduler_state")
        assert state["requests"] == []
        kill(client)
        waiting = asyncio.create_task(run("r1", *requests["r1"]))
        await asyncio.sleep(0.05)
        await llm.shutdown_async()  # while the next engine starts
        with pytest.raises(EngineDeadError):
            await waiting

    asyncio.run(asyncio.wait_for(main(), 100))


def test_a_request_may_come_while_an_idle_engine_is_replaced() -> None:
    async def main() -> None:
        client = supervised(True)
        llm = AsyncLLM(client.ready.config, client)
        assert await llm.call_utility("ping") == "pong"
        kill(client)
        while not client.is_replacing:
            await asyncio.sleep(0.002)
        outputs = [output async for output in llm.generate([1], SamplingParams(max_tokens=3), "r")]
        assert outputs[-1].finished
        await llm.shutdown_async()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_outputs_that_a_dead_engine_left_do_not_disturb_its_replacement(tmp_path) -> None:
    """A call begins the replacement while the outputs of the dead engine are still being read: the
    requests are submitted to the next engine, not to the dead one.
    """

    hold = Hold(tmp_path, 100)

    async def main() -> None:
        client = supervised(True, hf_overrides={"delay_s": 0.002} | hold.overrides)
        llm = AsyncLLM(client.ready.config, client)
        hold.begin()
        has_begun = asyncio.Event()

        async def run(request_id: str) -> RequestOutput:
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            async for output in llm.generate([1], params, request_id):
                has_begun.set()
            return output

        running = [asyncio.create_task(run(f"r{i}")) for i in range(3)]
        await has_begun.wait()
        wait_until(hold.is_reached)  # nothing reads the outputs meanwhile
        time.sleep(0.1)
        kill(client)
        hold.end()
        time.sleep(0.05)
        client._engine._on_death()
        assert len(client._engine._outputs) > 20
        assert await llm.call_utility("ping") == "pong"
        outputs = await asyncio.gather(*running)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [200, 200, 200]
        assert client.restarts.by_cause == {"SIGKILL": 1}
        await llm.shutdown_async()

    asyncio.run(asyncio.wait_for(main(), 100))


@pytest.mark.slow
def test_an_engine_that_leaves_in_a_drain_is_replaced_only_for_a_request() -> None:
    async def main() -> None:
        client = supervised(True, hf_overrides={"delay_s": 0.01})
        llm = AsyncLLM(client.ready.config, client)

        async def run(request_id: str) -> RequestOutput:
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            async for output in llm.generate([1], params, request_id):
                pass
            return output

        running = asyncio.create_task(run("running"))
        await asyncio.sleep(0.1)
        kill(client, signal.SIGTERM)
        client.begin_drain()
        assert (await running).outputs[0].finish_reason == "length"
        while not client.is_replacing:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        assert client.restarts.by_cause == {}
        assert (await run("late")).outputs[0].finish_reason == "length"
        assert client.restarts.by_cause == {"exit": 1}
        kill(client, signal.SIGTERM)
        await asyncio.sleep(0.5)
        await llm.shutdown_async()
        assert client.restarts.by_cause == {"exit": 1}

    asyncio.run(asyncio.wait_for(main(), 100))


@pytest.mark.parametrize("kind", [Blocking, Asyncio])
def test_a_daemon_that_is_started_again(tmp_path, kind) -> None:
    hold = Hold(tmp_path, 20)
    config = make_config(hf_overrides={"delay_s": 0.01} | hold.overrides)
    hold.begin()
    with daemon(tmp_path, config) as (address, process):
        engine = kind(address)
        requests = some_requests(6)
        has_begun = threading.Event()

        def replace() -> None:
            time.sleep(0.2)
            process.kill()
            process.wait()
            hold.end()
            os.unlink(tmp_path / "engine.sock")
            with daemon(tmp_path, config):
                has_begun.set()
                done.wait(60)

        done = threading.Event()
        thread = threading.Thread(target=replace)
        thread.start()
        try:
            assert_expected(requests, engine.generate(requests), config)
            assert has_begun.is_set() and engine.client.restarts.by_cause == {"daemon": 1}
        finally:
            engine.close()
            done.set()
            thread.join()


@pytest.mark.parametrize("kind", [Blocking, Asyncio])
def test_a_client_that_a_daemon_has_released_attaches_when_it_is_needed(tmp_path, kind) -> None:
    config = make_config(hf_overrides={"idle_s": 0.1})
    with daemon(tmp_path, config) as (address, process):
        engine, others = kind(address), []

        def crowd() -> None:
            """Others take all descriptors until this client is released."""
            with contextlib.suppress(EngineStartError):
                others.append(run_once(MPClient.start(config, address)))

        try:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))
            for use in (
                lambda: assert_expected(
                    some_requests(3), engine.generate(some_requests(3)), config
                ),
                lambda: engine.call("pause", "keep"),  # not repeated after a death
            ):
                use()
                engine.call("resume")
                first = engine.inner._engine
                wait_until(lambda: crowd() or select.select([first.pidfd], [], [], 0.01)[0], 60)
                if kind is Asyncio:  # the loop notices, and does not attach again by itself
                    engine.runner.run(until(lambda first=first: first.was_released))
                    engine.runner.run(asyncio.sleep(0.3))
                    assert engine.inner._engine is first
                use()
                assert engine.inner._engine is not first
                engine.call("resume")
            assert engine.client.restarts.by_cause == {}
        finally:
            engine.close()
            for client in others:
                client.shutdown()
