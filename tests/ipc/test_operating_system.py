"""What macOS does differently: each part alone, on Linux; an engine in a process in a Python that
lacks what macOS lacks; and that no other module uses what only Linux has.

A Mac has run none of it.
"""

from __future__ import annotations

import ast
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quire.ipc.errors import InvalidParameterError
from quire.ipc.machine import most_descriptors
from quire.ipc.operating_system import SYSTEM, Credentials, Darwin, Linux, choose, is_bound
from quire.ipc.process import WakePipe, readable
from quire.tests.syntax import nodes_of
from quire.tests.test_house import PACKAGE, name_of

SIMULATED = Path(__file__).parent / "simulated_macos"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SIMULATED)}
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_the_platform_chooses() -> None:
    assert type(choose("darwin")) is Darwin
    assert type(choose("linux")) is Linux
    methods = [{name for name in vars(kind) if name[0] != "_"} for kind in (Linux, Darwin)]
    assert methods[0] - {"processor_file"} == methods[1]


# ---------------------------------------------------------------- processes


def test_the_end_of_a_child_makes_a_descriptor_readable() -> None:
    child = subprocess.Popen(SLEEPS)
    fd = Darwin().exit_fd(child)
    assert not readable(fd, timeout_s=0.1)
    child.kill()
    assert readable(fd, timeout_s=30)
    assert child.wait() == -signal.SIGKILL
    os.close(fd)


def test_a_fork_does_not_hide_the_end_of_a_child() -> None:
    child = subprocess.Popen(SLEEPS)
    fd = Darwin().exit_fd(child)
    fork = os.fork()
    if fork == 0:  # it holds both ends of the pipe
        time.sleep(60)
        os._exit(0)
    try:
        child.kill()
        assert readable(fd, timeout_s=30)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        os.close(fd)


def test_a_closed_pipe_is_not_woken() -> None:
    pipe = WakePipe()
    pipe.wake()
    assert pipe.read() == b"\0"
    pipe.close()
    others = os.pipe()  # they have the numbers of the pipe
    pipe.wake()
    pipe.close()
    assert not readable(others[0], timeout_s=0)
    for fd in others:
        os.close(fd)


def test_a_process_ends_with_its_parent() -> None:
    child = (
        "import os, time; from quire.ipc.operating_system import Darwin\n"
        "Darwin().die_with_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert started.stdout is not None
    pidfd = os.pidfd_open(int(started.stdout.readline()))
    assert not readable(pidfd, timeout_s=0.5)  # longer than its checks
    started.kill()
    assert readable(pidfd, timeout_s=30)
    os.close(pidfd)
    started.communicate()


def test_states_of_processes_are_those_of_linux(request) -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    request.addfinalizer(child.kill)
    while Linux().process_state(child.pid).cpu_s < 0.1:
        time.sleep(0.02)
    assert Darwin().process_state(child.pid).cpu_s > 0.09  # sums of hundredths are rounded
    child.send_signal(signal.SIGSTOP)
    while not Linux().process_state(child.pid).is_stopped:
        time.sleep(0.01)
    assert Darwin().process_state(child.pid) == Linux().process_state(child.pid)
    with Darwin().signals_to(child.pid) as send:
        send(signal.SIGKILL)
    child.wait()
    for system in (Linux(), Darwin()):
        with pytest.raises(OSError):
            system.process_state(child.pid)


# ---------------------------------------------------------------- sockets and files


class Connection:
    """Answers as macOS does."""

    def getsockopt(self, level: int, option: int, size: int = 0) -> int | bytes:
        assert level == 0
        if option == 2:
            return 1234
        assert (option, size) == (1, 76)
        return struct.pack("=IIh2x16I", 0, 501, 1, *16 * [20])


def test_credentials_of_a_peer() -> None:
    assert Darwin().credentials_of(Connection()) == Credentials(1234, 501)  # type: ignore[arg-type]


def test_files_of_sockets_are_removed_when_their_process_was_killed(tmp_path: Path) -> None:
    system = Darwin(folder=tmp_path)
    dead, living, new, file = (tmp_path / name for name in ("q-1", "q-2", "q-3", "q-4"))
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for one, path in zip(sockets, (dead, living, new)):
        one.bind(str(path))
    sockets[1].listen()
    sockets[0].close()
    sockets[2].close()
    file.write_text("")
    for path in (dead, living, file):
        os.utime(path, (0, 0))
    system.remove_unused_sockets("q-*")
    assert {path.name for path in tmp_path.iterdir()} == {"q-2", "q-3", "q-4"}
    sockets[1].setblocking(False)
    with pytest.raises(BlockingIOError):  # the question was no connection
        sockets[1].accept()
    sockets[1].close()


def test_a_socket_has_a_process_until_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "q"
    assert not is_bound(path)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as one:
            one.bind(str(path))
            assert is_bound(path)
            one.listen()
            assert is_bound(path)
        assert not is_bound(path)
        path.unlink()


@pytest.mark.parametrize("system", [Linux(), Darwin()])
def test_files_get_their_size_and_are_written_through(system: Linux | Darwin, tmp_path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        system.allocate(file.fileno(), 10_000)
        os.pwrite(file.fileno(), b"x", 9_999)
        system.write_through(file.fileno())
        assert os.fstat(file.fileno()).st_size == 10_000
        assert system.is_in_memory(file.fileno(), 9_999)


def test_a_file_without_a_name() -> None:
    fd = Darwin().anonymous_file("quire-test")
    assert os.fstat(fd).st_nlink == 0 and os.fstat(fd).st_size == 0
    os.write(fd, b"text")
    assert os.pread(fd, 10, 0) == b"text"
    os.close(fd)


# ---------------------------------------------------------------- figures


def test_figures_of_the_machine() -> None:
    known = {
        "hw.perflevel0.logicalcpu": struct.pack("=i", 6),
        "kern.maxfilesperproc": struct.pack("=q", 10240),
        "machdep.cpu.brand_string": b"Apple M2\0",
        "hw.optional.neon": struct.pack("=i", 1),
        "hw.optional.arm.FEAT_I8MM": struct.pack("=i", 1),
        "hw.optional.arm.FEAT_BF16": struct.pack("=i", 0),
    }
    system = Darwin(known.get)
    assert (system.num_cores(), system.cores(), system.max_descriptors()) == (6, [], 10240)
    assert system.processor_text() == "model name : Apple M2\nflags : asimd i8mm\n"
    assert Darwin(lambda name: None).num_cores() == os.cpu_count()
    assert Darwin().total_memory_bytes() == Linux().total_memory_bytes()
    ratio = Darwin().available_memory_bytes() / Linux().available_memory_bytes()
    assert 0.5 < ratio < 2
    assert 0.5 < Darwin().resident_bytes() / Linux().resident_bytes() < 2
    with pytest.raises(OSError) as raised:
        system.bind_to_cores([0])
    assert raised.value.errno == errno.ENOTSUP


def test_the_limit_of_descriptors_is_raised_to_what_the_system_allows() -> None:
    """A hard limit without end is more than macOS lets a process have."""
    assert most_descriptors(Darwin({"kern.maxfilesperproc": b"\x40\0\0\0"}.get)) == 64
    assert most_descriptors(Darwin(lambda name: None)) == most_descriptors(SYSTEM)


# ---------------------------------------------------------------- all together


def test_an_engine_runs_in_a_process_of_a_simulated_mac() -> None:
    before = set(Path("/tmp").glob("quire-*-*put"))
    command = [sys.executable, "-m", "quire", "generate", "--engine", "process", "--temperature"]
    arguments = ["0", "--max-tokens", "8", "Once upon a time"]
    done = subprocess.run(
        [*command, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 4 and "quire" not in done.stderr
    assert not set(Path("/tmp").glob("quire-*-*put")) - before


# ---------------------------------------------------------------- the rule

# Each has what only Linux has, and says what macOS gets instead.
MAY_KNOW_LINUX = {
    "ipc/operating_system.py",
    "ipc/platform_tuning.py",  # asks whether there is such a thing
    "frontend/diagnosis/machine.py",  # asks whether there is such a folder
}
RANKS = "executor/ranks/"  # several ranks are refused on macOS
FILES = ("/proc", "/sys/", "/dev/shm", "ipc://@")
NAMES = {"SOCK_SEQPACKET", "RLIMIT_AS", "prctl", "inotify"}


def linux_only() -> set[str]:
    """The names that the simulated macOS lacks."""
    for node in ast.parse((SIMULATED / "sitecustomize.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LACKING":
            return {name for text in ast.literal_eval(node.value).values() for name in text.split()}
    raise AssertionError("no LACKING")


def test_no_other_module_knows_linux() -> None:
    names, found = linux_only() | NAMES, []
    assert "pidfd_open" in names
    for path in PACKAGE:
        if (name := name_of(path)) in MAY_KNOW_LINUX or name.startswith(RANKS):
            continue
        for node in nodes_of(path):
            is_name = isinstance(node, ast.Attribute) and node.attr in names
            text = node.value if isinstance(node, ast.Constant) else None
            if is_name or (isinstance(text, str) and text.startswith(FILES) and "\n" not in text):
                found.append(f"{name}:{node.lineno} {ast.unparse(node)[:80]}")
    assert not found, "ask ipc/operating_system.py: " + ", ".join(found)


def test_several_ranks_are_refused() -> None:
    from quire.frontend.engine_args import EngineArgs
    from quire.ipc.models.ranks import check_ranks

    config = EngineArgs(tensor_parallel_size=2).create_engine_config()
    check_ranks(config)
    with pytest.raises(InvalidParameterError, match="tensor_parallel_size: must be 1 on macOS"):
        check_ranks(config, Darwin())
