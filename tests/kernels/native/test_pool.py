"""The threads of native kernels: every piece is done once for any caller and any number of threads;
forks, cores, hints, and idle threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from quire.kernels.cpu.native.calls import BF16, Op, SiluAndMul, Step
from quire.kernels.cpu.native.library import library
from quire.kernels.registry import implementations
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY
from torch import Tensor

pytestmark = pytest.mark.skipif(library is None, reason=NEEDS_LIBRARY)

CORES = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core")
EMPTY = SiluAndMul(
    op=Op.SILU_AND_MUL, dtype=BF16, rows=0, x=None, out=None, x_row=0, out_row=0, size=1
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    mask = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, mask)
    library.set_num_threads(1)


def task_ids() -> set[int]:
    return {int(task) for task in os.listdir("/proc/self/task")}


def start(num_threads: int, cores: list[int] | None = None) -> list[int]:
    """Sets the number of threads; returns the system's ids of the threads that this starts."""
    library.set_num_threads(1)
    before = task_ids()
    library.set_num_threads(num_threads, cores)
    return sorted(task_ids() - before)


def work(rows: int, seed: int = 0) -> tuple[Callable[[], Tensor], Tensor]:
    """A call of the activation, and its expected result."""
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
    function = next(i.function for i in implementations("silu_and_mul") if i.name == "native")
    library.set_num_threads(1)
    return lambda: function(x), function(x)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def assert_ends_normally(child: int) -> None:
    """A forked process ends by itself, with code 0."""
    status: list[int] = []

    def has_ended() -> bool:
        pid, code = os.waitpid(child, os.WNOHANG)
        status.extend([code] if pid else [])
        return bool(pid)

    try:
        wait_until(has_ended, "the forked process hangs")
    except AssertionError:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise
    assert status == [0], (
        f"the forked process has_ended with {os.waitstatus_to_exitcode(status[0])}"
    )


def in_a_fork(body: Callable[[], None]) -> None:
    """`body` raises nothing in a child process."""
    if child := os.fork():
        assert_ends_normally(child)
        return
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def switches(task: int) -> int:
    """The number of times that a thread has gone to sleep."""
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    return next(
        int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches")
    )


def asleep(task: int) -> bool:
    return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_every_piece_is_done_in_every_run(num_threads):
    call, expected = work(rows=400)  # 26 pieces
    library.set_num_threads(num_threads)
    assert all(torch.equal(call(), expected) for _ in range(100))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_more_pieces_than_a_share_counts(num_threads):
    """With this many, threads take several at once: each must be done, and the last take may be
    shorter.
    """
    argmax = next(i.function for i in implementations("argmax") if i.name == "native")
    library.set_num_threads(num_threads)
    # one piece each
    for rows in (4096 * num_threads - 1, 4096 * num_threads, 4096 * num_threads + 1, 50_003):
        logits = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        token_ids, is_finite = argmax(logits)
        assert torch.equal(token_ids, logits.argmax(1)) and is_finite.all()


def test_a_call_of_several_phases_with_threads_that_come_late():
    """Seven threads share one core. The one that is running works; the others join in any phase of
    any call, or not at all.
    """
    logits = torch.randn(6, 30_000, generator=torch.Generator().manual_seed(1))
    find, draw = (
        [i.function for i in implementations(name) if i.name == "native"][0]
        for name in ("argmax", "sample_tokens")
    )
    ones, ids = torch.ones(6), torch.arange(6)
    arguments = (logits, ones, torch.full((6,), 50), ones * 0.9, ones * 0, ids, ids)
    library.set_num_threads(1)
    expected = *find(logits), draw(*arguments)
    start(7, CORES[:1] * 7)
    for _ in range(150):
        assert all(
            torch.equal(*pair)
            for pair in zip((*find(logits), draw(*arguments)), expected, strict=True)
        )


@needs_two_cores
def test_a_preempted_thread_delays_no_call():
    """A worker gets little time on a busy core. If each call waited for it, a run would take
    thousands of times as long as with one thread.
    """
    step = Step()
    many = (ctypes.c_void_p * 2000)(*[ctypes.addressof(EMPTY)] * 2000)

    def least_time() -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(100):
                library.run_all(many, step)
            times.append(time.perf_counter() - begin)
        return min(times)

    library.set_num_threads(1)
    alone = least_time()
    [worker] = start(2, CORES[:2])
    os.sched_setaffinity(0, {CORES[0]})
    os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os\nos.sched_setaffinity(0, {{{CORES[1]}}})\nwhile True: pass",
        ]
    ) as busy:
        try:
            library.run_all(many, step)
            assert least_time() < 200 * alone
        finally:
            busy.kill()


def test_threads_may_change_between_any_two_runs():
    call, expected = work(rows=200)
    for i in range(60):
        library.set_num_threads(1 + i % 5)
        time.sleep((i % 3) * 0.0002)  # polling, about to sleep, asleep
        assert torch.equal(call(), expected) and torch.equal(call(), expected)


def test_a_run_of_many_calls_with_threads_that_fall_asleep_between_runs():
    """No sleeping thread is missed: a lost wake-up would hang."""
    library.set_num_threads(3)
    step = Step()
    many = (ctypes.c_void_p * 50)(*[ctypes.addressof(EMPTY)] * 50)
    for i in range(150):
        library.run_all(many, step)
        time.sleep((i % 4) * 0.00005)


def test_callers_on_several_threads_wait_for_each_other():
    calls = [work(rows=100 + i, seed=i) for i in range(4)]
    library.set_num_threads(2)
    right: list[bool] = []

    def call_often(call: Callable[[], Tensor], expected: Tensor) -> None:
        right.extend(torch.equal(call(), expected) for _ in range(50))

    threads = [threading.Thread(target=call_often, args=pair) for pair in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_fork_has_threads_of_its_own(num_threads):
    call, expected = work(rows=200)
    library.set_num_threads(num_threads)
    call()

    def in_child() -> None:
        # not always one: OpenTelemetry starts a thread in every fork
        before = task_ids()
        assert torch.equal(call(), expected)
        assert len(task_ids() - before) == num_threads - 1

    def in_child_and_its_child() -> None:
        in_child()
        in_a_fork(in_child)

    in_a_fork(in_child_and_its_child)
    assert torch.equal(call(), expected)


def test_a_fork_beside_a_run():
    """While another thread runs: the child inherits neither its locks nor its unfinished work."""
    call, expected = work(rows=2000)
    library.set_num_threads(2)
    stop = threading.Event()

    def call_often() -> None:
        while not stop.is_set():
            call()

    def in_child() -> None:
        assert torch.equal(call(), expected)

    other = threading.Thread(target=call_often)
    other.start()
    try:
        for _ in range(5):
            in_a_fork(in_child)
    finally:
        stop.set()
        other.join()


def test_limit_memory_threads_that_cannot_start_raise_an_error_and_one_remains():
    call, expected = work(rows=200)

    def in_child() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # enough for one or two stacks
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
        before = task_ids()
        with pytest.raises(OSError):
            library.set_num_threads(64)
        assert not task_ids() - before
        assert torch.equal(call(), expected)

    in_a_fork(in_child)


@pytest.mark.parametrize(
    ("num_threads", "cores"), [(0, None), (-1, None), (2, [0]), (2, [0, 1, 2])]
)
def test_bad_numbers_are_refused(num_threads, cores):
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        library.set_num_threads(num_threads, cores)


@needs_two_cores
def test_workers_are_pinned_and_the_caller_is_not():
    call, expected = work(rows=200)
    [worker] = start(2, CORES[:2])
    for _ in range(20):
        assert torch.equal(call(), expected)
    assert os.sched_getaffinity(worker) in ({CORES[0]}, {CORES[1]})
    assert os.sched_getaffinity(0) == set(CORES)


@needs_two_cores
def test_a_worker_yields_to_the_caller():
    """Otherwise two threads would share one core, and another would be idle."""
    call, _ = work(rows=200)
    [worker] = start(2, CORES[:2])
    for mine, others in ((CORES[1], CORES[0]), (CORES[0], CORES[1]), (CORES[0], CORES[1])):
        os.sched_setaffinity(0, {mine})
        call()
        assert os.sched_getaffinity(worker) == {others}


def test_idle_threads_sleep():
    call, _ = work(rows=200)
    workers = start(3)
    call()
    for worker in workers:
        wait_until(lambda: asleep(worker), "a thread without work stays awake")
    before = [switches(worker) for worker in workers]
    time.sleep(0.1)
    assert [switches(worker) for worker in workers] == before  # no periodic wake-ups either


def test_a_hint_wakes_them_and_runs_nothing():
    call, expected = work(rows=200)
    [worker] = start(2)
    call()
    for _ in range(5):
        wait_until(lambda: asleep(worker), "a thread without work stays awake")
        before = switches(worker)
        library.wake()
        # awake, then asleep again since no run followed
        wait_until(lambda: switches(worker) > before, "no hint came through")
    library.wake()
    assert torch.equal(call(), expected)
