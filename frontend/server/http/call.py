"""HttpCall: the state of one HTTP request in the server.

Must not know: routes, the engine.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from ....ipc.lora import LoRARequest
from ....ipc.params import MAX_TIMEOUT_S
from .errors import invalid

MAX_NAMES = 20  # maximum number of field names in one header
# A client's x-request-id must be printable ASCII without spaces to be accepted.
USERS_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class HttpCall:
    """The state of one request: app.py sets scope["state"]["call"]."""

    request_id: str  # sent as x-request-id of the response
    began: float  # start, by the event loop's clock
    task: asyncio.Task
    path: str = ""  # path of the URL
    tenant: str = ""  # digest of the key; never the key itself
    weight: float = 1.0  # of the key
    deadline: float | None = None  # from x-timeout-s, by time.monotonic()
    lora_request: LoRARequest | None = None  # the adapter that `model` names
    unknown_params: list[str] = field(default_factory=list)  # unknown fields of the body
    # The API defines these fields, and they have no effect here.
    ignored_params: list[str] = field(default_factory=list)
    num_body_bytes: int = 0  # bytes received so far
    body: bytearray | None = None  # received before the handler was chosen
    is_disconnected: bool = False
    # Where the server provides it (protocol.py), the future is done when the client has left.
    disconnected: asyncio.Future[None] | None = None
    watcher: asyncio.Task | None = None  # where the server does not
    # The server's ASGI callable. Once a response has started, no middleware modifies what is sent.
    send: Any = None
    chunk_writer: Any = None  # ChunkWriter of protocol.py, where the server provides one
    # By the event loop's clock, this is when the last piece of a stream was sent or, during a send,
    # when it began.
    last_sent: float = 0.0

    @property
    def suffix(self) -> str:
        """Returns the suffix of ids in the response: chatcmpl-<suffix>."""
        return self.request_id.removeprefix("req-")

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Returns the headers added to every response. `now` is by the event loop's clock."""
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % round(1000 * (now - self.began))),
        ]
        if self.path.startswith("/v1/messages"):
            headers.append((b"request-id", headers[0][1]))  # Anthropic's name of the header
        for name, params in (
            (b"x-unknown-params", self.unknown_params),
            (b"x-ignored-params", self.ignored_params),
        ):
            if params:
                shown = params[:MAX_NAMES]
                if len(params) > MAX_NAMES:
                    shown = [*shown, f"and {len(params) - MAX_NAMES} more"]
                # Replaces line breaks and everything else that a header must not contain.
                headers.append((name, ",".join(shown).encode("unicode_escape")[:2000]))
        return headers

    def push(self, write_down: Callable[[Any], bytes], item: Any) -> bool:
        """Writes the piece of a stream that `write_down` makes of `item`, without waking the task
        that feeds the stream.

        Returns False, with no side effect, if the piece cannot be written at once: before the
        stream's first piece, or when the client reads too slowly.
        """
        writer = self.chunk_writer
        if writer is None or not writer.is_ready():
            return False
        if piece := write_down(item):
            # The event loop has this clock. Looking up the running loop would cost a system call.
            self.last_sent = time.monotonic()
            writer.write(piece)
        return True


def call_of(request: Request) -> HttpCall:
    return request.scope["state"]["call"]


def read_deadline(headers: list[tuple[bytes, bytes]]) -> float | None:
    """Returns the end of the time that the client gives in x-timeout-s, by time.monotonic(). Raises
    ApiError 400 for a value that is no time.
    """
    for name, value in headers:
        if name == b"x-timeout-s":
            try:
                timeout_s = float(value)
            except ValueError:
                timeout_s = 0.0
            if not 0 < timeout_s <= MAX_TIMEOUT_S:
                raise invalid(
                    "x-timeout-s",
                    f"'x-timeout-s' must be a number of seconds greater than 0 and at most "
                    f"{MAX_TIMEOUT_S:g}.",
                )
            return time.monotonic() + timeout_s
    return None


def new_request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Returns the client's x-request-id if it is acceptable, else a new id."""
    for name, value in headers:
        if name == b"x-request-id" and USERS_ID.fullmatch(text := value.decode("latin-1")):
            return text
    return f"req-{secrets.token_hex(12)}"
