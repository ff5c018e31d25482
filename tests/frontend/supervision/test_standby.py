"""A standby takes the place of a dead engine, has its weights, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from unittest.mock import Mock

import psutil
import pytest
from quire import EngineArgs, LLMEngine, SamplingParams
from quire.frontend.clients import connect
from quire.frontend.clients.mp_client import MPClient
from quire.frontend.clients.own_loop import run_once
from quire.frontend.supervision import standby as module
from quire.frontend.supervision.supervised_client import SupervisedClient
from quire.ipc.errors import InvalidParameterError, NotEnoughMemoryError
from quire.ipc.machine import num_open_descriptors
from quire.tests import fake_gpu_engine
from quire.tests.fake_engine import COMMAND, Hold, open_blocking, wait_until
from quire.tests.fakes import make_config, weights_digest
from quire.tests.frontend.supervision.test_supervised_client import (
    Asyncio,
    Blocking,
    assert_expected,
    kill,
    some_requests,
)
from quire.tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.sampled(step=2)  # blocking code in one test, asyncio's in the next


@pytest.fixture(params=[Blocking, Asyncio])
def open_engine(request):
    opened = []

    def open_(**settings):
        opened.append(request.param(standby=True, **settings))
        return opened[-1]

    yield open_
    for engine in opened:
        engine.close()


def standby_pid(engine) -> int:
    """When it is ready."""
    standby = engine.inner._successors.standby
    wait_until(lambda: standby.is_ready, 60)
    return standby._ready.engine_pid


def test_it_takes_over_and_another_follows(open_engine, tmp_path) -> None:
    hold = Hold(tmp_path, 30)
    engine = open_engine(hf_overrides={"delay_s": 0.005} | hold.overrides)
    requests = some_requests(8, max_tokens=90)

    def end_it() -> None:
        kill(engine.client)
        hold.end()

    for _ in range(2):
        expected_pid = standby_pid(engine)
        hold.begin()
        threading.Timer(0.3, end_it).start()
        assert_expected(requests, engine.generate(requests), engine.client.ready.config)
        assert engine.client.engine_pid == expected_pid
    assert engine.client.restarts.by_cause == {"SIGKILL": 2}
    assert engine.client.ready.epoch == 2
    standby_pid(engine)  # an idle engine's death
    kill(engine.client)
    assert engine.call("ping") == "pong"
    assert engine.call("check_integrity") is True


def test_a_death_while_it_starts_waits_for_it(open_engine) -> None:
    engine = open_engine()
    kill(engine.client)
    requests = some_requests(3)
    assert_expected(requests, engine.generate(requests), engine.client.ready.config)
    assert engine.client.ready.epoch == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_it_has_the_weights_that_were_loaded(open_engine, when: str) -> None:
    """Before and after it has started."""
    engine = open_engine()
    if when == "after":
        standby_pid(engine)
    engine.call("load_weights", "other")
    standby = engine.inner._successors.standby
    wait_until(lambda: standby.is_ready and standby._ready_weights.path == "other", 60)
    kill(engine.client)
    requests = some_requests(3)
    outputs = engine.generate(requests)
    assert_expected(requests, outputs, engine.client.ready.config, weights_digest("other"))


def test_one_that_dies_is_replaced_as_often_as_an_engine(open_engine, caplog) -> None:
    engine = open_engine(engine_restarts=1)
    first = standby_pid(engine)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: engine.client.standby_is_ready and standby_pid(engine) != first, 60)
    os.kill(standby_pid(engine), signal.SIGSEGV)
    wait_until(lambda: "there will be no other" in caplog.text, 60)
    assert engine.client.standby_is_ready is False
    kill(engine.client)  # an engine is started as without a standby
    assert engine.call("ping") == "pong"


def test_on_a_gpu_it_loads_nothing_until_it_takes_over(open_engine, tmp_path) -> None:
    """Then it has the state of the engine before, and another follows."""
    loads = tmp_path / "loads"
    engine = open_engine(device="cuda", hf_overrides={"loads": str(loads)})
    engine.call("load_weights", "other")
    expected = [engine.client.engine_pid]
    for _ in range(2):
        expected.append(standby_pid(engine))
        assert [int(line) for line in loads.read_text().split()] == expected[:-1]
        kill(engine.client)
        requests = some_requests(3)
        outputs = engine.generate(requests)
        assert_expected(requests, outputs, engine.client.ready.config, weights_digest("other"))
        assert engine.client.engine_pid == expected[-1]
    assert [int(line) for line in loads.read_text().split()] == expected
    assert engine.client.ready.epoch == 2


def test_on_a_gpu_without_room_an_engine_is_started_in_its_place(
    open_engine, tmp_path, caplog
) -> None:
    full = tmp_path / "full"
    engine = open_engine(device="cuda", hf_overrides={"lacks_memory": str(full)})
    first = standby_pid(engine)
    full.touch()
    kill(engine.client)
    requests = some_requests(3)
    assert_expected(requests, engine.generate(requests), engine.client.ready.config)
    assert engine.client.engine_pid != first and not full.exists()
    assert "weights: they do not fit; starting it again" in caplog.text
    assert standby_pid(engine) not in (first, engine.client.engine_pid)


@pytest.mark.slow
def test_on_a_gpu_it_continues_with_the_same_tokens(tmp_path) -> None:
    """The GPU is a fake (tests/fake_gpu.py), of each process its own."""
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3], list(range(5, 45)))]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
    model = str(save_tiny_model(tmp_path, "qwen3"))
    sizes = {"max_model_len": 128, "num_gpu_blocks_override": 40, "num_threads": 1}
    tokens = {}
    for device, command in (("cpu", None), ("cuda", fake_gpu_engine.COMMAND)):
        args = EngineArgs(model, device=device, dtype="float32", standby=device == "cuda", **sizes)
        config = args.create_engine_config()

        async def start(config=config, command=command) -> SupervisedClient:
            first = await MPClient.start(config, command=command)
            return SupervisedClient(first, config, command=command)

        client = open_blocking(start())
        llm = LLMEngine(config, client)
        for index, prompt in enumerate(prompts):
            llm.add_request(str(index), prompt, params)
        found = {}
        if device == "cuda":
            wait_until(lambda: client.standby_is_ready, 60)
            while not found:  # in the middle of the answers
                found |= {one.request_id: one for one in llm.step()}
            kill(client)
        while llm.has_unfinished_requests():
            found |= {one.request_id: one for one in llm.step()}
        tokens[device] = {name: one.outputs[0].token_ids for name, one in found.items()}
        assert client.restarts.by_cause == ({"SIGKILL": 1} if device == "cuda" else {})
        llm.shutdown()
    assert tokens["cuda"] == tokens["cpu"]


@pytest.mark.parametrize("moment", ["start", "ready"])
def test_nothing_remains(moment: str) -> None:
    engine = Blocking(standby=True)
    if moment == "ready":
        standby_pid(engine)
    else:
        wait_until(lambda: len(engines()) == 2)
    children, begin = engines(), time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 25  # startup_timeout_s is 120
    assert psutil.wait_procs(children, timeout=60)[1] == []
    wait_until(lambda: all(thread.name != "quire-standby" for thread in threading.enumerate()))


def test_it_leaves_no_descriptor() -> None:
    before = num_open_descriptors()
    standby = module.Standby(make_config(), [], Mock())
    assert num_open_descriptors() == before + 2
    standby.close()
    standby.close()
    standby.prepare(1)
    assert num_open_descriptors() == before


def engines() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "quire.tests.fake_engine" in p.cmdline()]


def test_it_is_idle(open_engine) -> None:
    process = psutil.Process(standby_pid(open_engine()))
    before = sum(process.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before < 0.1


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("inproc", {}),
        ("ipc:///nowhere/engine.sock", {}),
        ("process", {"on_engine_death": "fail"}),
        ("process", {"engine_restarts": 0}),
        ("process", {"device": "cuda", "tensor_parallel_size": 2}),
    ],
)
def test_where_there_can_be_none(engine: str, settings: dict) -> None:
    with pytest.raises(InvalidParameterError, match="^standby"):
        run_once(connect.start_client(make_config(standby=True, **settings), engine))


def test_it_must_fit(monkeypatch) -> None:
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 1000)
    monkeypatch.setattr("quire.ipc.handshake.engine_command", lambda **_: COMMAND)
    config = make_config(standby=True, startup_timeout_s=120.0)
    with pytest.raises(NotEnoughMemoryError, match="standby.*1000 bytes are free"):
        run_once(connect.start_client(config))
