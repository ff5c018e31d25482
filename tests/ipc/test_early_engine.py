"""A process that starts before its configuration: taken once by the next start, ended otherwise."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import psutil
import pytest
from quire.frontend.clients.mp_client import MPClient
from quire.frontend.engine_args import EngineArgs
from quire.ipc import early_process
from quire.ipc.early_engine import early_engine, take_early_engine
from quire.tests.fake_engine import open_blocking, wait_until


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def test_the_next_start_takes_it():
    before = children()
    with early_engine("process", {"max_message_bytes": 2**24}):
        (process,) = [child for child in children() if child not in before]
        wait_until(process.cmdline)  # while a process starts, the kernel shows nothing
        assert "--import-early" in process.cmdline()
        config = EngineArgs(max_message_bytes=2**24).create_engine_config()
        client = open_blocking(MPClient.start(config))
        assert [child for child in children() if child not in before] == [process]
        assert take_early_engine() is None
    assert client.call_utility("scheduler_state")["running"] == []
    client.shutdown()
    assert children() == before


def test_it_ends_with_the_context():
    before, files = children(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no model"), early_engine("process", {"device": "cpu"}):
        assert len(children()) == len(before) + 1
        raise ValueError("no model")
    assert children() == before and take_early_engine() is None
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("inproc", {}),
        ("ipc:///tmp/x", {}),
        ("process", {"device": "cuda"}),
        ("process", {"logits_processors": ["some.package:factory"]}),
    ],
)
def test_other_engines_do_not_start_early(engine, arguments):
    before = children()
    with early_engine(engine, arguments):
        assert children() == before and take_early_engine() is None


def test_a_process_that_started_before_the_command_line_was_read_is_taken():
    before, files = children(), len(os.listdir("/proc/self/fd"))
    early_process.begin_early_process(["--model", "x"])
    (process,) = [child for child in children() if child not in before]
    with early_engine("process", {}):
        assert [child for child in children() if child not in before] == [process]
        client = open_blocking(MPClient.start(EngineArgs().create_engine_config()))
        assert [child for child in children() if child not in before] == [process]
    assert client.call_utility("scheduler_state")["running"] == []
    client.shutdown()
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    "argv", [["--help"], ["--device=cuda"], ["--engine", "inproc"], ["--logits_processors", "x:y"]]
)
def test_no_process_starts_before_a_command_line_with_these(argv):
    early_process.begin_early_process(argv)
    assert early_process.take_early_process() is None


@pytest.mark.parametrize(
    "variable", ["QUIRE_ENGINE", "QUIRE_DEVICE", "QUIRE_CONFIG", "QUIRE_LOGITS_PROCESSORS"]
)
def test_no_process_starts_where_a_variable_may_want_another_engine(variable, monkeypatch):
    monkeypatch.setenv(variable, "x")
    early_process.begin_early_process([])
    assert early_process.take_early_process() is None


@pytest.mark.parametrize("arguments", [{"device": "cuda"}, {"logits_processors": ["x:y"]}])
def test_a_process_that_the_settings_do_not_allow_ends(arguments):
    before, files = children(), len(os.listdir("/proc/self/fd"))
    early_process.begin_early_process([])
    assert len(children()) == len(before) + 1
    with early_engine("process", arguments):
        assert children() == before and take_early_engine() is None
    assert len(os.listdir("/proc/self/fd")) == files


ALONE = """
import os, signal
from quire.ipc.early_process import begin_early_process
begin_early_process([])
from quire.ipc import early_process
print(early_process._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_without_sockets_ends_with_its_parent():
    done = subprocess.run([sys.executable, "-c", ALONE], stdout=subprocess.PIPE, check=False)
    pid = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_a_command_that_fails_early_ends_the_process():
    command = [sys.executable, "-m", "quire", "generate", "--nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--nonsense" in done.stderr


def test_a_limit_of_the_system_is_no_error_yet(monkeypatch):
    def start():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(early_process, "EarlyEngineProcess", start)
    early_process.begin_early_process([])
    assert early_process.take_early_process() is None


def test_a_limit_of_threads_is_no_error_yet(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", start)
    early_process.begin_early_process([])
    assert early_process.take_early_process() is None
    assert len(os.listdir("/proc/self/fd")) == files
