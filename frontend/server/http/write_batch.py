"""Writes of one turn of the event loop, gathered and given to the system together.

Must not know: HTTP, who writes.

A step of the engine makes many streams write a little each. Gathered, the calls of the system
follow each other with nothing between them, and what one stream writes in one turn becomes one
packet. What it saves is in tests/bench/LEDGER.md.

    turn n     stream 1: write ─┐  stream 2: write ─┐  …
    turn n+1                    └───────────────────┴──▶ flush: send 1, send 2, …
"""

from __future__ import annotations

import asyncio

# of one transport; then it is written at once, so that the transport can say when it has enough
MAX_GATHERED_BYTES = 64 * 1024


class WriteBatch:
    """The transports of one event loop that have something to flush."""

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


class GatheringTransport:
    """A transport whose writes wait for the end of the loop's turn.

    All else goes on to `transport`, after what was written before it.
    """

    def __init__(self, transport: asyncio.Transport, batch: WriteBatch):
        self._transport = transport
        self._batch = batch
        self._gathered: list[bytes] = []
        self._num_bytes = 0
        # What changes nothing in the order of writes. Each by its name: a __getattr__ here would
        # slow every look at any attribute.
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.can_write_eof = transport.can_write_eof

    def write(self, data: bytes) -> None:
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
        """In bytes, those that are still gathered included."""
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
