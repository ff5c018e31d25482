"""EngineCoreProc as a program: signals, drain, idleness, bad frames, several programs on one
daemon, and its loop with a slow reader.
"""

from __future__ import annotations

import ast
import collections
import gc
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import msgspec
import psutil
import pytest
from quire.core.engine_proc import EngineCoreProc, make_threads
from quire.ipc import engine_input as events
from quire.ipc.codec import BadFrameError, MessageDecoder, MessageEncoder
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    Ready,
    Shutdown,
)
from quire.ipc.process import SignalPipe
from quire.ipc.sockets import ENGINE_IDENTITY, Wire, connect_push, make_context, receive
from quire.tests.core.engine_clients import collect, make_request
from quire.tests.fake_engine import COMMAND, Hold, TroubledExecutor, daemon, wait_until
from quire.tests.fakes import expected_output, make_config
from quire.tests.frames import CLIENT_MESSAGES, ENGINE_MESSAGES, NUM_FRAMES, mutations
from quire.tests.garbage import nothing_frozen
from quire.tests.wires import ClientEnds

FRAMES_PER_CHUNK = 500


def expected(request: EngineCoreRequest, config) -> list[int]:
    return expected_output(
        request.prompt_token_ids, request.sampling_params, request.eos_token_ids, config
    )[0]


# ---------------------------------------------------------------- signals


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal and wait until the process has it: another one meanwhile would be lost."""

    def is_pending() -> bool:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        pending = int(re.search(r"ShdPnd:\s*(\w+)", status)[1], 16)
        return bool(pending & 1 << number - 1)

    os.kill(pid, number)
    wait_until(lambda: not is_pending())
    time.sleep(0.1)


def test_sigterm_drains(open_client, tmp_path):
    """A child takes requests as long as it has some."""
    hold = Hold(tmp_path, 10)
    client = open_client(hf_overrides={"delay_s": 0.03} | hold.overrides)
    running = make_request("running", max_tokens=20)
    hold.begin()
    client.add_request(running)
    client.get_output()
    os.kill(client.engine_pid, signal.SIGTERM)
    time.sleep(0.1)
    client.add_request(make_request("late"))
    hold.end()
    results = collect(client, "running", "late")
    assert len(results["running"][0]) == 19 and results["running"][1].reason == FinishReason.LENGTH
    assert results["late"][1].reason == FinishReason.LENGTH
    with pytest.raises(EngineDeadError, match="asked to leave.*exited with code 0"):
        client.get_output()


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)], ids=["two SIGTERM", "SIGINT"]
)
def test_an_immediate_shutdown_ends_in_the_middle_of_a_step(open_client, signals):
    client = open_client(hf_overrides={"delay_s": 30.0})
    client.add_request(make_request("slow"))
    time.sleep(0.2)
    for number in signals:
        send(client.engine_pid, number)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"exited with code {128 + signals[-1]}"):
        client.get_output()
    assert time.monotonic() - begin < 20


def test_sigterm_during_start_up(open_client, tmp_path):
    config = make_config(hf_overrides={"at_load": "hang"}, startup_timeout_s=120.0)
    with daemon(tmp_path, config) as (_, process):
        assert process.stderr.readline() == b"hanging\n"  # earlier, the first signal would end it
        send(process.pid, signal.SIGTERM)
        send(process.pid, signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


# ---------------------------------------------------------------- idleness


def cpu_seconds(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def test_an_idle_engine_uses_no_cpu(open_client):
    client = open_client()
    collect_one = make_request("a")
    client.add_request(collect_one)
    collect(client, "a")
    time.sleep(0.2)
    engine, own = cpu_seconds(client.engine_pid), time.process_time()
    time.sleep(3)
    # of 3 s; the kernel counts in ticks of 0.01
    assert cpu_seconds(client.engine_pid) - engine <= 0.03
    assert time.process_time() - own <= 0.03


# ---------------------------------------------------------------- bad frames


def test_a_deadline_passes_while_the_engine_is_paused(open_client):
    client = open_client()
    client.call_utility("pause", "keep")
    request = make_request("r", max_tokens=5)
    deadline = time.monotonic() + 0.2
    client.add_request(msgspec.structs.replace(request, deadline=deadline))
    assert client.client._connection.pull.poll(60_000)
    outputs = client.get_output()
    assert [end.reason for end in outputs.finished] == [FinishReason.TIMEOUT]
    assert time.monotonic() >= deadline


@NUM_FRAMES
def test_fuzz_towards_the_engine(open_client, num_frames):
    client = open_client(max_num_seqs=64)
    rng, config = random.Random(3), client.ready.config
    router = client.client._connection.router
    for chunk in range(max(1, num_frames // FRAMES_PER_CHUNK)):
        good = make_request(f"good-{chunk}", prompt=[chunk % 97, 1])
        for i, frames in enumerate(mutations(CLIENT_MESSAGES, rng, FRAMES_PER_CHUNK)):
            router.send_multipart([ENGINE_IDENTITY, *frames])
            if i == FRAMES_PER_CHUNK // 2:
                client.add_request(good)
        assert client.call_utility("ping") == "pong"
        tokens, end = collect(client, good.request_id)[good.request_id]
        assert tokens == expected(good, config) and end.reason == FinishReason.LENGTH
    assert client.call_utility("get_metrics")["num_bad_frames"] > num_frames // 2
    assert client.call_utility("check_integrity") is True


@NUM_FRAMES
def test_fuzz_towards_the_client(open_client, num_frames):
    client = open_client()
    rng, config = random.Random(4), client.ready.config
    context = make_context()
    stranger = connect_push(context, client.client._connection.wire)
    for chunk in range(max(1, num_frames // FRAMES_PER_CHUNK)):
        good = make_request(f"good-{chunk}", prompt=[chunk % 97, 1])
        client.add_request(good)
        for frames in mutations(ENGINE_MESSAGES, rng, FRAMES_PER_CHUNK):
            if not is_outputs(frames):  # the client would take it for the engine's
                stranger.send_multipart(frames)
        assert client.call_utility("ping") == "pong"
        tokens, end = collect(client, good.request_id)[good.request_id]
        assert tokens == expected(good, config) and end.reason == FinishReason.LENGTH
    assert client.num_bad_frames > num_frames // 2
    context.destroy(linger=0)


def is_outputs(frames: list[bytes]) -> bool:
    try:
        return isinstance(MessageDecoder(EngineMessage, 2**20).decode(frames), EngineCoreOutputs)
    except BadFrameError:
        return False


# ---------------------------------------------------------------- a slow reader


def test_a_slow_reader_blocks_the_steps_but_not_the_engine(monkeypatch):
    """EngineCoreProc runs in a thread of this process, with a backlog that fills quickly."""
    monkeypatch.setattr("quire.ipc.sockets.OUTPUT_HIGH_WATER_MARK", 10)
    # A step sleeps for a moment, so that the stepping thread does not starve the output thread,
    # which reports a full backlog.
    config = make_config(
        max_model_len=2048, num_gpu_blocks_override=1000, hf_overrides={"delay_s": 0.002}
    )
    context, signals = make_context(), SignalPipe()
    limit = config.service_config.max_message_bytes
    ends = ClientEnds(context, limit)
    router, pull = ends.router, ends.pull
    input_, output = make_threads(context, limit, signals, max_backlog_bytes=2000)
    input_.serve_parent(ends.wire)
    executors = []

    def make_executor(config):
        executors.append(TroubledExecutor(config))
        return executors[0]

    proc = EngineCoreProc(input_, output, make_executor)
    exit_codes = []
    thread = threading.Thread(target=lambda: exit_codes.append(proc.run(config)))
    thread.start()
    encoder, decoder = MessageEncoder(limit), MessageDecoder(EngineMessage, limit)
    assert router.poll(60_000) and receive(router)
    while pull.poll(60_000) and not isinstance(decoder.decode(receive(pull)), Ready):
        pass  # its progress
    requests = [make_request(f"{i}-{'x' * 2000}", max_tokens=300, prompt=[i]) for i in range(4)]
    for request in requests:
        router.send_multipart([ENGINE_IDENTITY, *encoder.encode(request)])
    wait_until(lambda: proc.output.is_full)
    num_steps = len(executors[0].steps)
    time.sleep(0.2)
    assert len(executors[0].steps) <= num_steps + 1 < 300
    tokens, num_finished = {request.request_id: [] for request in requests}, 0
    while num_finished < 4:
        assert pull.poll(60_000)
        message = decoder.decode(receive(pull))
        if isinstance(message, EngineCoreOutputs):
            for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
                tokens[request_id].append(token_id)
            num_finished += len(message.finished)
    assert [tokens[request.request_id] for request in requests] == [
        expected(request, config) for request in requests
    ]
    router.send_multipart([ENGINE_IDENTITY, *encoder.encode(Shutdown())])
    thread.join(60)
    assert exit_codes == [0]
    ends.close()
    context.term()
    signals.close()


def test_counters_of_its_threads_are_in_the_metrics():
    """Only the counters of the threads and the event queue are read, so fakes stand in for the
    threads.
    """
    input_ = types.SimpleNamespace(
        events=queue.SimpleQueue(), aborts=collections.deque(), num_bad_frames=3, codec=None
    )
    ignore = lambda *args: None  # noqa: E731
    output = types.SimpleNamespace(
        num_lost_outputs=4, connect=ignore, disconnect=ignore, send=ignore
    )
    proc = EngineCoreProc(input_, output, TroubledExecutor)
    proc.config = make_config()
    proc._start()
    for client_index in range(3):
        proc._on_event(events.ClientJoined(client_index, Wire("nowhere", b"")))
    proc.core.add_request(make_request("r", max_tokens=100), 1)
    proc._on_event(events.ClientOverflowed(1))
    proc._on_event(events.ClientLeft(1))
    proc._on_event(events.ClientLeft(2))
    metrics = proc.core.observer.get_metrics()
    counted = {
        name: value
        for name, value in metrics.items()
        if value and name not in ("num_blocks", "num_free_blocks")
    }
    assert counted == {
        "num_bad_frames": 3,
        "num_lost_outputs": 4,
        "num_overflowed_clients": 1,
        "num_requests_orphaned": 1,
        "num_finished_abort": 1,
    }


def test_garbage_collection_is_off_at_start_and_skips_start_up_objects():
    """`main` switches the garbage collector off. If nothing has, as for an engine in a user's
    program, it is not changed.
    """
    counts = []
    for is_enabled in (True, False):
        input_ = types.SimpleNamespace(
            events=queue.SimpleQueue(), aborts=collections.deque(), codec=None
        )
        proc = EngineCoreProc(input_, types.SimpleNamespace(send=None), TroubledExecutor)
        proc.config = make_config()
        with nothing_frozen():
            (gc.enable if is_enabled else gc.disable)()
            try:
                proc._start()
                counts.append(gc.get_freeze_count())
                assert gc.isenabled()
            finally:
                gc.enable()
    assert counts[0] == 0 < counts[1]


# ---------------------------------------------------------------- the daemon

PROGRAM = """
import sys
from quire.frontend.clients.mp_client import MPClient
from quire.tests.core.test_engine_proc import make_request, collect
from quire.tests.fake_engine import open_blocking
from quire.tests.fakes import make_config
name, address = sys.argv[1:]
client = open_blocking(MPClient.start(make_config(startup_timeout_s=120.0), address))
print("attached", flush=True)
sys.stdin.readline()
for i in range(8):
    client.add_request(make_request(f"{name}-{i}", max_tokens=100, prompt=[i, 5]))
mine = [f"{name}-{i}" for i in range(8)]
while not set(mine) <= set(client.call_utility("scheduler_state")["running"]):
    pass  # they need not all be in the first step
print("running", flush=True)
results = collect(client, *mine)
print({request_id: tokens for request_id, (tokens, _) in sorted(results.items())}, flush=True)
client.shutdown()
"""


def start_program(name: str, address: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_programs_one_killed(tmp_path, open_client):
    # both programs run for three seconds
    config = make_config(hf_overrides={"delay_s": 0.03}, max_num_seqs=32)
    with daemon(tmp_path, config) as (address, _):
        observer = open_client(address)
        one, two = start_program("one", address), start_program("two", address)
        try:
            assert one.stdout.readline() == two.stdout.readline() == "attached\n"
            for program in (one, two):
                print(file=program.stdin, flush=True)
            assert one.stdout.readline() == two.stdout.readline() == "running\n"
            assert len(observer.call_utility("scheduler_state")["running"]) == 16
            two.kill()
            wait_until(lambda: len(observer.call_utility("scheduler_state")["running"]) <= 8)
            assert observer.call_utility("get_metrics")["num_finished_abort"] == 8
            printed = one.communicate(timeout=60)[0]
        finally:
            for program in (one, two):
                program.kill()
                program.communicate()
        wanted = {f"one-{i}": expected(make_request("", 100, [i, 5]), config) for i in range(8)}
        assert ast.literal_eval(printed) == wanted
        assert observer.call_utility("scheduler_state")["running"] == []
        assert observer.call_utility("check_integrity") is True


def test_a_daemon_outlives_its_clients_and_drains(tmp_path, open_client):
    config = make_config(hf_overrides={"delay_s": 0.02})
    with daemon(tmp_path, config) as (address, process):
        first = open_client(address)
        first.add_request(make_request("abandoned", max_tokens=200))
        first.get_output()
        first.shutdown()
        second = open_client(address)
        wait_until(lambda: second.call_utility("scheduler_state")["running"] == [])
        assert second.ready.config == config
        second.add_request(make_request("kept", max_tokens=20))
        second.get_output()
        process.send_signal(signal.SIGTERM)
        assert len(collect(second, "kept")["kept"][0]) == 19
        assert process.wait(60) == 0
        with pytest.raises(EngineDeadError, match="asked to leave"):
            second.get_output()
        with pytest.raises(EngineStartError, match="no engine listens"):
            open_client(address)


def test_one_daemon_per_address(tmp_path, open_client):
    with daemon(tmp_path, make_config()) as (address, first):
        with daemon(tmp_path, make_config()) as (_, second):
            assert second.wait(60) == 2
            assert (
                second.stderr.read()
                .decode()
                .startswith(f"quire engine: listen: another engine (pid {first.pid}) listens")
            )
        assert open_client(address).call_utility("ping") == "pong"
        first.kill()
        first.wait()
        # the dead daemon's socket file is still there
        with daemon(tmp_path, make_config()) as (_, third):
            wait_until(lambda: third.poll() is not None or _answers(open_client, address))
            assert third.poll() is None


def _answers(open_client, address: str) -> bool:
    try:
        return open_client(address).call_utility("ping") == "pong"
    except EngineStartError:
        return False


def test_a_daemon_that_cannot_load_reports_the_error(tmp_path):
    with daemon(tmp_path, make_config(hf_overrides={"at_load": "fail"})) as (_, process):
        assert process.wait(60) == 1
        assert "ValueError: these weights are made of cheese" in process.stderr.read().decode()
    assert not (tmp_path / "engine.sock").exists()


def test_a_daemon_needs_a_configuration(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--listen", f"ipc://{tmp_path}/x"],
        input=b'{"model_confg": 1}',
        capture_output=True,
    )
    assert done.returncode == 2 and b"model_confg" in done.stderr
    assert subprocess.run(COMMAND, capture_output=True).returncode == 2


def test_ready_is_reported_by_the_engine(open_client):
    ready = open_client(max_model_len=64).ready
    assert (
        isinstance(ready, Ready)
        and ready.num_blocks == 257
        and ready.kv_cache_bytes == 257 * 16 * 8
    )
