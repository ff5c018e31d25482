"""Whatever is killed when, no process and no file remains.

`pytest -m chaos` kills 200 programs with a real engine and its grammar process, in minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from quire.tests.fake_engine import wait_until

MARK = "QUIRE_TEST_ORPHANS"  # every process that a program starts has this variable

FAKE = """
from quire.frontend.clients.mp_client import MPClient
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.fake_engine import COMMAND, open_blocking
from quire.tests.fakes import make_config
config = make_config(hf_overrides={"delay_s": 0.01})
client = open_blocking(MPClient.start(config, command=COMMAND))
client.add_request(EngineCoreRequest("a", [1], SamplingParams(seed=0, max_tokens=250)))
while True:
    client.get_output()
"""
REAL = """
from quire import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
engine = LLMEngine.from_engine_args(EngineArgs(num_threads=1))
number = 0
while True:
    number += 1
    grammar = StructuredOutputsParams(regex="[a-z]{%d}" % (number % 30 + 1))
    engine.add_request(str(number), "One", SamplingParams(structured_outputs=grammar))
    while engine.has_unfinished_requests():
        engine.step()
"""


def processes_of(mark: str) -> set[int]:
    """Those that have not ended."""
    found, wanted = set(), f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except (OSError, ValueError):
            pass  # it has ended
    return found


def send(number: signal.Signals, pids: set[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def killed(rng: random.Random, program: subprocess.Popen, mark: str) -> None:
    program.kill()


def killed_after_its_engine(rng: random.Random, program: subprocess.Popen, mark: str) -> None:
    """The engine is being replaced, or its death not yet seen."""
    send(signal.SIGKILL, processes_of(mark) - {program.pid})
    time.sleep(rng.uniform(0, 0.5))
    program.kill()


def killed_while_all_others_are_stopped(
    rng: random.Random, program: subprocess.Popen, mark: str
) -> None:
    send(signal.SIGSTOP, processes_of(mark) - {program.pid})
    program.kill()


def terminated_twice(rng: random.Random, program: subprocess.Popen, mark: str) -> None:
    program.terminate()
    time.sleep(rng.uniform(0, 0.1))
    program.terminate()


ENDS = (killed, killed_after_its_engine, killed_while_all_others_are_stopped, terminated_twice)


def nothing_remains(directory: Path, script: str, longest_s: float, seed: int) -> None:
    """Starts a program, ends it at a random time, and waits for what it has started."""
    rng, mark = random.Random(seed), uuid.uuid4().hex
    directory.mkdir(exist_ok=True)
    shared = set(os.listdir("/dev/shm"))
    places = {"TMPDIR": str(directory), "XDG_RUNTIME_DIR": str(directory)}
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | places | {MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(rng.uniform(0, longest_s))
        assert program.poll() is None
        ENDS[seed % len(ENDS)](rng, program, mark)
        program.wait(60)
        wait_until(lambda: not processes_of(mark))
        assert list(directory.iterdir()) == []
        assert {name for name in os.listdir("/dev/shm") if "quire" in name} <= shared
    finally:
        send(signal.SIGKILL, processes_of(mark))


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("seed", range(8))
def test_random_kills(tmp_path, seed):
    nothing_remains(tmp_path / "files", FAKE, 1.5, seed)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_200_random_kills(tmp_path):
    for seed in range(200):
        nothing_remains(tmp_path / "files", REAL, 4.0, seed)
