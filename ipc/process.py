"""The engine as a process: how its parent starts, watches and ends it, and how it watches its
parent.

Must not know: messages or sockets, nor what an engine does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from .config import EngineConfig
from .log_format import current_format

TAIL_BYTES = 4096  # of stderr, kept for the EngineDeadError
TAIL_LINES = 12
TERMINATE_TIMEOUT_S = 1.0
# The kernel sends it to a child whose parent died. It is not SIGTERM, which makes an engine finish
# its requests first.
PARENT_DEATH_SIGNAL = signal.SIGUSR1
STACKS_SIGNAL = signal.SIGUSR2  # makes an engine write the stacks of its threads to stderr
_PR_SET_PDEATHSIG = 1


def engine_command(
    *, listen: str | None = None, replaces: bool = False, imports_early: bool = False
) -> list[str]:
    """The command that runs an engine.

    `imports_early`: it imports what runs a model on a CPU, without other programs' code, before it
    has a configuration.

    With `listen` ("ipc://PATH") it is a daemon, which reads its resolved EngineConfig as JSON from
    stdin. A child of MPClient gets its other arguments from EngineProcess. Without -P the current
    directory would come first on sys.path, and a directory there called `core` or `kernels` would
    hide a package.
    """
    command = [sys.executable, "-P", "-m", "quire.core.engine_proc"]
    if imports_early:
        command.append("--import-early")
    if replaces:
        command.append("--replace")
    return command if listen is None else [*command, "--listen", listen, *_log_arguments()]


def exec_daemon(address: str, config: EngineConfig, *, replaces: bool = False) -> NoReturn:
    """Replaces this process by a daemon that serves `address` ("ipc://PATH") until SIGTERM.

    `config` is resolved. `replaces`: a daemon that listens there, when the model is loaded. Exit
    code 0: asked to leave; 1: it failed, with a traceback on stderr; 2: the address cannot be used.
    """
    command = engine_command(listen=address, replaces=replaces)
    sys.stdout.flush()
    sys.stderr.flush()
    # a pipe would block if the configuration exceeds its buffer
    stdin = os.memfd_create("quire-config")
    with open(stdin, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(config))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.execv(command[0], command)


def _log_arguments() -> list[str]:
    """The child logs as this process does."""
    level = logging.getLogger("quire").getEffectiveLevel()
    return ["--log-format", current_format(), "--log-level", str(level)]


# ---------------------------------------------------------------- the parent's side


class EngineProcess:
    """A child engine.

    `pidfd` becomes readable when it dies; it removes the directory `sockets_path` if this process
    dies.
    """

    def __init__(self, command: Sequence[str], sockets_path: Path, max_message_bytes: int):
        """Starts `command` (engine_command(), or another program that calls engine_proc.main)."""
        # end-of-file tells the child that this process is gone
        parent_fd, self._parent_write_fd = os.pipe()
        self._stderr_fd, stderr_fd = os.pipe()
        arguments = [
            "--connect",
            str(sockets_path),
            "--parent-pid",
            str(os.getpid()),
            "--parent-fd",
            str(parent_fd),
        ]
        arguments += [
            "--max-message-bytes",
            str(max_message_bytes),
            *_log_arguments(),
        ]
        try:
            # A session of its own, so that the terminal's Ctrl-C reaches only this process. The
            # child's stdout is our stderr, so that nothing the engine prints enters a program's
            # output.
            self._popen = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stderr_fd,
                stderr=stderr_fd,
                pass_fds=(parent_fd,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._stderr_fd)
            os.close(self._parent_write_fd)
            raise
        finally:
            os.close(parent_fd)
            os.close(stderr_fd)
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self._owner_pid = os.getpid()
        self._tail = bytearray()
        self._tee = threading.Thread(
            target=self._copy_stderr, name="quire-engine-stderr", daemon=True
        )
        self._tee.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its death. Returns False if it is still alive."""
        return bool(_poll(self.pidfd, timeout_s=timeout_s))

    def describe_death(self) -> str:
        """How a dead engine died, with the last lines of its stderr. Reaps it."""
        code = self._popen.wait()
        how = (
            f"exited with code {code}"
            if code >= 0
            else f"was killed by {signal.Signals(-code).name}"
        )
        self._tee.join(timeout=1.0)
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        words = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        return f"the engine process (pid {self.pid}) {how}" + (
            f"; last lines of its stderr:\n{words}" if words else ""
        )

    def reap(self) -> None:
        """Of a dead child."""
        self._popen.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing if the child is dead."""
        self._popen.send_signal(number)

    @property
    def exit_signal(self) -> signal.Signals | None:
        """The signal that ended the child, once it is reaped; None if it exited by itself."""
        code = self._popen.returncode
        return signal.Signals(-code) if code is not None and code < 0 else None

    def close(self, timeout_s: float) -> None:
        """Ends the child and reaps it.

        It has `timeout_s` to exit by itself; then it receives SIGTERM, then SIGKILL. May be called
        twice.
        """
        if self.pidfd < 0 or os.getpid() != self._owner_pid:  # a fork of the owner owns no engine
            return
        if not self.wait(timeout_s):
            self._popen.terminate()
            if not self.wait(TERMINATE_TIMEOUT_S):
                self._popen.kill()
        self._popen.wait()
        self._tee.join()
        for fd in (self.pidfd, self._stderr_fd, self._parent_write_fd):
            os.close(fd)
        self.pidfd = -1

    def _copy_stderr(self) -> None:
        """Copies the child's stderr to ours and keeps the last lines. Runs in a thread.

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
                is_dead = self.pidfd in _poll(self._stderr_fd, self.pidfd)
                continue
            if not data:  # closed by a child that is still alive
                return
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            _write_stderr(data)


def _poll(*fds: int, timeout_s: float | None = None) -> list[int]:
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
    """Asks the kernel for PARENT_DEATH_SIGNAL when the parent dies; exits if it is already gone.

    The signal also arrives when only the thread that started this process ends. The handler must
    compare os.getppid() with `parent_pid`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(PARENT_DEATH_SIGNAL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


class SignalPipe:
    """Signals as bytes on `read_fd`: one byte per signal, its number; `wake` writes 0.

    Create it in the main thread. The C handler writes the bytes, so a thread sees a signal at once
    even while the main thread runs a long kernel.
    """

    def __init__(self, *signals: signal.Signals):
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        if signals:
            signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, lambda *_: None)

    def wake(self) -> None:
        os.write(self._write_fd, b"\0")

    def read(self) -> bytes:
        try:
            return os.read(self.read_fd, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for fd in (self.read_fd, self._write_fd):
            os.close(fd)
