"""Parses server-sent events: bytes as they arrive -> the data of complete events.

Must not know: HTTP, JSON, what the data means.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 64 * 2**20


class SseError(ValueError):
    """The data is not an event stream that fits in memory."""


class SseParser:
    """`feed` takes bytes cut anywhere and returns the data of complete events; `finish` ends the
    stream.

    Lines end with LF, CRLF or CR. Comments and the fields event, id and retry are skipped. Several
    data lines of an event are joined by LF.
    """

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # of the unfinished event
        self._after_cr = False  # a following LF belongs to the last line's CR

    def feed(self, data: bytes) -> list[bytes]:
        if self._after_cr and data[:1] == b"\n":
            data = data[1:]
        if not data:
            return []
        self._after_cr = data[-1:] == b"\r"
        lines = (self._rest + data).splitlines(keepends=True)  # bytes: only at LF, CR and CRLF
        self._rest = b"" if lines[-1][-1:] in b"\r\n" else lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise SseError(f"a line of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.rstrip(b"\r\n")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events

    def finish(self) -> list[bytes]:
        """Returns the event that the end cut short, for servers that omit the last blank line. The
        specification drops it.
        """
        return self.feed(b"\n\n")
