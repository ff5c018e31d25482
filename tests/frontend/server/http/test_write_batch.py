"""Batched writes: order, one packet per iteration of the loop, and no lost or late data at the end
of a connection.
"""

import asyncio
from collections.abc import Callable

import pytest
from quire.frontend.server.http.write_batch import (
    MAX_GATHERED_BYTES,
    GatheringTransport,
    WriteBatch,
)


class Recorder:
    """A transport that records its calls."""

    def __init__(self, log: list, name: str):
        self.log, self.name, self.closing = log, name, False
        self.get_extra_info = self.pause_reading = self.resume_reading = self.can_write_eof = (
            lambda *_: True
        )

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.log.append((self.name, data))

    def get_write_buffer_size(self) -> int:
        return 7

    def write_eof(self) -> None:
        self.log.append((self.name, "eof"))

    def close(self) -> None:
        self.closing = True
        self.log.append((self.name, "close"))

    def abort(self) -> None:
        self.log.append((self.name, "abort"))


def in_one_turn(act: Callable[[GatheringTransport, GatheringTransport, list], None]) -> list:
    """Return the calls of two transports after `act` and the following iteration of the loop."""

    async def run() -> list:
        log: list = []
        batch = WriteBatch()
        act(*(GatheringTransport(Recorder(log, name), batch) for name in "ab"), log)
        log.append("end of turn")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return log

    return asyncio.run(run())


def test_writes_of_one_iteration_are_one_packet_per_connection() -> None:
    def act(a, b, log) -> None:
        for data in (b"1", b"2"):
            a.write(data)
            b.write(data)
        assert a.get_write_buffer_size() == 2 + 7

    assert in_one_turn(act) == ["end of turn", ("a", b"12"), ("b", b"12")]


@pytest.mark.parametrize("last", ["close", "write_eof"])
def test_the_end_comes_after_earlier_writes(last: str) -> None:
    def act(a, b, log) -> None:
        a.write(b"1")
        getattr(a, last)()

    assert in_one_turn(act) == [("a", b"1"), ("a", last.removeprefix("write_")), "end of turn"]


def test_an_abort_drops_buffered_data() -> None:
    def act(a, b, log) -> None:
        a.write(b"1")
        a.abort()

    assert in_one_turn(act) == [("a", "abort"), "end of turn"]


def test_large_data_is_written_at_once() -> None:
    def act(a, b, log) -> None:
        a.write(b"x" * MAX_GATHERED_BYTES)
        a.write(b"y")

    assert in_one_turn(act) == [("a", b"x" * MAX_GATHERED_BYTES), "end of turn", ("a", b"y")]


def test_iterations_are_written_in_order() -> None:
    async def run() -> list:
        log: list = []
        transport = GatheringTransport(Recorder(log, "a"), WriteBatch())
        for turn in (b"1", b"2", b"3"):
            transport.write(turn)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return log

    assert asyncio.run(run()) == [("a", b"1"), ("a", b"2"), ("a", b"3")]
