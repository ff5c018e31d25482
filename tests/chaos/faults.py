"""What can happen to a server and its engine from outside, one method for each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections import Counter
from pathlib import Path

import httpx2 as httpx
import psutil
from quire.tests.chaos.servers import engine_of, grammar_processes
from quire.tests.chaos.traffic import Job

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
/* The wall clock with the offset that the file $CHAOS_CLOCK holds. */
int clock_gettime(clockid_t id, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, t);
  const char *path = getenv("CHAOS_CLOCK");
  FILE *file = id == CLOCK_REALTIME && path ? fopen(path, "r") : 0;
  long offset = 0;
  if (file) {
    if (fscanf(file, "%ld", &offset) != 1) offset = 0;
    fclose(file);
  }
  t->tv_sec += offset;
  return code;
}
"""
TMPFS_BYTES = 64 * 2**20


class Surroundings:
    """A directory for triggers, a small disk for temporary files, and a clock: what the server's
    environment names.
    """

    def __init__(self, directory: Path):
        self.directory, self.clock, self.disk = directory, directory / "clock", directory / "disk"
        self.disk.mkdir()
        self.clock.write_text("0")
        mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none", str(self.disk)]
        self.has_disk = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        library, source = directory / "clock.so", directory / "clock.c"
        source.write_text(CLOCK)
        self.has_clock = shutil.which("cc") is not None
        if self.has_clock:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        self.environment = {
            "CHAOS_DIRECTORY": str(directory),
            "CHAOS_CLOCK": str(self.clock),
            "TMPDIR": str(self.disk),
            **({"LD_PRELOAD": str(library)} if self.has_clock else {}),
        }

    def close(self) -> None:
        if self.has_disk:
            subprocess.run(["umount", "-l", str(self.disk)], check=False)


class Faults:
    def __init__(self, server: httpx.Client, surroundings: Surroundings, rng: random.Random):
        self.server, self.surroundings, self.rng = server, surroundings, rng
        self.done: Counter[str] = Counter()
        self.kinds = [name for name in vars(Faults) if name.startswith("do_")]
        if not surroundings.has_disk:
            self.kinds.remove("do_full_disk")
        if not surroundings.has_clock:
            self.kinds.remove("do_clock")
        self._coming: list[str] = []

    async def one(self, jobs: list[Job]) -> str:
        """Does one; returns when its cause is gone again, not when all is well. Each kind comes
        once, in random order, then each again.
        """
        self.jobs = jobs
        if not self._coming:
            self._coming = self.rng.sample(self.kinds, len(self.kinds))
        kind = self._coming.pop()
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # the engine was just replaced
            await getattr(self, kind)()
        self.done[kind] += 1
        return kind

    def _signal(self, number: signal.Signals) -> None:
        if (engine := engine_of(self.server)) is not None:
            engine.send_signal(number)

    async def do_kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def do_segfault(self) -> None:
        self._signal(signal.SIGSEGV)

    async def do_abort(self) -> None:
        self._signal(signal.SIGABRT)

    async def do_stop(self) -> None:
        await wait_until_ready(self.server)  # the limit of a start is longer than that of a step
        self._signal(signal.SIGSTOP)

    async def do_stop_and_continue(self) -> None:
        engine = engine_of(self.server)
        if engine is not None:
            engine.suspend()
            await asyncio.sleep(self.rng.uniform(0.1, 1.5))
            engine.resume()

    async def do_kill_twice(self) -> None:
        self._signal(signal.SIGKILL)
        await asyncio.sleep(self.rng.uniform(0.1, 2.0))
        self._signal(signal.SIGKILL)

    async def do_kill_grammar_processes(self) -> None:
        for process in grammar_processes(self.server):
            process.kill()

    async def do_stop_grammar_processes(self) -> None:
        for process in grammar_processes(self.server):
            process.suspend()

    async def do_raise_in_a_step(self) -> None:
        (self.surroundings.directory / "raise").touch()

    async def do_spin_in_a_step(self) -> None:
        (self.surroundings.directory / "spin").touch()

    async def do_segfault_in_a_step(self) -> None:
        (self.surroundings.directory / "segfault").touch()

    async def do_reset_connections(self) -> None:
        """Clients that leave without a word while their streams run."""
        port = self.server.base_url.port
        for job in self.rng.sample(self.jobs, 5):
            head = f"POST {job.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(job.body)}\r\n"
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n")
                connection.sendall(job.body)
                await asyncio.sleep(self.rng.uniform(0.0, 0.3))
                no_linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)

    async def do_full_disk(self) -> None:
        file = self.surroundings.disk / "full"
        with open(file, "wb", buffering=0) as disk, contextlib.suppress(OSError):
            while True:
                disk.write(bytes(2**16))
        try:
            self._signal(signal.SIGKILL)  # the next engine starts without room
            await asyncio.sleep(self.rng.uniform(0.5, 2.0))
        finally:
            file.unlink()

    async def do_exhaust_descriptors(self) -> None:
        process = psutil.Process(self.server.process.pid)
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        few = process.num_fds() + self.rng.randint(0, 8)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (few, hard))
        try:
            self._signal(signal.SIGKILL)  # the next engine needs descriptors
            await asyncio.sleep(self.rng.uniform(0.2, 1.0))
        finally:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))

    async def do_clock(self) -> None:
        self.surroundings.clock.write_text(str(self.rng.choice([-86400, 0, 86400])))

    async def do_memory_pressure(self) -> None:
        if (engine := engine_of(self.server)) is not None:
            used = engine.memory_info().vms
            resource.prlimit(engine.pid, resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))


def environment_variables(variables: dict[str, str]) -> contextlib.AbstractContextManager:
    """Sets them for the processes that are started in this context, as TMPDIR for the server."""
    from unittest import mock

    return mock.patch.dict(os.environ, variables)


async def wait_until_ready(server: httpx.Client, timeout_s: float = 600.0) -> float:
    began = time.monotonic()
    while True:
        with contextlib.suppress(httpx.TransportError):  # it may have no descriptor for another
            if (await asyncio.to_thread(server.get, "/health/ready")).status_code == 200:
                return time.monotonic() - began
        assert server.process.poll() is None, f"the server has ended: {server.log()[-3000:]}"
        assert time.monotonic() - began < timeout_s, server.log()[-3000:]
        await asyncio.sleep(0.05)
