"""The results of a batch while it runs: two files of JSON lines, and a journal of what is complete.

Must not know: what a line says.

Results are appended to the output and error file, and then an entry of the journal states the
lengths of both files and the lines that have been answered. What follows the lengths in the last
entry has not been committed: it is cut off when the files are opened again, and those lines are
answered again. So each line is in the files once, whenever the process ends.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Literal

import msgspec

from ...ipc.operating_system import SYSTEM
from ...ipc.own_files import open_own

# A dropped line is one that is not answered any more.
Outcome = Literal["completed", "failed", "dropped"]


class Identity(msgspec.Struct):
    """The first line of a journal: what the results belong to."""

    input: str


class Commit(msgspec.Struct):
    """A further line of the journal. The lengths are in bytes, `lines` are numbers from 0."""

    output_bytes: int
    error_bytes: int
    lines: dict[Outcome, list[int]]


class OtherInputError(ValueError):
    """The results that exist belong to another input."""


class Results:
    """Owns the three files, which exist from here on. `identity` names the input.

    Raises OtherInputError, and OSError. Only `commit` may be called from another thread.
    """

    def __init__(self, output: Path, errors: Path, journal: Path, num_lines: int, identity: str):
        self.counts: dict[Outcome, int] = {"completed": 0, "failed": 0, "dropped": 0}
        self._done = bytearray(num_lines)  # 1 for lines that have a result, committed or not
        self._pending: list[tuple[int, Outcome, bytes, bool]] = []
        self._lock = threading.Lock()  # of the files
        last = Commit(0, 0, {})
        self._journal_bytes, last = self._replay(journal, identity, last)
        self._output_bytes, self._error_bytes = last.output_bytes, last.error_bytes
        self._files = [open_own(path, os.O_RDWR | os.O_CREAT) for path in (output, errors, journal)]
        for file, length in zip(self._files, self._lengths, strict=True):
            if os.fstat(file).st_size < length:
                raise OSError(f"{output} and {errors} have lost results that were committed")
        self._cut()
        if not self._journal_bytes:
            entry = msgspec.json.encode(Identity(identity)) + b"\n"
            _write(self._files[2], entry, 0)
            self._journal_bytes = len(entry)

    @property
    def _lengths(self) -> tuple[int, int, int]:
        return self._output_bytes, self._error_bytes, self._journal_bytes

    def _replay(self, journal: Path, identity: str, last: Commit) -> tuple[int, Commit]:
        """Returns the length of the journal's whole entries, and the last one."""
        length = 0
        try:
            file = open(open_own(journal), "rb")
        except FileNotFoundError:
            return 0, last
        with file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    if msgspec.json.decode(line, type=Identity).input != identity:
                        raise OtherInputError(f"{journal} is about another input")
                else:
                    last = msgspec.json.decode(line, type=Commit)
                    for outcome, lines in last.lines.items():
                        self.counts[outcome] += len(lines)
                        for index in lines:
                            self._done[index] = 1
                length += len(line)
        return length, last

    def is_done(self, index: int) -> bool:
        return bool(self._done[index])

    @property
    def num_pending(self) -> int:
        """Returns the number of results that are not committed."""
        return len(self._pending)

    def add(self, index: int, outcome: Outcome, line: bytes, *, is_error: bool) -> None:
        """Adds the result of a line, with its line break, to the error file or the output."""
        self._done[index] = 1
        self._pending.append((index, outcome, line, is_error))

    def commit(self) -> None:
        """Writes all results that have been added. Raises OSError, and then they stay pending."""
        with self._lock:
            pending, self._pending = self._pending, []
            if not pending:
                return
            try:
                self._write(pending)
            except BaseException:
                self._pending = pending + self._pending
                self._cut()
                raise

    def _write(self, pending: list[tuple[int, Outcome, bytes, bool]]) -> None:
        lines: dict[Outcome, list[int]] = {}
        for index, outcome, *_ in pending:
            lines.setdefault(outcome, []).append(index)
        lengths = list(self._lengths[:2])
        for number in range(2):
            if data := b"".join(line for *_, line, is_error in pending if is_error == number):
                _write(self._files[number], data, lengths[number])
                lengths[number] += len(data)
        entry = msgspec.json.encode(Commit(lengths[0], lengths[1], lines)) + b"\n"
        _write(self._files[2], entry, self._journal_bytes)
        self._output_bytes, self._error_bytes = lengths
        self._journal_bytes += len(entry)
        for outcome, numbers in lines.items():
            self.counts[outcome] += len(numbers)

    def _cut(self) -> None:
        for file, length in zip(self._files, self._lengths, strict=True):
            os.ftruncate(file, length)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def _write(file: int, data: bytes, offset: int) -> None:
    """Writes all of it, and waits until it is on the disk."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
    SYSTEM.write_through(file)
