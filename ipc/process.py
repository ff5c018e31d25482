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

TAIL_BYTES = 4096  # of stderr, kept for the EngineDeadError
TAIL_LINES = 12
TERMINATE_TIMEOUT_S = 1.0
# Sent by the kernel to a child whose parent died. Not SIGTERM, which asks an engine to finish its
# requests first.
PARENT_DEATH_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


def engine_command(*, listen: str | None = None) -> list[str]:
    """The program that runs an engine; with `listen` ("ipc://PATH") a daemon, which reads its
    resolved EngineConfig as JSON from stdin.

    A child of MPClient gets the rest of its arguments from EngineProcess. -P: without it the
    current directory would come first on sys.path, and a directory there called `core` or `kernels`
    would hide a package.
    """
    command = [sys.executable, "-P", "-m", "quire.core.engine_proc"]
    return (
        command
        if listen is None
        else [*command, "--listen", listen, "--log-level", str(_log_level())]
    )


def exec_daemon(address: str, config: EngineConfig) -> NoReturn:
    """Becomes the daemon: replaces this process by an engine that serves programs at `address`
    ("ipc://PATH") until SIGTERM.

    `config` is resolved. Exit code 0: asked to leave; 1: it failed, with a traceback on stderr; 2:
    the address cannot be used.
    """
    command = engine_command(listen=address)
    sys.stdout.flush()
    sys.stderr.flush()
    # a pipe would block if the configuration is larger than its buffer
    stdin = os.memfd_create("quire-config")
    with open(stdin, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(config))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.execv(command[0], command)


def _log_level() -> int:
    return logging.getLogger("quire").getEffectiveLevel()


# ---------------------------------------------------------------- the parent's side


class EngineProcess:
    """A child engine.

    `pidfd` becomes readable when it dies; `sockets_path` is the directory that it removes if this
    process dies.
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
            "--log-level",
            str(_log_level()),
        ]
        try:
            # A session of its own: the terminal's Ctrl-C reaches this process alone, which decides.
            # Its stdout is our stderr, so that nothing the engine prints can end up in the output
            # of a program.
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
        """Waits for its death; False if it still lives."""
        return bool(_poll(self.pidfd, timeout_s=timeout_s))

    def describe_death(self) -> str:
        """How a dead engine died, with its last words on stderr. Reaps it."""
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
            f"; its last words:\n{words}" if words else ""
        )

    def close(self, timeout_s: float) -> None:
        """Ends the child and reaps it: it has `timeout_s` to leave by itself, then comes SIGTERM,
        then SIGKILL. May be called twice.
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
        """Thread: copies the child's stderr to ours and keeps its end.

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
            if not data:  # closed by a child that lives on
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
        # Past Python's buffer: a thread that dies holding its lock at interpreter exit would abort
        # the process.
        os.write(sys.stderr.fileno(), data)
    except (OSError, ValueError, AttributeError):
        # a notebook's stderr has no file; there may be none at all
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(data.decode(errors="replace"))


# ---------------------------------------------------------------- the child's side


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for PARENT_DEATH_SIGNAL when the parent is gone; exits if it already is.

    The signal also comes when only the thread that started us ends: who gets it must compare
    os.getppid() with `parent_pid`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(PARENT_DEATH_SIGNAL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


class SignalPipe:
    """Signals as bytes on `read_fd`, one per signal, its number; `wake` sends a 0.

    Made in the main thread.

    The bytes are written by the C handler, so that a thread sees a signal at once even while the
    main thread is inside a long kernel.
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
