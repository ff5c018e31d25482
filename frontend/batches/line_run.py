"""Answers the lines of one input, a bounded number at a time, and commits the results.

Must not know: how a line is answered, where the files are.

Cancelling a run ends the lines that are being answered and commits those that are done: a later
run over the same files continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from .formats import Answer, LineFormat, Reason
from .input_file import InputLine, read_lines
from .results import Results

logger = logging.getLogger(__name__)
COMMIT_S = 0.5
RETRY_S = 5.0  # after a disk did not take results
MAX_PENDING = 1024  # results that wait to be written
POLL_S = 0.05  # between two looks at a limit
DROPPED_AT_ONCE = 512  # lines

# The second argument is the id of the request.
AnswerLine = Callable[[InputLine, str], Awaitable[Answer]]


class Gate:
    """Places for lines that are being answered, in the order in which they were asked for.

    `limit` returns how many there are at this time.
    """

    def __init__(self, limit: Callable[[], int]):
        self._limit = limit
        self._num_inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> None:
        if not self._waiting and self._num_inside < self._limit():
            self._num_inside += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._look_again()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            else:
                self._waiting.remove(place)
            raise

    def leave(self) -> None:
        self._num_inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._num_inside < self._limit():
            place = self._waiting.popleft()
            if not place.done():
                self._num_inside += 1
                place.set_result(None)
            else:  # it is being cancelled, and removes itself
                self._waiting.appendleft(place)
                return

    def _look_again(self) -> None:
        """Admits those for whom the limit has risen, while any wait."""
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._admit()
        self._look_again()


class LineRun:
    """`prefix` begins the ids of requests, which end with the number of the line, from 1."""

    def __init__(
        self,
        path: Path,
        results: Results,
        line_format: LineFormat,
        answer: AnswerLine,
        gate: Gate,
        prefix: str,
    ):
        self._path = path
        self._results = results
        self._format = line_format
        self._answer = answer
        self._gate = gate
        self._prefix = prefix

    async def run(self) -> None:
        """Returns when every line has a result on disk. Raises what reading the input raises."""
        committing = asyncio.create_task(self._commit_often())
        try:
            async with asyncio.TaskGroup() as lines:
                for index, asked in read_lines(self._path):
                    if self._results.is_done(index):
                        continue
                    await self._gate.enter()
                    lines.create_task(self._run_line(index, asked))
                    while self._results.num_pending >= MAX_PENDING and not await self._commit():
                        await asyncio.sleep(RETRY_S)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):  # these lines are answered again
                await asyncio.to_thread(self._results.commit)
            raise
        finally:
            committing.cancel()
        await self._commit_all()

    async def _run_line(self, index: int, asked: InputLine) -> None:
        try:
            answer = await self._answer(asked, f"{self._prefix}{index + 1}")
        finally:
            self._gate.leave()
        line = self._format.answered(asked.custom_id, answer)
        outcome = "completed" if answer.is_success else "failed"
        self._results.add(index, outcome, line, is_error=self._format.is_error(answer))

    async def _commit_often(self) -> None:
        while True:
            is_written = await self._commit()
            await asyncio.sleep(COMMIT_S if is_written else RETRY_S)

    async def _commit(self) -> bool:
        """Returns whether the results are on disk."""
        try:
            await asyncio.to_thread(self._results.commit)
        except OSError as error:
            logger.error("results of a batch cannot be written and wait: %s", error)
            return False
        return True

    async def drop_rest(self, reason: Reason) -> None:
        """Gives every line without a result the one that says why it has none."""
        for index, asked in read_lines(self._path):
            if self._results.is_done(index):
                continue
            request_id = f"{self._prefix}{index + 1}"
            line = self._format.dropped(asked.custom_id, request_id, reason)
            is_error = self._format.is_error(None)
            self._results.add(index, "dropped", line or b"", is_error=is_error)
            if self._results.num_pending >= DROPPED_AT_ONCE:
                await self._commit_all()
        await self._commit_all()

    async def _commit_all(self) -> None:
        while not await self._commit():
            await asyncio.sleep(RETRY_S)
