"""A daemon of two engines with the fake executor, and two programs attached to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from quire import LLMEngine
from quire.frontend.clients.connect import start_client
from quire.ipc import listener
from quire.ipc.config import EngineConfig
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.tests.fake_engine import Hold, open_blocking, wait_until
from quire.tests.fakes import make_config
from quire.tests.frontend.supervision.test_supervised_client import (
    Blocking,
    assert_expected,
    some_requests,
)

PROGRAM = """
import sys, msgspec
from quire.frontend.clients.replicas.start import daemon_configs
from quire.frontend.supervision.engine_daemon import EngineDaemon
from quire.ipc.config import EngineConfig
from quire.tests.fake_engine import COMMAND

config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
sys.exit(EngineDaemon(daemon_configs(config), sys.argv[1], COMMAND).run())
"""


class Program(Blocking):
    """Attached as programs are."""

    def __init__(self, config: EngineConfig, address: str):
        self.client = open_blocking(start_client(config, address))
        self.llm = LLMEngine(self.client.ready.config, self.client)


@contextmanager
def replicated(directory: Path, config: EngineConfig) -> Iterator[tuple[str, psutil.Popen]]:
    address = f"ipc://{directory / 'engine.sock'}"
    process = psutil.Popen(
        [sys.executable, "-P", "-c", PROGRAM, address], stdin=subprocess.PIPE, stderr=sys.stderr
    )
    try:
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        wait_until((directory / "engine.sock.1").exists)
        yield address, process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def engine_of(process: psutil.Popen, ending: str) -> psutil.Process:
    [found] = [one for one in process.children() if one.cmdline()[5].endswith(ending)]
    return found


def test_two_programs_use_two_engines_and_one_engine_dies(tmp_path: Path, monkeypatch) -> None:
    hold = Hold(tmp_path, 20)
    config = make_config(
        data_parallel_size=2,
        max_num_seqs=64,
        num_gpu_blocks_override=None,
        hf_overrides={"delay_s": 0.005} | hold.overrides,
    )
    results: dict[int, tuple] = {}
    has_attached = threading.Barrier(3, timeout=60)

    def use(number: int, address: str) -> None:
        engine = Program(config, address)
        try:
            has_attached.wait()
            requests = some_requests(16, max_tokens=90)
            outputs = engine.generate(requests)
            results[number] = requests, outputs, engine.client.restarts.num_resumed
        finally:
            engine.close()

    hold.begin()
    with replicated(tmp_path, config) as (address, process):
        threads = [threading.Thread(target=use, args=(number, address)) for number in range(2)]
        for thread in threads:
            thread.start()
        has_attached.wait()
        wait_until(hold.is_reached)
        victim, other = engine_of(process, ".sock.1"), engine_of(process, ".sock")
        victim.kill()
        hold.end()
        for thread in threads:
            thread.join(timeout=100)
        for requests, outputs, num_resumed in (results[0], results[1]):
            assert_expected(requests, outputs, config)
            assert num_resumed
        wait_until(lambda: len(process.children()) == 2)
        assert other.is_running() and engine_of(process, ".sock.1").pid != victim.pid

        client = open_blocking(start_client(config, address))
        assert client.num_engines == 2 and client.is_shared
        caches = [one.client.ready.config.cache_config for one in client.client._replicas]
        sizes = [cache.num_gpu_blocks_override for cache in caches]
        assert sizes == [None, client.ready.num_blocks]
        client.call_utility("pause")  # reaches both
        others = open_blocking(start_client(config, address))
        assert others.call_utility("is_paused") is True
        client.call_utility("resume")
        others.shutdown()
        client.shutdown()

        with pytest.raises(EngineStartError, match="is engine 1 of a daemon of 2"):
            open_blocking(start_client(config, f"{address}.1"))
        with monkeypatch.context() as patched, pytest.raises(EngineStartError, match="protocol"):
            patched.setattr(listener, "PROTOCOL", -1)
            open_blocking(start_client(config, address))
        with pytest.raises(EngineStartError, match="too many|no engine listens"):
            open_blocking(start_client(config, f"{address}.2"))

        children = process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert not any(child.is_running() for child in children)
        assert not list(tmp_path.glob("engine.sock*"))


def test_a_second_signal_ends_requests(tmp_path: Path) -> None:
    hold = Hold(tmp_path, 5)
    config = make_config(data_parallel_size=2, hf_overrides=hold.overrides)
    hold.begin()
    with replicated(tmp_path, config) as (address, process):
        engine = Program(config, address)
        failing = partial(pytest.raises, EngineDeadError, engine.generate, some_requests(8))
        running = threading.Thread(target=failing)
        running.start()
        wait_until(hold.is_reached)
        children = process.children()
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: not list(tmp_path.glob("engine.sock*")))
        assert process.is_running() and all(child.is_running() for child in children)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert not any(child.is_running() for child in children)
        engine.client.shutdown()
        running.join(timeout=60)
