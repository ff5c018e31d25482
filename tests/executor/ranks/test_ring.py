"""The ring in shared memory: order, sizes, readers that are slow."""

from __future__ import annotations

import os
import random
import select
import threading

import pytest
from quire.executor.ranks.ring import (
    NUM_SLOTS,
    SLOT_BYTES,
    RingEnds,
    RingReader,
    RingWriter,
    join_frames,
    split_frames,
)


@pytest.fixture
def ends():
    ends = RingEnds.create(2)
    yield ends
    for fd in ends.fds:
        os.close(fd)


def test_every_reader_gets_every_message_in_order(ends) -> None:
    rng = random.Random(0)
    sizes = [0, 1, SLOT_BYTES - 8, SLOT_BYTES - 7, 3 * SLOT_BYTES, 20 * SLOT_BYTES]
    messages = [bytes([i]) * size for i, size in enumerate(sizes)]
    messages += [rng.randbytes(rng.randrange(2000)) for _ in range(100)]
    got: list[list[bytes]] = [[], []]

    def read(index: int) -> None:
        reader = RingReader(ends, index)
        got[index] = [reader.receive() for _ in messages]

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    writer = RingWriter(ends)
    for message in messages:
        writer.send(message)
    for thread in threads:
        thread.join(60)
    assert got == [messages, messages]


def test_a_writer_waits_for_the_slowest_reader(ends) -> None:
    writer, fast = RingWriter(ends), RingReader(ends, 0)
    for number in range(NUM_SLOTS):
        writer.send(b"%d" % number)
        assert fast.receive() == b"%d" % number

    def is_above_0(fd: int) -> bool:
        return bool(select.select([fd], [], [], 0)[0])

    assert is_above_0(ends.free[0]) and not is_above_0(ends.free[1])
    slow = RingReader(ends, 1)
    assert slow.receive() == b"0"
    assert is_above_0(ends.free[1])
    writer.send(b"more")
    for _ in range(NUM_SLOTS - 1):
        slow.receive()
    assert slow.receive() == fast.receive() == b"more"


def test_a_wait_may_end_with_an_exception(ends) -> None:
    def refuse(fd: int) -> None:
        raise RuntimeError("a rank is dead")

    with pytest.raises(RuntimeError, match="a rank is dead"):
        RingWriter(ends, refuse).send(b"x")


def test_frames() -> None:
    for frames in ([b""], [b"a", b"", memoryview(b"bcd")], [os.urandom(5), os.urandom(1000)]):
        assert [bytes(f) for f in split_frames(join_frames(frames))] == [bytes(f) for f in frames]
