"""A child process as seen by its parent: its death, its last log lines, its end. Also how the child
learns of its parent's death.
"""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from quire.ipc.process import (
    EngineProcess,
    SignalPipe,
    engine_command,
    kill_at_end_of_file,
    readable,
)
from quire.tests.fake_engine import is_gone, wait_until

PYTHON = [sys.executable, "-c"]
KEY = b"k" * 40


def start(script: str) -> EngineProcess:
    return EngineProcess([*PYTHON, script], "name", KEY, 1000)


def test_the_command():
    assert engine_command() == [sys.executable, "-P", "-m", "quire.core.engine_proc"]
    assert engine_command(imports_for="cuda") == [*engine_command(), "--import-early", "cuda"]
    assert engine_command(imports_for="cpu")[3:] == [
        "quire.core.early_start",
        "quire.core.engine_proc",
        "--import-early",
        "cpu",
    ]
    assert engine_command(listen="ipc:///x")[-6:-1] == [
        "--listen",
        "ipc:///x",
        "--log-format",
        "text",
        "--log-level",
    ]


def test_last_lines_and_exit_code(capfd):
    process = start(
        "import sys; print('out'); print('b' * 9000, file=sys.stderr); print('the end', "
        "file=sys.stderr); sys.exit(3)"
    )
    assert process.wait(60)
    text = process.describe_death()
    assert "exited with code 3" in text and text.endswith("the end") and len(text) < 5000
    process.close(0)
    written = capfd.readouterr()
    assert written.out == "" and "the end" in written.err and "b" * 9000 in written.err


def test_a_signal_is_named():
    process = start("import time; time.sleep(100)")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60)
    assert (
        process.describe_death() == f"the engine process (pid {process.pid}) was killed by SIGKILL"
    )
    process.close(0)


@pytest.mark.parametrize("delay_s", [0.0, 0.3], ids=["leashed before", "leashed after"])
def test_ctrl_c_while_the_child_starts_ends_it(monkeypatch, delay_s):
    """Before the child has its leash, and after."""

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait(0.15)
            raise KeyboardInterrupt

    def leash(*args: int) -> None:
        time.sleep(delay_s)
        kill_at_end_of_file(*args)

    names = SimpleNamespace(Thread=threading.Thread, Event=Interrupted)
    monkeypatch.setattr("quire.ipc.process.threading", names)
    monkeypatch.setattr("quire.ipc.process.kill_at_end_of_file", leash)
    children = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        start("import time; time.sleep(20)")
    assert all(is_gone(child.pid) for child in psutil.Process().children() if child not in children)


@pytest.mark.parametrize("stubborn", [False, True])
def test_close_ends_and_reaps(stubborn, monkeypatch):
    monkeypatch.setattr("quire.ipc.process.TERMINATE_TIMEOUT_S", 0.2)
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    process = start(
        f"import signal, time, sys; {ignore} print('ready', file=sys.stderr, flush=True); "
        f"time.sleep(100)"
    )
    while b"ready" not in process._tail:
        time.sleep(0.005)
    begin = time.monotonic()
    process.close(0.05)
    process.close(0.05)
    assert time.monotonic() - begin < 30 and not psutil.pid_exists(process.pid)


def test_a_grandchild_that_holds_stderr_does_not_block_close():
    process = start(
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)']); print(p.pid, file=sys.stderr)"
    )
    assert process.wait(60)
    begin = time.monotonic()
    process.describe_death()
    process.close(0)
    assert time.monotonic() - begin < 30
    os.kill(int(process._tail), signal.SIGKILL)


def test_no_descriptor_is_leaked():
    def open_and_close():
        start("pass").close(10)

    open_and_close()
    before = sorted(os.listdir("/proc/self/fd"))
    open_and_close()
    wait_until(lambda: sorted(os.listdir("/proc/self/fd")) == before)


def test_a_program_that_does_not_exist():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        EngineProcess(["/nowhere/python"], "name", KEY, 1000)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_child_gets_the_key_and_nobody_else_sees_it(tmp_path):
    script = (
        "import os, sys; fd = int(sys.argv[sys.argv.index('--key-fd') + 1]); "
        "key = os.read(fd, 100); told = ' '.join(sys.argv) + str(os.environ); "
        "print(key == b'k' * 40, key.decode() in told, file=sys.stderr)"
    )
    process = start(script)
    process.close(10)
    assert process._tail == b"True False\n"


def test_secrets_of_this_process_are_not_in_an_engines_environment(monkeypatch):
    secret = {
        "HF_TOKEN": "hf_x",
        "HUGGING_FACE_HUB_TOKEN": "hf_x",
        "OPENAI_API_KEY": "sk-x",
        "QUIRE_API_KEY": "sk-x",
        "OPENAI_APIKEY": "sk-x",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "Db_Password": "x",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=x",
        "DATABASE_URL": "postgres://user:x@host/db",
        "https_proxy": "http://user:x@proxy:80",
    }
    kept = {
        "QUIRE_TOKEN_FILE": "/run/token",
        "MAX_TOKENS": "5",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "http_proxy": "http://proxy:80",
        "SONIC_MOE_TOP_K": "2",
    }
    for name, value in (secret | kept).items():
        monkeypatch.setenv(name, value)
    process = start("import time; print(1, flush=True); time.sleep(100)")
    try:
        wait_until(lambda: process._tail)  # while a process starts, the kernel shows nothing
        with open(f"/proc/{process.pid}/environ") as file:
            found = dict(entry.split("=", 1) for entry in file.read().split("\0") if entry)
    finally:
        process.close(0)
    assert found.keys() & secret.keys() == set()
    assert {name: found.get(name) for name in kept} == kept
    assert found["PATH"] == os.environ["PATH"]


# A parent that starts a child, and what the child does. The parent prints the child's pid when the
# child has written its first line, which here is a descriptor's number.
PARENT = """
import os, signal, sys, time
from quire.ipc.process import EngineProcess
child = EngineProcess([sys.executable, "-c", sys.argv[1]], "name", b"k" * 40, 1000)
while not child._tail: time.sleep(0.005)
exec(sys.argv[2])
print(child.pid, flush=True)
time.sleep(100)
"""
OBEYS = "from quire.ipc.process import *; import os, sys; die_with_parent(os.getppid()); "
SLEEPS = "print(1, flush=True); import time; time.sleep(100)"
HOLDS_THE_GIL = "print(1, flush=True); import ctypes; ctypes.PyDLL(None).sleep(100)"
STOPS = "os.kill(child.pid, signal.SIGSTOP)"
# a fork has the writing end of the pipe to the child, so its end-of-file does not come
FORKS = "os.fork() or (time.sleep(2), os._exit(0))"


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        (OBEYS + HOLDS_THE_GIL, ""),
        (OBEYS + SLEEPS, STOPS),
        (OBEYS + SLEEPS, FORKS),
        (SLEEPS, ""),  # it has not come to die_with_parent
        (SLEEPS, STOPS),
    ],
    ids=["holds the GIL", "stopped", "a fork remains", "early", "early, stopped"],
)
def test_a_child_dies_with_its_parent(child, parent):
    program = subprocess.Popen(
        [sys.executable, "-c", PARENT, child, parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    pid = int(program.stdout.readline())
    assert not is_gone(pid)
    program.kill()
    wait_until(lambda: is_gone(pid))
    program.communicate()


def test_a_child_outlives_the_thread_that_asked_for_it():
    started = []
    thread = threading.Thread(target=lambda: started.append(start(OBEYS + SLEEPS)))
    thread.start()
    thread.join()
    (process,) = started
    wait_until(lambda: process._tail)
    assert not process.wait(0.2)
    process.close(0)


def test_a_child_that_closes_its_stderr_lives_on():
    process = start(OBEYS + "os.close(1); os.close(2); import time; time.sleep(100)")
    assert not process.wait(0.5)
    process.close(0)


def test_signals_as_bytes():
    before = signal.getsignal(signal.SIGUSR2)
    pipe = SignalPipe(signal.SIGUSR2)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        pipe.wake()
        assert sorted(pipe.read()) == [0, signal.SIGUSR2]
        assert pipe.read() == b""
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, before)
        pipe.close()


def test_descriptors_above_1023_can_be_waited_for() -> None:
    """A server with many connections has such numbers, and a restart waits for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    read_fd, write_fd = os.pipe()
    high = fcntl.fcntl(read_fd, fcntl.F_DUPFD, 1500)
    try:
        assert readable(high, timeout_s=0.01) == []
        os.write(write_fd, b"x")
        assert readable(high, timeout_s=5.0) == [high]
    finally:
        for fd in (read_fd, write_fd, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
