"""The engine as a process: how its parent starts, watches and ends it, and how it watches its
parent.

Must not know: messages or sockets, nor what an engine does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from .log_format import current_format, current_model
from .operating_system import SYSTEM

if TYPE_CHECKING:
    from .config import EngineConfig

LENGTH_BYTES = 4  # of what EarlyEngineProcess writes before its arguments
TAIL_BYTES = 4096  # of stderr, kept for the EngineDeadError
TAIL_LINES = 12
TERMINATE_TIMEOUT_S = 1.0
STACKS_SIGNAL = signal.SIGUSR2  # makes an engine write the stacks of its threads to stderr
# Makes an engine leave that belongs to a group. SIGTERM and SIGINT do not: a service manager sends
# them to every process, and the engine is needed until those that use it have ended.
LEAVE_SIGNAL = signal.SIGUSR1
# HF_TOKEN, OPENAI_API_KEY, QUIRE_API_KEY, OTEL_EXPORTER_OTLP_HEADERS; not QUIRE_TOKEN_FILE, a path
_SECRET_NAME = re.compile(
    r"(^|_|API)(KEYS?|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|HEADERS)(_ID)?$"
    r"|SECRET|PASSWORD",
    re.IGNORECASE,
)
_SECRET_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def engine_command(
    *,
    listen: str | None = None,
    replaces: bool = False,
    imports_for: str | None = None,
    program: Sequence[str] | None = None,
) -> list[str]:
    """The command that runs an engine.

    `imports_for`: a device, "cpu" or "cuda"; it imports what runs a model there, without other
    programs' code, before it has a configuration. `program`: another one that calls
    engine_proc.main.

    With `listen` ("ipc://PATH") it is a daemon, which reads its resolved EngineConfig as JSON from
    stdin. A child of MPClient gets its other arguments from EngineProcess. Without -P the current
    directory would come first on sys.path, and a directory there called `core` or `kernels` would
    hide a package.
    """
    # this program loads torch's libraries before it does anything else
    early = ["quire.core.early_start"] if imports_for == "cpu" and program is None else []
    module = [*early, "quire.core.engine_proc"]
    command = [*(program or (sys.executable, "-P", "-m", *module))]
    if imports_for is not None:
        command += ["--import-early", imports_for]
    if replaces:
        command.append("--replace")
    return command if listen is None else [*command, "--listen", listen, *_log_arguments()]


def exec_daemon(address: str, config: EngineConfig, *, replaces: bool = False) -> NoReturn:
    """Replaces this process by a daemon that serves `address` ("ipc://PATH") until SIGTERM.

    `config` is resolved. `replaces`: a daemon that listens there, when the model is loaded. Exit
    code 0: asked to leave; 1: it failed, with a traceback on stderr; 2: the address cannot be used.
    """
    import msgspec  # an engine that starts early does not wait for it

    command = engine_command(listen=address, replaces=replaces)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file_with(msgspec.json.encode(config)), 0)
    os.execve(command[0], command, engine_environment())


def file_with(data: bytes) -> int:
    """A descriptor of a file in memory that holds `data`, for a process to read as its stdin; a
    pipe would block if they exceed its buffer. The caller closes it.
    """
    descriptor = SYSTEM.anonymous_file("quire-config")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _log_arguments() -> list[str]:
    """The child logs as this process does."""
    level = logging.getLogger("quire").getEffectiveLevel()
    model = current_model()
    arguments = ["--log-format", current_format(), "--log-level", str(level)]
    return [*arguments, "--log-model", model] if model else arguments


def engine_environment() -> dict[str, str]:
    """This process's variables without keys, tokens and passwords, by name or in an address: an
    engine needs none, and /proc shows a process's variables to every program of its user.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not _SECRET_NAME.search(name) and not _SECRET_IN_ADDRESS.search(value)
    }


# ---------------------------------------------------------------- the parent's side


class ChildProcess:
    """A child that serves this process.

    `pidfd` becomes readable when it dies. It is killed when this process dies.
    """

    def __init__(
        self,
        command: Sequence[str],
        key: bytes,
        *,
        name: str,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
    ):
        """Starts `command` with --parent-pid, --key-fd (for read_key) and options of its log.

        `key`: bytes that the child reads from a pipe, because every user may read a command line.
        `name`: of the child in messages. `pass_fds`: descriptors that it inherits by number.
        `stdin`: the descriptor of its stdin. `environment`: its variables, an engine's by default.
        """
        self.name = name
        self._stdin = stdin
        self._environment = engine_environment() if environment is None else environment
        key_fd, self._parent_write_fd = os.pipe()
        os.write(self._parent_write_fd, key)  # the pipe's buffer holds it
        self._stderr_fd, stderr_fd = os.pipe()
        arguments = ["--parent-pid", str(os.getpid()), "--key-fd", str(key_fd)]
        self._pass_fds = (key_fd, *pass_fds)
        self._owner_pid = os.getpid()
        self._popen: subprocess.Popen[bytes] | None = None
        self._tail = bytearray()
        self._start_error: BaseException | None = None
        self._is_given_up = False  # an interrupt came while the child started
        has_started = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=([*command, *arguments, *_log_arguments()], key_fd, stderr_fd, has_started),
            name="quire-child-stderr",
            daemon=True,
        )
        try:
            self._thread.start()
            has_started.wait()
            if self._start_error is not None:
                raise self._start_error
        except BaseException:
            self._is_given_up = True
            os.close(self._parent_write_fd)
            if self._popen is not None:
                self._popen.kill()
            if self._thread.ident is None:  # the system has not started it
                os.close(key_fd)
                os.close(stderr_fd)
            else:
                self._thread.join()
            os.close(self._stderr_fd)
            raise

    def _run(
        self, command: list[str], key_fd: int, stderr_fd: int, has_started: threading.Event
    ) -> None:
        """Starts the child, and returns after its death: the kernel kills a child with the thread
        that started it (PR_SET_PDEATHSIG).
        """
        try:
            # A session of its own, so that the terminal's Ctrl-C reaches only this process. The
            # child's stdout is our stderr, so that nothing the engine prints enters a program's
            # output.
            self._popen = popen = subprocess.Popen(
                command,
                stdin=self._stdin,
                stdout=stderr_fd,
                stderr=stderr_fd,
                pass_fds=self._pass_fds,
                env=self._environment,
                start_new_session=True,
            )
            self.pid = popen.pid
            self.pidfd = SYSTEM.exit_fd(popen)
            kill_at_end_of_file(key_fd, self.pid)
            if self._is_given_up:  # the end of the file may have come before
                popen.kill()
        except BaseException as error:
            self._start_error = error
            return
        finally:
            os.close(key_fd)
            os.close(stderr_fd)
            has_started.set()
        self._copy_stderr()
        readable(self.pidfd)  # a child may close its stderr

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None  # otherwise the constructor has raised
        return self._popen

    def wait(self, timeout_s: float) -> bool:
        """Waits for its death. Returns False if it is still alive."""
        return bool(readable(self.pidfd, timeout_s=timeout_s))

    def describe_death(self) -> str:
        """How a dead child died, with the last lines of its stderr. Reaps it."""
        code = self._child.wait()
        how = (
            f"exited with code {code}"
            if code >= 0
            else f"was killed by {signal.Signals(-code).name}"
        )
        self._thread.join(timeout=1.0)
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        words = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        return f"{self.name} (pid {self.pid}) {how}" + (
            f"; last lines of its stderr:\n{words}" if words else ""
        )

    def reap(self) -> None:
        """Reaps a dead child."""
        self._child.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if the child is dead."""
        self._child.send_signal(number)

    @property
    def exit_signal(self) -> signal.Signals | None:
        """The signal that ended the child, once it is reaped; None if it exited by itself."""
        code = self._child.returncode
        return signal.Signals(-code) if code is not None and code < 0 else None

    def close(self, timeout_s: float) -> None:
        """Ends the child and reaps it.

        It has `timeout_s` to exit by itself; then it receives SIGTERM, then SIGKILL. May be called
        twice.
        """
        if self.pidfd < 0 or os.getpid() != self._owner_pid:  # a fork of the owner owns no engine
            return
        if not self.wait(timeout_s):
            self._child.terminate()
            if not self.wait(TERMINATE_TIMEOUT_S):
                self._child.kill()
        self._child.wait()
        self._thread.join()
        for fd in (self.pidfd, self._stderr_fd, self._parent_write_fd):
            os.close(fd)
        self.pidfd = -1

    def _copy_stderr(self) -> None:
        """Copies the child's stderr to ours and keeps the last lines.

        Ends with the child, even if a grandchild still holds the pipe.
        """
        os.set_blocking(self._stderr_fd, False)
        is_dead = False
        while True:
            try:
                data = os.read(self._stderr_fd, 65536)
            except BlockingIOError:
                if is_dead:
                    return
                is_dead = self.pidfd in readable(self._stderr_fd, self.pidfd)
                continue
            if not data:  # closed by a child that is still alive
                return
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            _write_stderr(data)


class EngineProcess(ChildProcess):
    """A child engine."""

    def __init__(self, command: Sequence[str], wire_name: str, key: bytes, max_message_bytes: int):
        """Starts `command` (engine_command(), or another program that calls engine_proc.main).

        wire_name, key: of the sockets that it connects to (ipc/sockets.py).
        """
        arguments = _connection_arguments(wire_name, max_message_bytes)
        super().__init__([*command, *arguments], key, name="the engine process")


class EarlyEngineProcess(ChildProcess):
    """A child engine that starts before there are sockets (core/early_start.py). It imports what it
    can until it is told which ones to connect to.
    """

    def __init__(self) -> None:
        stdin, self._arguments_fd = os.pipe()
        try:
            command = engine_command(imports_for="cpu")
            super().__init__(command, b"", name="the engine process", stdin=stdin)
        except BaseException:
            os.close(self._arguments_fd)
            raise
        finally:
            os.close(stdin)

    def connect(self, wire_name: str, key: bytes, max_message_bytes: int) -> None:
        """See EngineProcess. Called once. Does nothing if the process is dead."""
        arguments = [*_connection_arguments(wire_name, max_message_bytes), *_log_arguments()]
        data = "\0".join(arguments).encode()
        # Not the pipe of other children's keys: what comes there late would end this one, too (see
        # kill_at_end_of_file).
        with contextlib.suppress(BrokenPipeError):
            os.write(self._arguments_fd, len(data).to_bytes(LENGTH_BYTES) + data + key)
        self._close_arguments()

    def close(self, timeout_s: float) -> None:
        if os.getpid() == self._owner_pid:
            self._close_arguments()
        super().close(timeout_s)

    def _close_arguments(self) -> None:
        if self._arguments_fd >= 0:
            os.close(self._arguments_fd)
            self._arguments_fd = -1


def _connection_arguments(wire_name: str, max_message_bytes: int) -> list[str]:
    return ["--connect", wire_name, "--max-message-bytes", str(max_message_bytes)]


def kill_at_end_of_file(read_fd: int, pid: int) -> None:
    """Makes the kernel send SIGKILL to `pid` when the last writer of this pipe is gone.

    The child holds the reading end, this process the writing end. This covers a child that has not
    yet called die_with_parent. macOS does not do it.
    """
    with contextlib.suppress(OSError):  # it is dead already
        SYSTEM.kill_at_end_of_file(read_fd, pid)


def readable(*fds: int, timeout_s: float | None = None) -> list[int]:
    """Waits until one of them is readable, or for `timeout_s`; returns those that are.

    select.select would refuse numbers above 1023, which a server with many connections has.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout_s is None else max(0, timeout_s) * 1000)]


def _write_stderr(data: bytes) -> None:
    try:
        # Bypasses Python's buffer: a thread that dies at interpreter exit while it holds the
        # buffer's lock would abort the process.
        os.write(sys.stderr.fileno(), data)
    except (OSError, ValueError, AttributeError):
        # a notebook's stderr has no file, and there may be none
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(data.decode(errors="replace"))


# ---------------------------------------------------------------- the child's side


def die_with_parent(parent_pid: int) -> None:
    """Ends this process by SIGKILL when the thread that started it ends, on macOS when its parent
    ends; exits if its parent is already gone.

    On Linux the kernel does it, so that a process ends that is stopped, or whose threads do not run
    Python.
    """
    SYSTEM.die_with_parent(parent_pid)
    if os.getppid() != parent_pid:
        os._exit(1)


def read_key(fd: int, num_bytes: int) -> bytes:
    """What EngineProcess has written for its child. Exits if the parent is gone.

    `fd` stays open: its end-of-file ends this process.
    """
    key = os.read(fd, num_bytes)
    if len(key) < num_bytes:
        os._exit(1)
    return key


INTERRUPTS_IGNORED = (
    "SIGINT (Ctrl-C) has no effect: the program that started this process ignores it, as a shell "
    "does for commands in the background of a script; SIGTERM ends it"
)


def ignores_interrupts() -> bool:
    """Whether SIGINT is ignored in this process. Quire leaves it ignored, as Unix programs do."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


class WakePipe:
    """`wake` makes `read_fd` readable, until `read`. Any thread may call either.

    After `close`, which may be called twice, `wake` does nothing.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        if self._write_fd < 0:
            return
        with contextlib.suppress(BlockingIOError):  # it is full, so it is readable
            os.write(self._write_fd, b"\0")

    def read(self) -> bytes:
        try:
            return os.read(self.read_fd, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        # not kept: the numbers become those of other files
        ends, self.read_fd, self._write_fd = (self.read_fd, self._write_fd), -1, -1
        for fd in ends:
            if fd >= 0:
                os.close(fd)


class SignalPipe(WakePipe):
    """Signals as bytes on `read_fd`: one byte per signal, its number; `wake` writes 0. A SIGINT
    that the parent ignores stays ignored.

    Create it in the main thread. The C handler writes the bytes, so a thread sees a signal at once
    even while the main thread runs a long kernel.
    """

    def __init__(self, *signals: signal.Signals):
        super().__init__()
        if signals:
            signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in signals:
            if number != signal.SIGINT or not ignores_interrupts():
                signal.signal(number, lambda *_: None)
