"""Makes a Python on Linux refuse what macOS does not have, and makes Quire take its part for macOS,
in this process and in those that it starts. It runs because its folder is on PYTHONPATH.

Names of Python's modules that only Linux has are removed, for other packages too. Quire's own files
read nothing below /proc and /sys. Credentials of a socket are asked for in macOS's way.
"""

import errno
import os
import socket
import struct
import sys
from importlib import import_module

LACKING = {  # by module; tests/ipc/test_operating_system.py reads it, too
    "os": (
        "eventfd eventfd_read eventfd_write EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE memfd_create "
        "MFD_CLOEXEC pidfd_open sched_getaffinity sched_setaffinity sched_getscheduler "
        "sched_setscheduler SCHED_BATCH SCHED_OTHER O_PATH O_TMPFILE posix_fadvise pipe2 "
        "posix_fallocate fdatasync RWF_NOWAIT"
    ),
    "signal": "pidfd_send_signal SIGRTMIN SIGPWR SIGSTKFLT sigtimedwait sigwaitinfo",
    "select": "epoll",
    "socket": "SO_PEERCRED SOCK_NONBLOCK SOCK_CLOEXEC SO_PASSCRED",
    "fcntl": "F_SETSIG F_SETPIPE_SZ F_GETPIPE_SZ F_OFD_SETLK",
    "mmap": "MADV_HUGEPAGE MADV_POPULATE_WRITE MADV_POPULATE_READ MAP_POPULATE",
    "resource": "prlimit",
}
SYSCTL = {
    "hw.perflevel0.logicalcpu": struct.pack("=i", 2),
    "kern.maxfilesperproc": struct.pack("=i", 10240),
    "machdep.cpu.brand_string": b"Apple M0\0",
    "hw.optional.arm.FEAT_DotProd": struct.pack("=i", 1),
}
EVENTS = {"open", "os.listdir", "os.scandir"}
SO_PEERCRED = socket.SO_PEERCRED
LOCAL_PEERCRED, LOCAL_PEERPID = 1, 2
_getsockopt, _init = socket.socket.getsockopt, socket.socket.__init__


def refuse_files_of_linux(event: str, arguments: tuple) -> None:
    if event not in EVENTS or not isinstance(arguments[0], str | bytes):
        return
    path = os.fsdecode(arguments[0])
    if path.startswith(("/proc", "/sys/", "/dev/shm")) and _asked_by_quire():
        raise FileNotFoundError(errno.ENOENT, "macOS has no such file", path)


def _asked_by_quire() -> bool:
    """Whether the innermost frame outside of the standard library is Quire's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in sys.stdlib_module_names:
            return name.startswith("quire.")
        frame = frame.f_back
    return False


def getsockopt(self: socket.socket, level: int, option: int, *size: int) -> int | bytes:
    if self.family != socket.AF_UNIX or level != 0:
        return _getsockopt(self, level, option, *size)
    pid, uid, _ = struct.unpack("3i", _getsockopt(self, socket.SOL_SOCKET, SO_PEERCRED, 12))
    return {
        LOCAL_PEERPID: pid,
        LOCAL_PEERCRED: struct.pack("=IIh2x16I", 0, uid, 1, *16 * [0])[: (size or (0,))[0]],
    }[option]


def init(self: socket.socket, family: int = -1, type: int = -1, *args, **others) -> None:
    if family == socket.AF_UNIX and type == socket.SOCK_SEQPACKET:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")
    _init(self, family, type, *args, **others)


def choose_macos() -> None:
    linux, sys.platform = sys.platform, "darwin"
    try:
        from quire.ipc import operating_system
    finally:
        sys.platform = linux
    assert isinstance(operating_system.SYSTEM, operating_system.Darwin)
    operating_system.SYSTEM = operating_system.Darwin(SYSCTL.get)


choose_macos()
for module, names in LACKING.items():
    for name in names.split():
        vars(import_module(module)).pop(name, None)
socket.socket.getsockopt, socket.socket.__init__ = getsockopt, init
sys.addaudithook(refuse_files_of_linux)
