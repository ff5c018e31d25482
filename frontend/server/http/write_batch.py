"""Collects the writes of one event-loop iteration and passes them to the system together.

Must not know: HTTP, the writers.

After each engine step many streams write a little. Collected, their system calls follow each other
directly, and the writes of one stream within one iteration become one packet. tests/bench/LEDGER.md
has the measured gain.

    turn n     stream 1: write ─┐  stream 2: write ─┐  …
    turn n+1                    └───────────────────┴──▶ flush: send 1, send 2, …
"""

from __future__ import annotations

import asyncio

# One transport defers at most this much. Data beyond this are written at once, so that the
# transport can apply flow control.
MAX_GATHERED_BYTES = 64 * 1024


class WriteBatch:
    """The transports of one event loop that have data to flush."""

    def __init__(self) -> None:
        self._waiting: list[GatheringTransport] = []

    def add(self, transport: GatheringTransport) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(transport)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class GatheringTransport(asyncio.Transport):
    """A transport that defers writes to the end of the event-loop iteration.

    All other calls are forwarded to `transport`, after the earlier writes.
    """

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch):
        self._transport = transport
        self._batch = batch
        self._gathered: list[bytes | bytearray | memoryview] = []
        self._num_bytes = 0
        # These methods do not affect the order of writes. They are listed by name: a __getattr__
        # would slow every attribute access.
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.can_write_eof = transport.can_write_eof

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._gathered:
            self._batch.add(self)
        self._gathered.append(data)
        self._num_bytes += len(data)
        if self._num_bytes >= MAX_GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        gathered = self._gathered
        if gathered:
            self._gathered, self._num_bytes = [], 0
            if not self._transport.is_closing():
                self._transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def get_write_buffer_size(self) -> int:
        """Returns the bytes in the buffer, including deferred ones."""
        return self._num_bytes + self._transport.get_write_buffer_size()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._gathered, self._num_bytes = [], 0
        self._transport.abort()
