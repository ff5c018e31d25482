"""RequestStream and BatchStream: pass the outputs of one request, or of several that pool, from
the task that reads the engine to their reader.

Must not know: the engine, how outputs are produced, the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from ...ipc.errors import EngineDeadError
from ..outputs import RequestOutput
from ..pooling_outputs import AnyOutput, PoolingRequestOutput


class _ReaderStream:
    """The reader's side of a stream; it supports one reader."""

    def __init__(self) -> None:
        self._error: EngineDeadError | None = None
        self._reader: asyncio.Future | None = None  # the reader's future while it waits

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _raise_error(self) -> NoReturn:
        assert self._error is not None  # only an output or an error wakes the reader
        raise EngineDeadError(*self._error.args) from self._error


class RequestStream(_ReaderStream):
    """The outputs that the reader has not read yet, merged into one, so that a slow reader needs no
    more memory than its text.

    take_at_once: see AsyncLLM.generate.
    """

    def __init__(self, take_at_once: Callable[[RequestOutput], bool] | None = None) -> None:
        super().__init__()
        self._take_at_once = take_at_once
        self._unread: RequestOutput | None = None
        self._fault: BaseException | None = None  # raised by take_at_once; fails this reader only

    def put(self, output: AnyOutput) -> None:
        assert isinstance(output, RequestOutput)  # a request that pools has a BatchStream
        if self._unread is not None:
            self._unread.merge(output)
            return
        take, reader = self._take_at_once, self._reader
        # A waiting reader has read all earlier outputs. An output that is taken at once does not
        # wake it.
        if (
            take is not None
            and reader is not None
            and not reader.done()
            and not output.finished
            and output.error is None
        ):
            try:
                if take(output):
                    return
            except BaseException as error:  # as in AsyncLLM._read_outputs
                self._fault = error
                self._wake()
                return
        self._unread = output
        self._wake()

    async def get(self) -> RequestOutput:
        """Waits for an output. Raises a failure after the outputs before it."""
        if self._unread is None and self._error is None:
            await self._wait()
        if self._fault is not None:
            raise self._fault
        if self._unread is None:
            self._raise_error()
        output, self._unread = self._unread, None
        return output


class BatchStream(_ReaderStream):
    """The outputs of requests that pool, one of each, by the user's id."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, PoolingRequestOutput] = {}
        self._new: list[str] = []

    def put(self, output: AnyOutput) -> None:
        assert isinstance(output, PoolingRequestOutput)
        self.outputs[output.request_id] = output
        self._new.append(output.request_id)
        self._wake()

    async def wait(self) -> list[str]:
        """Waits for outputs; returns the ids of those that came since the last call. Raises a
        failure after the outputs before it.
        """
        if not self._new and self._error is None:
            await self._wait()
        if not self._new:
            self._raise_error()
        new, self._new = self._new, []
        return new
