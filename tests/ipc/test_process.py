"""A child process as seen by its parent: its death, its last log lines, its end. Also how the child
learns of its parent's death.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from quire.ipc.process import EngineProcess, SignalPipe, engine_command

PYTHON = [sys.executable, "-c"]
NOWHERE = Path("/nowhere")


def start(script: str) -> EngineProcess:
    return EngineProcess([*PYTHON, script], NOWHERE, 1000)


def test_the_command():
    assert engine_command() == [sys.executable, "-P", "-m", "quire.core.engine_proc"]
    assert engine_command(imports_early=True) == [*engine_command(), "--import-early"]
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
    assert process.wait(10)
    text = process.describe_death()
    assert "exited with code 3" in text and text.endswith("the end") and len(text) < 5000
    process.close(0)
    written = capfd.readouterr()
    assert written.out == "" and "the end" in written.err and "b" * 9000 in written.err


def test_a_signal_is_named():
    process = start("import time; time.sleep(100)")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10)
    assert (
        process.describe_death() == f"the engine process (pid {process.pid}) was killed by SIGKILL"
    )
    process.close(0)


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
    assert time.monotonic() - begin < 5 and not psutil.pid_exists(process.pid)


def test_a_grandchild_that_holds_stderr_does_not_block_close():
    process = start(
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(3)']); print(p.pid, file=sys.stderr)"
    )
    assert process.wait(10)
    begin = time.monotonic()
    process.describe_death()
    process.close(0)
    assert time.monotonic() - begin < 1
    os.kill(int(process._tail), signal.SIGKILL)


def test_no_descriptor_is_leaked():
    def open_and_close():
        start("pass").close(10)

    open_and_close()
    before = sorted(os.listdir("/proc/self/fd"))
    open_and_close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_program_that_does_not_exist():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        EngineProcess(["/nowhere/python"], NOWHERE, 1000)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_parents_death_is_a_signal(tmp_path):
    """A grandchild keeps the parent's pipe open here, so only the kernel's signal reports the
    death.
    """
    child = tmp_path / "child.py"
    child.write_text(
        "import os, sys, signal, time\n"
        "from quire.ipc.process import *\n"
        "pipe = SignalPipe(PARENT_DEATH_SIGNAL)\n"
        "die_with_parent(int(sys.argv[1]))\n"
        "print(os.getpid(), flush=True)\n"
        "while not pipe.read(): time.sleep(0.01)\n"
        "open(sys.argv[2], 'w').write(str(os.getppid() == int(sys.argv[1])))\n"
    )
    parent = (
        "import subprocess, sys, os, time\n"
        f"p = subprocess.Popen([sys.executable, {str(child)!r}, str(os.getpid()), "
        f"{str(tmp_path / 'saw')!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", parent])
    deadline = time.monotonic() + 10
    while not (tmp_path / "saw").exists() or not (tmp_path / "saw").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "saw").read_text() == "False"


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
    with pytest.raises(OSError):
        pipe.wake()
