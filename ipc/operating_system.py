"""What Linux and macOS do in different ways: processes that watch each other, sockets, files
without a name, and the machine's figures. `SYSTEM` is the one that this process runs on.

Must not know: what any of it is for.

Other modules call it, and use nothing themselves that only one of the systems has
(tests/ipc/test_operating_system.py). Windows runs Quire in WSL, which is Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG = 1
# Found when this module is imported: while another thread loads a library, the search waits and
# holds the GIL.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
# sysctl's names below hw.optional, and those of Linux
_FEATURES = {
    "neon": "asimd",
    "arm.FEAT_DotProd": "asimddp",
    "arm.FEAT_I8MM": "i8mm",
    "arm.FEAT_BF16": "bf16",
    "avx2_0": "avx2",
    "fma": "fma",
}
PARENT_CHECK_S = 0.25  # how often a process of macOS looks for its parent
# macOS: <sys/un.h>
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID = 0, 1, 2
_XUCRED_BYTES = 76
_UNUSED_AFTER_S = 60.0  # since when a file without a listener exists that may be removed


class Credentials(NamedTuple):
    """The process at the other end, by the kernel."""

    pid: int  # 0: it cannot be seen from here
    uid: int


class ProcessState(NamedTuple):
    is_stopped: bool
    cpu_s: float  # of all its threads


class Linux:
    # Of a Unix socket's path: sun_path has 108 bytes, the last one a NUL.
    max_path_bytes = 107
    # Keeps the bounds of messages.
    local_socket = socket.SOCK_SEQPACKET
    processor_file = Path("/proc/cpuinfo")
    has_ranks = True  # executor/ranks/, which uses eventfd

    # ---------------------------------------------------------------- processes

    def exit_fd(self, child: subprocess.Popen[bytes]) -> int:
        """A descriptor that is readable once `child` has ended. The caller closes it."""
        return os.pidfd_open(child.pid)

    def watch(self, pid: int) -> int | None:
        """As exit_fd, for any process; None where the system offers nothing. Raises OSError."""
        return os.pidfd_open(pid)

    @contextlib.contextmanager
    def signals_to(self, pid: int) -> Iterator[Callable[[signal.Signals], None]]:
        """A function that sends a signal to this process, not to a later one with the same number.

        It raises ProcessLookupError when the process has ended.
        """
        pidfd = os.pidfd_open(pid)
        try:
            yield lambda number: signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)

    def kill_at_end_of_file(self, read_fd: int, pid: int) -> None:
        """Makes the kernel send SIGKILL to `pid` when the last writer of this pipe is gone.

        Raises OSError where `pid` has ended.
        """
        fcntl.fcntl(read_fd, fcntl.F_SETOWN, pid)
        fcntl.fcntl(read_fd, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(read_fd, fcntl.F_GETFL)
        fcntl.fcntl(read_fd, fcntl.F_SETFL, flags | os.O_ASYNC)

    def die_with_parent(self, parent_pid: int) -> None:
        """This process receives SIGKILL when the thread that started it ends."""
        assert _PRCTL is not None  # Linux has it
        _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    def process_state(self, pid: int) -> ProcessState:
        """Raises OSError for a process that is gone."""
        letter, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[10]) + int(fields[11])  # in user and in system mode
        return ProcessState(letter == "T", ticks / os.sysconf("SC_CLK_TCK"))

    # ---------------------------------------------------------------- sockets and files

    def credentials_of(self, connection: socket.socket) -> Credentials:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", data)
        return Credentials(pid, uid)

    def network_namespace(self) -> int:
        """Names without a file are those of one network namespace."""
        return os.stat("/proc/self/ns/net").st_ino

    def socket_address(self, name: str) -> str:
        """Of a ZMQ socket that is used by several processes, without a file if possible."""
        return f"ipc://@{name}"

    def remove_unused_sockets(self, pattern: str) -> None:
        """Removes the files of sockets with such names whose process has been killed."""

    def anonymous_file(self, name: str) -> int:
        """The descriptor of an empty file that ends with its last descriptor. `name` appears in
        lists of open files.
        """
        return os.memfd_create(name)

    def hold(self, path: Path) -> int | None:
        """A descriptor that keeps the number of this file, of any kind, from being given to
        another; None where numbers are not used again.
        """
        return os.open(path, os.O_PATH | os.O_NOFOLLOW)

    def allocate(self, file: int, num_bytes: int) -> None:
        """Gives the file this size and takes the space on the disk. Raises OSError."""
        os.posix_fallocate(file, 0, num_bytes)

    def write_through(self, file: int) -> None:
        """Returns when what was written to the file is on the disk."""
        os.fdatasync(file)

    def is_in_memory(self, file: int, offset: int) -> bool:
        """Whether the system has this byte of a file in memory. It is not read otherwise."""
        try:
            os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        return True

    # ---------------------------------------------------------------- cores

    def num_cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def cores(self) -> list[int]:
        """The cores that this process may use; empty: they have no numbers."""
        return sorted(os.sched_getaffinity(0))

    def bind_to_cores(self, cores: list[int]) -> None:
        """Binds all threads of this process, and those that they start."""
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(task), cores)

    def processor_text(self) -> str:
        """As /proc/cpuinfo: lines such as "model name : NAME" and "flags : avx2 fma". "": there is
        none.
        """
        file = self.processor_file
        return file.read_text(encoding="utf-8") if file.exists() else ""

    # ---------------------------------------------------------------- memory and descriptors

    def available_memory_bytes(self) -> int:
        return _stated_bytes(Path("/proc/meminfo"), "MemAvailable")

    def total_memory_bytes(self) -> int:
        return _stated_bytes(Path("/proc/meminfo"), "MemTotal")

    def private_memory_bytes(self, pid: int) -> int:
        """Memory of a process that it shares with no other, without files that are mapped."""
        return _stated_bytes(Path(f"/proc/{pid}/status"), "RssAnon")

    def resident_bytes(self) -> int:
        """Memory that this process has in use now."""
        return _stated_bytes(Path("/proc/self/status"), "VmRSS")

    def limit_memory(self, num_bytes: int, *, beyond_present: bool = False) -> None:
        """Allocations fail that would make this process's memory larger than this."""
        present = _stated_bytes(Path("/proc/self/status"), "VmSize") if beyond_present else 0
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = present + num_bytes
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def max_descriptors(self) -> int | None:
        """What no process may exceed, whatever its own limit says; None: it says it."""
        return None


class Darwin:
    """macOS. See Linux for what the methods do.

    The arguments are what a test replaces: `sysctl` returns the value with this name, or None.
    `end` is called when the parent is gone.
    """

    max_path_bytes = 103  # sun_path has 104 bytes
    local_socket = socket.SOCK_STREAM  # it has no SEQPACKET
    has_ranks = False

    def __init__(
        self,
        sysctl: Callable[[str], bytes | None] | None = None,
        end: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
        folder: Path = Path("/tmp"),
    ):
        """`folder`: for the files of sockets; the same for all processes, unlike TMPDIR."""
        self._sysctl = _sysctl if sysctl is None else sysctl
        self._end, self._folder = end, folder

    # ---------------------------------------------------------------- processes

    def exit_fd(self, child: subprocess.Popen[bytes]) -> int:
        read_fd, write_fd = os.pipe()

        def wait() -> None:
            child.wait()
            with contextlib.suppress(OSError):  # a fork may hold the pipe, too
                os.write(write_fd, b"\0")
            os.close(write_fd)

        threading.Thread(target=wait, name="quire-child-exit", daemon=True).start()
        return read_fd

    def watch(self, pid: int) -> int | None:
        return None

    @contextlib.contextmanager
    def signals_to(self, pid: int) -> Iterator[Callable[[signal.Signals], None]]:
        yield lambda number: os.kill(pid, number)

    def kill_at_end_of_file(self, read_fd: int, pid: int) -> None:
        """The child watches its parent alone (die_with_parent)."""

    def die_with_parent(self, parent_pid: int) -> None:
        """A thread looks for the parent. It does not end a process that is stopped."""

        def watch() -> None:
            while os.getppid() == parent_pid:
                time.sleep(PARENT_CHECK_S)
            self._end()

        threading.Thread(target=watch, name="quire-parent", daemon=True).start()

    def process_state(self, pid: int) -> ProcessState:
        import psutil

        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            return ProcessState(process.status() == "stopped", times.user + times.system)
        except psutil.Error as error:
            raise ProcessLookupError(errno.ESRCH, str(error)) from None

    # ---------------------------------------------------------------- sockets and files

    def credentials_of(self, connection: socket.socket) -> Credentials:
        """`pid` is that of the process that used the other end last."""
        data = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES)
        _, uid = struct.unpack_from("=II", data)
        try:
            pid = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the other end is gone
                raise
            pid = 0
        return Credentials(pid, uid)

    def network_namespace(self) -> int:
        return 0

    def socket_address(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    def remove_unused_sockets(self, pattern: str) -> None:
        for path in self._folder.glob(pattern):
            with contextlib.suppress(OSError):  # of another user, or another process removes it
                status = path.lstat()
                is_new = time.time() - status.st_mtime < _UNUSED_AFTER_S
                if status.st_uid != os.geteuid() or is_new or not path.is_socket():
                    continue
                if not is_bound(path):
                    path.unlink()

    def anonymous_file(self, name: str) -> int:
        import tempfile

        descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
        os.unlink(path)
        return descriptor

    def hold(self, path: Path) -> int | None:
        return None

    def allocate(self, file: int, num_bytes: int) -> None:
        """Takes no space: it has no call of POSIX for that."""
        os.ftruncate(file, num_bytes)

    def write_through(self, file: int) -> None:
        os.fsync(file)

    def is_in_memory(self, file: int, offset: int) -> bool:
        """Always: it cannot be asked, so nothing is read ahead."""
        return True

    # ---------------------------------------------------------------- cores

    def num_cores(self) -> int:
        """The fast ones: a step would wait for the thread on an efficient one."""
        return self._number("hw.perflevel0.logicalcpu") or os.cpu_count() or 1

    def cores(self) -> list[int]:
        return []

    def bind_to_cores(self, cores: list[int]) -> None:
        raise OSError(errno.ENOTSUP, "macOS does not bind a process to cores")

    def processor_text(self) -> str:
        name = (self._sysctl("machdep.cpu.brand_string") or b"").rstrip(b"\0").decode()
        flags = [flag for key, flag in _FEATURES.items() if self._number(f"hw.optional.{key}")]
        return f"model name : {name}\nflags : {' '.join(flags)}\n"

    # ---------------------------------------------------------------- memory and descriptors

    def available_memory_bytes(self) -> int:
        import psutil

        return psutil.virtual_memory().available

    def total_memory_bytes(self) -> int:
        import psutil

        return psutil.virtual_memory().total

    def private_memory_bytes(self, pid: int) -> int:
        """More than that: macOS tells a program only of its own process what is private."""
        import psutil

        return psutil.Process(pid).memory_info().rss

    def resident_bytes(self) -> int:
        import psutil

        return psutil.Process().memory_info().rss

    def limit_memory(self, num_bytes: int, *, beyond_present: bool = False) -> None:
        """Has no effect: macOS keeps no such limit."""

    def max_descriptors(self) -> int | None:
        return self._number("kern.maxfilesperproc")

    def _number(self, name: str) -> int | None:
        value = self._sysctl(name)
        return None if value is None else int.from_bytes(value, sys.byteorder)


def is_bound(path: Path) -> bool:
    """Whether a process has the socket of this file.

    It asks by a socket of another kind, which is refused in another way. A listener does not see
    the question, and one whose queue of connections is full does not seem to be gone, as on macOS.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _sysctl(name: str) -> bytes | None:
    """macOS: what sysctlbyname(3) tells; None: it does not know the name."""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    problem = ctypes.CDLL(None).sysctlbyname(
        name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if problem else value.raw[: size.value]


def _stated_bytes(path: Path, name: str) -> int:
    """The amount with this name in a file of /proc, which states it in kB. 0: it is not there."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def choose(platform: str) -> Linux | Darwin:
    """`platform`: as sys.platform."""
    return Darwin() if platform == "darwin" else Linux()


SYSTEM = choose(sys.platform)
