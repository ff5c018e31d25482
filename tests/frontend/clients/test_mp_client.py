"""MPClient when a process dies or does not start, or a client is not closed or reads late: every
waiter gets an error, nothing is leaked.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from quire.frontend.clients import mp_client
from quire.frontend.clients.mp_client import MAX_QUEUED_OUTPUTS, MPClient
from quire.frontend.clients.own_loop import run_once
from quire.ipc.errors import (
    EngineDeadError,
    EngineStartError,
    InvalidParameterError,
    RemoteTraceback,
)
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.fake_engine import COMMAND, daemon, is_gone, open_blocking, stop, wait_until
from quire.tests.fakes import make_config

LONG = EngineCoreRequest("long", [1, 2], SamplingParams(temperature=0.0, seed=0, max_tokens=250))
SHORT = EngineCoreRequest("short", [1, 2], SamplingParams(temperature=0.0, seed=0, max_tokens=9))
CAUSE = "was killed by SIGKILL"


def open_client(
    engine: str = "process", *, asyncio_mode: bool = False, command=COMMAND, **arguments
) -> MPClient:
    config = make_config(**{"startup_timeout_s": 120.0, **arguments})
    starting = MPClient.start(config, engine, command=command)
    return run_once(starting) if asyncio_mode else open_blocking(starting)


def engine_pid(client: MPClient) -> int:
    return client.engine_pid


def kill_later(pid: int, delay_s: float = 0.2) -> list[float]:
    """Kill `pid` after a moment. The list then holds the time."""
    killed_at: list[float] = []

    def kill() -> None:
        time.sleep(delay_s)
        killed_at.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    return killed_at


# ---------------------------------------------------------------- numbers of messages


def test_a_message_that_comes_twice_counts_once(monkeypatch):
    again: list = []

    def receive_twice(pull) -> list | None:
        if again:
            return again.pop()
        frames = receive(pull)
        again.extend([] if frames is None else [frames])
        return frames

    receive, has_message = mp_client.receive, mp_client.has_message
    monkeypatch.setattr(mp_client, "has_message", lambda pull: again or has_message(pull))
    monkeypatch.setattr(mp_client, "receive", receive_twice)
    client = open_client()
    client.add_request(SHORT)
    tokens: list[int] = []
    while len(tokens) < SHORT.sampling_params.max_tokens:
        outputs = client.get_output()
        assert outputs.first_indices == [len(tokens)]
        tokens += outputs.token_ids
    assert client.call_utility("ping") == "pong"  # its answer comes twice, too
    assert client.num_bad_frames >= len(tokens) - 1
    client.shutdown()


def test_a_message_that_is_lost_ends_the_engine(monkeypatch):
    num_received = 0

    def receive(pull) -> list | None:
        nonlocal num_received
        frames = receive_all(pull)
        num_received += frames is not None
        # instead of the third one comes what is behind it: None would mean that nothing is there
        return receive(pull) if frames is not None and num_received == 3 else frames

    receive_all = mp_client.receive
    monkeypatch.setattr(mp_client, "receive", receive)
    client = open_client()
    client.add_request(LONG)
    with pytest.raises(EngineDeadError, match="messages of the engine were lost on their way"):
        for _ in range(300):
            client.get_output()
    client.shutdown()


# ---------------------------------------------------------------- the engine dies


def test_death_while_idle():
    client = open_client()
    os.kill(engine_pid(client), signal.SIGKILL)
    wait_until(lambda: psutil.Process(engine_pid(client)).status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(EngineDeadError, match=CAUSE):
        client.call_utility("ping")
    with pytest.raises(EngineDeadError, match=CAUSE):
        client.add_request(LONG)
    client.shutdown()


WAITS = {
    "get_output": lambda client: [client.get_output() for _ in range(1000)],
    "utility": lambda client: [client.call_utility("ping") for _ in range(10**6)],
}


# Repeated, since the first calls may be answered before the long step starts.
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_death_while_blocked(wait):
    client = open_client(hf_overrides={"delay_s": 20.0})
    client.add_request(LONG)
    killed_at = kill_later(engine_pid(client))
    with pytest.raises(EngineDeadError, match=CAUSE):
        wait(client)
    assert time.monotonic() - killed_at[0] < 15
    client.shutdown()


def test_death_with_tasks_waiting():
    async def main() -> None:
        client = open_client(asyncio_mode=True)
        # long enough that no request is answered, however the machine schedules its processes
        stop(engine_pid(client))
        client.add_request(LONG)
        tasks = [asyncio.create_task(client.get_output_async())] + [
            asyncio.create_task(client.call_utility_async("ping")) for _ in range(3)
        ]
        killed_at = kill_later(engine_pid(client))
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert time.monotonic() - killed_at[0] < 15
        assert [type(result) for result in results] == [EngineDeadError] * 4 and all(
            CAUSE in str(result) for result in results
        )
        with pytest.raises(EngineDeadError, match=CAUSE):
            await client.get_output_async()
        client.shutdown()

    asyncio.run(main())


def test_outputs_sent_before_the_death_are_read_first():
    client = open_client(hf_overrides={"raise_at_step": 5})
    client.add_request(LONG)
    wait_until(lambda: psutil.Process(engine_pid(client)).status() == psutil.STATUS_ZOMBIE)
    assert sum(len(client.get_output().token_ids) for _ in range(5)) == 5
    with pytest.raises(EngineDeadError, match="scripted failure at step 5.*exited with code 1"):
        client.get_output()
    client.shutdown()


def test_the_cause_of_a_failure_is_told_before_the_process_ends():
    """The engine has closed its sockets, and still ends its executor."""
    client = open_client(hf_overrides={"raise_at_step": 5, "shutdown_s": 1.0})
    client.add_request(LONG)
    with pytest.raises(EngineDeadError, match="scripted failure at step 5"):
        while True:
            client.abort_requests(["another"])
            time.sleep(0.01)
    client.shutdown()


def test_a_daemons_death(tmp_path):
    with daemon(tmp_path, make_config(hf_overrides={"delay_s": 20.0})) as (address, process):
        client = open_client(address)
        client.add_request(LONG)
        killed_at = kill_later(process.pid)
        with pytest.raises(EngineDeadError, match=f"the engine .pid {process.pid}. is gone"):
            client.get_output()
        assert time.monotonic() - killed_at[0] < 15
        client.shutdown()


# ---------------------------------------------------------------- it does not start


@pytest.mark.parametrize(
    ("trouble", "expected", "text"),
    [
        ("fail", ValueError, "made of cheese"),
        ("die", EngineDeadError, "SIGKILL"),
        (
            "exit",
            EngineStartError,
            "exited with code 7; last lines of its stderr:\n    famous last words",
        ),
    ],
)
def test_start_up_failures(trouble, expected, text):
    children = psutil.Process().children()
    with pytest.raises(expected, match=text) as caught:
        open_client(hf_overrides={"at_load": trouble})
    if trouble == "fail":
        assert type(caught.value) is ValueError and isinstance(
            caught.value.__cause__, RemoteTraceback
        )
        assert "in load_model" in str(caught.value.__cause__)
    assert psutil.Process().children() == children


def test_an_invalid_parameter_keeps_its_name():
    with pytest.raises(InvalidParameterError, match="KV cache of 3 blocks") as caught:
        open_client(num_gpu_blocks_override=3)
    assert caught.value.parameter == "max_model_len"


def test_the_deadline():
    begin = time.monotonic()
    with pytest.raises(EngineStartError, match="did not answer in time .*startup_timeout_s"):
        open_client(hf_overrides={"at_load": "hang"}, startup_timeout_s=1.0)
    assert time.monotonic() - begin < 25


def test_a_program_that_is_not_an_engine():
    with pytest.raises(EngineStartError, match="(?s)exited with code 1.*No module named"):
        open_client(command=[sys.executable, "-m", "quire.no_such_engine"])


# ---------------------------------------------------------------- the frontend dies, or is not
# closed

PROGRAM = """
import sys, time
from quire.tests.frontend.clients.test_mp_client import open_client, LONG, engine_pid
client = open_client(hf_overrides={"delay_s": float(sys.argv[1])})
client.add_request(LONG)
print(engine_pid(client), flush=True)
time.sleep(float(sys.argv[2]))
"""


def run_program(delay_s: float, life_s: float) -> tuple[subprocess.Popen, int]:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(delay_s), str(life_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    return program, int(program.stdout.readline())


@pytest.mark.parametrize("delay_s", [0.01, 30.0], ids=["short steps", "in a long step"])
def test_a_killed_frontend_ends_its_engine(delay_s):
    program, pid = run_program(delay_s, 100)
    assert psutil.pid_exists(pid)
    program.kill()
    assert wait_until(lambda: is_gone(pid)) < 20
    program.communicate()


def test_a_script_that_does_not_close():
    program, pid = run_program(0.01, 0)
    assert program.wait(60) == 0
    assert not psutil.pid_exists(pid)
    program.communicate()


def test_an_unclosed_client_is_collected():
    client = open_client()
    pid = engine_pid(client)
    del client
    gc.collect()
    assert not psutil.pid_exists(pid)


def state() -> tuple:
    """Return threads (of Python and of ZMQ), descriptors and children of this process."""
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        len(psutil.Process().children()),
    )


def test_nothing_is_leaked(tmp_path):
    async def use_async() -> None:
        client = open_client(asyncio_mode=True)
        client.add_request(LONG)
        await client.get_output_async()
        waiter = asyncio.create_task(client.get_output_async())
        assert await client.call_utility_async("ping") == "pong"
        waiter.cancel()
        client.shutdown()

    def use(address: str) -> None:
        for engine in ("process", address):
            client = open_client(engine)
            client.add_request(LONG)
            client.get_output()
            client.shutdown()
        asyncio.run(use_async())

    def fail() -> None:
        dying = open_client()
        os.kill(engine_pid(dying), signal.SIGKILL)
        dying.shutdown()
        with pytest.raises(ValueError):
            open_client(hf_overrides={"at_load": "fail"})

    with daemon(tmp_path, make_config()) as (address, _):
        use(address)  # first uses open what stays, e.g. modules of the event loop
        before = state()
        for _ in range(2):
            use(address)
        fail()
        # a thread that has done its work takes a moment to end, and other tests may have left some
        wait_until(lambda: all(now <= then for now, then in zip(state(), before)))


# ---------------------------------------------------------------- asyncio, and reading late


def test_a_late_reader_gets_all_outputs():
    client = open_client(max_model_len=2048, num_gpu_blocks_override=300)
    client.add_request(
        EngineCoreRequest("a", [1], SamplingParams(temperature=0.0, seed=0, max_tokens=1500))
    )
    wait_until(lambda: client.client._connection.pull.poll(0))
    time.sleep(0.5)
    first = client.get_output()
    assert len(client.client._outputs) <= MAX_QUEUED_OUTPUTS
    tokens, finished = list(first.token_ids), False
    while not finished:
        outputs = client.get_output()
        assert outputs.first_indices == [len(tokens)]
        tokens, finished = tokens + outputs.token_ids, bool(outputs.finished)
    assert len(tokens) == 1500
    client.shutdown()


def test_a_late_task_gets_all_outputs_and_others_are_served():
    async def main() -> None:
        client = open_client(asyncio_mode=True, max_model_len=2048, num_gpu_blocks_override=300)
        await client.call_utility_async("ping")
        client.add_request(
            EngineCoreRequest("a", [1], SamplingParams(temperature=0.0, seed=0, max_tokens=1500))
        )
        cpu = time.process_time()
        await asyncio.sleep(1.5)  # no task reads; the loop must neither read without limit nor spin
        assert len(client._outputs) <= MAX_QUEUED_OUTPUTS and time.process_time() - cpu < 0.5
        assert await asyncio.wait_for(client.call_utility_async("ping"), 60) == "pong"
        num_tokens, finished = 0, False
        while not finished:
            outputs = await asyncio.wait_for(client.get_output_async(), 60)
            assert outputs.first_indices == [num_tokens]
            num_tokens, finished = num_tokens + len(outputs.token_ids), bool(outputs.finished)
        assert num_tokens == 1500
        client.shutdown()

    asyncio.run(main())


def test_no_wake_up_is_lost():
    """ZMQ's descriptor is edge-triggered: a message that arrives between the last poll and the
    reset must not wait for the next one.
    """

    async def main() -> None:
        client = open_client(asyncio_mode=True)
        # after each answer the engine is silent: no later event would wake the loop
        for _ in range(500):
            assert await asyncio.wait_for(client.call_utility_async("ping"), 60) == "pong"
        for _ in range(5):
            client.add_request(LONG)
            num_tokens = 0
            while num_tokens < 250:
                num_tokens += len((await asyncio.wait_for(client.get_output_async(), 60)).token_ids)
                assert await asyncio.wait_for(client.call_utility_async("ping"), 60) == "pong"
        client.shutdown()

    asyncio.run(main())


def test_a_cancelled_wait_loses_nothing():
    async def main() -> None:
        client = open_client(asyncio_mode=True, hf_overrides={"delay_s": 0.01})
        client.add_request(LONG)
        num_tokens = num_cancelled = 0
        while num_tokens < 250:
            try:
                outputs = await asyncio.wait_for(client.get_output_async(), 0.008)
            except TimeoutError:
                num_cancelled += 1
                continue
            assert outputs.first_indices == [num_tokens]
            num_tokens += 1
        assert num_cancelled > 0
        call = asyncio.create_task(client.call_utility_async("ping"))
        await asyncio.sleep(0)
        call.cancel()
        assert await client.call_utility_async("ping") == "pong"
        client.shutdown()

    asyncio.run(main())


def test_one_client_over_two_loops():
    client = open_client(asyncio_mode=True)
    assert asyncio.run(client.call_utility_async("ping")) == "pong"
    assert asyncio.run(client.call_utility_async("ping")) == "pong"
    client.shutdown()


def test_waiters_of_a_client_that_is_shut_down():
    async def main() -> None:
        client = open_client(asyncio_mode=True)
        waiter = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0.05)
        client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await asyncio.wait_for(waiter, 60)

    asyncio.run(main())


def test_blocking_reads_are_refused_in_asyncio_mode():
    client = open_client(asyncio_mode=True)
    with pytest.raises(RuntimeError, match="get_output_async"):
        client.get_output()
    client.shutdown()


def test_an_idle_loop_uses_no_cpu():
    async def main() -> None:
        client = open_client(asyncio_mode=True)
        waiter = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0.1)
        cpu = time.process_time()
        await asyncio.sleep(2)
        assert time.process_time() - cpu < 0.02
        waiter.cancel()
        client.shutdown()

    asyncio.run(main())


def test_engine_index_and_epoch_come_back():
    client = open_blocking(MPClient.start(make_config(), epoch=7, engine_index=3, command=COMMAND))
    client.add_request(LONG)
    for message in (client.ready, client.get_output()):
        assert (message.engine_index, message.epoch) == (3, 7)
    client.shutdown()


def test_torch_is_not_imported():
    modules = (
        "quire.frontend.clients.mp_client, quire.frontend.clients.inproc_client, "
        "quire.core.engine_proc"
    )
    script = f"import sys, {modules}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )
